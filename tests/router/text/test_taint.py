"""Taint tracking: the text is what `str` makes it, and each character keeps its mark."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.text.taint import (
    CALLER,
    TEMPLATE,
    UNKNOWN,
    TaintedText,
    derived,
    is_tainted,
    join,
    marks_of,
    taint,
)

# Every character says itself whose it is: capitals and other odd ones are the caller's.
CALLERS = "ABAB \n\tẞİ"
texts = st.text("abab <|>,", max_size=6)
tainted_texts = st.lists(st.one_of(texts, st.text(CALLERS, max_size=4).map(taint)), max_size=5).map(
    lambda parts: join([taint(""), *parts])
)

OPERATIONS = {
    "slice": lambda text, other: text[1:-1],
    "step": lambda text, other: text[::-2],
    "add": lambda text, other: text + "ab",
    "radd": lambda text, other: "ab" + text,
    "repeat": lambda text, other: 2 * text * 1,
    "characters": lambda text, other: join(list(text)),
    "strip": lambda text, other: text.strip(),
    "strip some": lambda text, other: text.strip("aA<"),
    "lstrip": lambda text, other: text.lstrip(),
    "rstrip": lambda text, other: text.rstrip("bB"),
    "removeprefix": lambda text, other: text.removeprefix("a"),
    "removesuffix": lambda text, other: text.removesuffix("b"),
    "words": lambda text, other: join(text.split()),
    "words, twice": lambda text, other: join(text.split(None, 2)),
    "split": lambda text, other: join(text.split("a")),
    "split once": lambda text, other: text.split("A", 1)[-1],
    "rsplit": lambda text, other: text.rsplit("b", 1)[0],
    "rsplit words": lambda text, other: join(text.rsplit(None, 1)),
    "lines": lambda text, other: join(text.splitlines()),
    "lines kept": lambda text, other: join(text.splitlines(True)),
    "partition": lambda text, other: text.partition("|")[2],
    "rpartition": lambda text, other: join(text.rpartition("A")),
    "replace": lambda text, other: text.replace("a", "<>"),
    "replace by": lambda text, other: text.replace("b", other),
    "replace some": lambda text, other: text.replace("A", "", 2),
    "join": lambda text, other: text.join([other, "x", other]),
}


@pytest.mark.parametrize("name", OPERATIONS)
@given(text=tainted_texts, other=tainted_texts)
def test_text_and_marks_go_together(name, text, other):
    made = OPERATIONS[name](text, other)
    assert str.__str__(made) == OPERATIONS[name](str.__str__(text), str.__str__(other))
    of = dict.fromkeys(CALLERS, CALLER)
    # Blanks may be anyone's.
    for char, mark in zip(str.__str__(made), marks_of(made), strict=True):
        assert char == " " or mark == of.get(char, TEMPLATE)


@pytest.mark.parametrize("name", ["lower", "upper", "casefold", "swapcase", "title", "capitalize"])
@given(text=tainted_texts)
def test_case_changes_keep_the_marks_even_when_a_character_becomes_several(name, text):
    made = getattr(text, name)()
    plain = str.__str__(text)
    assert str.__str__(made) == getattr(plain, name)()
    if UNKNOWN not in made.marks:
        assert made.marks == "".join(
            mark * len(getattr(char, name)()) for char, mark in zip(plain, text.marks, strict=True)
        )
    else:
        assert len(made) != len(plain)


def test_a_tainted_text_is_the_text_to_all_who_ask():
    text = taint("user")
    assert text == "user"
    assert {"user": 1}[text] == 1
    assert text in ["system", "user"]
    assert isinstance(text, str)


def test_taint_reaches_into_messages_but_not_their_keys():
    [message] = taint([{"role": "user", "tools": [{"name": "f"}], "n": 1}])
    assert is_tainted(message["tools"][0]["name"])
    assert not any(map(is_tainted, message))
    assert message["n"] == 1


def test_what_other_operations_make_of_a_tainted_text_is_unknown():
    assert marks_of(derived("ab", taint("b"))) == "??"
    assert [marks_of(piece) for piece in derived(["a", "b"], taint("b"))] == ["?", "?"]
    assert derived("ab", "a", 1) == "ab"
    assert marks_of(derived("ab", "a", 1)) == "tt"
    assert derived(7, taint("b")) == 7


def test_parts_that_are_no_strings_are_joined_as_strings():
    assert join([1, "a", None]) == "1aNone"
    assert marks_of(join([1, taint("a"), [taint("b")]])) == "tc?????"
    assert type(join(["a", 1])) is str


def test_marks_are_as_long_as_their_text():
    assert TaintedText("ab", "tc").marks == "tc"
