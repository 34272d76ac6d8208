"""Taint tracking for chat templates: which characters of a prompt the caller wrote.

The strings of the messages are passed to a template as `TaintedText`. The operations that templates
use (concatenation, slices, strip, split, replace, join, changes of case) keep one mark per
character, so each character of the rendered prompt is known to be the template's or the caller's.
The result of any other operation is marked UNKNOWN as a whole.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

TEMPLATE = "t"
CALLER = "c"
UNKNOWN = "?"


class TaintedText(str):
    """A string with one mark per character; compares and hashes as the plain string."""

    __slots__ = ("marks",)

    marks: str

    def __new__(cls, text: str, marks: str) -> "TaintedText":
        """marks: as long as the text, each TEMPLATE, CALLER or UNKNOWN."""
        tainted = super().__new__(cls, text)
        tainted.marks = marks
        return tainted

    def __str__(self) -> str:
        # `str(x)` keeps the class and its marks: Jinja2 calls `str` on every value it writes.
        return self

    def __getitem__(self, key: Any) -> "TaintedText":
        return TaintedText(str.__getitem__(self, key), self.marks[key])

    def __iter__(self) -> Iterator[str]:
        return map(TaintedText, str.__iter__(self), self.marks)

    def __add__(self, other: str) -> "TaintedText":
        return TaintedText(str.__add__(self, other), self.marks + marks_of(other))

    def __radd__(self, other: str) -> "TaintedText":
        return TaintedText(str.__add__(other, self), marks_of(other) + self.marks)

    def __mul__(self, count: Any) -> "TaintedText":
        return TaintedText(str.__mul__(self, count), self.marks * count)

    __rmul__ = __mul__

    def _from(self, begin: int, text: str) -> "TaintedText":
        return TaintedText(text, self.marks[begin : begin + len(text)])

    def strip(self, chars: str | None = None, /) -> "TaintedText":
        return self.lstrip(chars).rstrip(chars)

    def lstrip(self, chars: str | None = None, /) -> "TaintedText":
        rest = str.lstrip(self, chars)
        return self._from(len(self) - len(rest), rest)

    def rstrip(self, chars: str | None = None, /) -> "TaintedText":
        return self._from(0, str.rstrip(self, chars))

    def removeprefix(self, prefix: str, /) -> "TaintedText":
        rest = str.removeprefix(self, prefix)
        return self._from(len(self) - len(rest), rest)

    def removesuffix(self, suffix: str, /) -> "TaintedText":
        return self._from(0, str.removesuffix(self, suffix))

    def split(self, sep: str | None = None, maxsplit: Any = -1) -> list[str]:
        return self._pieces(str.split(self, sep, maxsplit), sep)

    def rsplit(self, sep: str | None = None, maxsplit: Any = -1) -> list[str]:
        return self._pieces(str.rsplit(self, sep, maxsplit), sep)

    def splitlines(self, keepends: bool = False) -> list[str]:
        lines = str.splitlines(self, keepends=True)
        begins = itertools.accumulate(map(len, lines), initial=0)
        return list(map(self._from, begins, str.splitlines(self, keepends)))

    def partition(self, sep: str, /) -> tuple[str, str, str]:
        return self._three(str.partition(self, sep))

    def rpartition(self, sep: str, /) -> tuple[str, str, str]:
        return self._three(str.rpartition(self, sep))

    def replace(self, old: str, new: str, count: Any = -1, /) -> "TaintedText":
        if not old:
            return _unknown(str.replace(self, old, new, count))
        return TaintedText(new, marks_of(new)).join(self.split(old, count))

    def join(self, parts: Iterable[str], /) -> "TaintedText":
        parts = list(parts)
        return TaintedText(str.join(self, parts), self.marks.join(map(marks_of, parts)))

    def lower(self) -> "TaintedText":
        return self._recased("lower")

    def upper(self) -> "TaintedText":
        return self._recased("upper")

    def casefold(self) -> "TaintedText":
        return self._recased("casefold")

    def swapcase(self) -> "TaintedText":
        return self._recased("swapcase")

    def title(self) -> "TaintedText":
        return self._recased("title")

    def capitalize(self) -> "TaintedText":
        return self._recased("capitalize")

    def _pieces(self, pieces: list[str], sep: str | None) -> list[str]:
        """Marks the pieces of a split, which are consecutive with separators between."""
        found: list[str] = []
        begin = 0
        for piece in pieces:
            begin = begin if sep is not None else str.find(self, piece, begin)
            found.append(self._from(begin, piece))
            begin += len(piece) + len(sep or "")
        return found

    def _three(self, parts: tuple[str, str, str]) -> tuple[str, str, str]:
        left, sep, right = parts
        begin = len(left) + len(sep)
        return self._from(0, left), self._from(len(left), sep), self._from(begin, right)

    def _recased(self, method: str) -> "TaintedText":
        recase = getattr(str, method)
        text = recase(self)
        if len(text) == len(self):
            return TaintedText(text, self.marks)
        # Some characters become several, e.g. German sharp s in upper case.
        marks = "".join(
            mark * len(recase(char))
            for char, mark in zip(str.__iter__(self), self.marks, strict=True)
        )
        return TaintedText(text, marks) if len(marks) == len(text) else _unknown(text)


def marks_of(text: str) -> str:
    """One mark per character; a plain string is marked TEMPLATE."""
    return text.marks if isinstance(text, TaintedText) else TEMPLATE * len(text)


def taint(value: Any) -> Any:
    """The value with every string in it, except keys of mappings, marked CALLER."""
    match value:
        case str():
            return TaintedText(value, CALLER * len(value))
        case Mapping():
            return {key: taint(item) for key, item in value.items()}
        case list() | tuple():
            return [taint(item) for item in value]
    return value


def plain(text: str) -> str:
    """The same string without marks."""
    return str.__str__(text)


def is_tainted(value: Any) -> bool:
    """Whether the value is, or holds, text that the caller wrote."""
    match value:
        case TaintedText():
            return True
        case Mapping():
            return any(map(is_tainted, value.values()))
        case list() | tuple():
            return any(map(is_tainted, value))
    return False


def derived(result: Any, *sources: Any) -> Any:
    """The result of an operation that keeps no marks: UNKNOWN if a source is tainted."""
    if not isinstance(result, (str, list, tuple)) or isinstance(result, TaintedText):
        return result
    return _as_unknown(result) if is_tainted(sources) else result


def join(parts: Iterable[Any]) -> str:
    """Concatenates the parts as strings, with their marks."""
    texts = [part if isinstance(part, str) else derived(str(part), part) for part in parts]
    if any(isinstance(text, TaintedText) for text in texts):
        return TaintedText("", "").join(texts)
    return "".join(texts)


def _as_unknown(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(map(_as_unknown, value))
    return _unknown(value) if type(value) is str else value


def _unknown(text: str) -> TaintedText:
    return TaintedText(text, UNKNOWN * len(text))
