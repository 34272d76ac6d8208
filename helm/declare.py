"""How a value of the chart is declared: its default, its schema and its meaning."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

Schema: TypeAlias = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Value:
    """One value. schema is JSON Schema; text is a row of the table and a comment in values.yaml."""

    default: Any
    text: str
    schema: Schema


@dataclass(frozen=True, slots=True)
class Section:
    """Values under one key. Nobody may give a key that is not declared."""

    text: str
    values: Mapping[str, "Value | Section"]

    def schema(self, *, is_whole: bool = True) -> Schema:
        """The JSON Schema of the section; is_whole: templates read what has no default of its own.

        Helm takes a key away whose value is null, as of a section whose lines are all commented
        out, and `--reuse-values` knows no key that is new in the chart.
        """
        needed = [name for name, value in self.values.items() if _is_needed(value)]
        return {
            "type": "object",
            "additionalProperties": False,
            **({"required": needed} if is_whole and needed else {}),
            "properties": {
                name: value.schema(is_whole=is_whole)
                if isinstance(value, Section)
                else _described(value)
                for name, value in self.values.items()
            },
        }

    def rows(self, prefix: str = "") -> Iterator[tuple[str, Value]]:
        """Every value below with its whole name, e.g. ("router.service.port", ...)."""
        for name, value in self.values.items():
            if isinstance(value, Section):
                yield from value.rows(f"{prefix}{name}.")
            else:
                yield prefix + name, value


def _is_needed(value: Value | Section) -> bool:
    """Whether a template cannot do without; empty texts, lists and maps may be missing."""
    if isinstance(value, Section):
        return True
    return value.default != "" and not isinstance(value.default, dict | list)


def _described(value: Value) -> Schema:
    return {"description": value.text, **value.schema}


def text(default: str, meaning: str, *, pattern: str = "") -> Value:
    """Text; pattern is a regular expression for all of it."""
    return Value(default, meaning, {"type": "string"} | ({"pattern": pattern} if pattern else {}))


def choice(default: str, choices: Sequence[str], meaning: str) -> Value:
    """One of the choices."""
    return Value(default, meaning, {"type": "string", "enum": list(choices)})


def integer(default: int, meaning: str, *, least: int = 0, most: int | None = None) -> Value:
    """A whole number."""
    bounds = {"minimum": least} | ({} if most is None else {"maximum": most})
    return Value(default, meaning, {"type": "integer", **bounds})


def number(default: float, meaning: str, *, most: float | None = None) -> Value:
    """A number that is not negative."""
    bounds: Schema = {"minimum": 0} | ({} if most is None else {"maximum": most})
    return Value(default, meaning, {"type": "number", **bounds})


def number_or_percent(default: int | str, meaning: str) -> Value:
    """A number of pods, or a part of them."""
    return Value(
        default,
        meaning,
        {"type": ["integer", "string"], "minimum": 1, "pattern": "^[1-9][0-9]?%$"},
    )


def switch(default: bool, meaning: str) -> Value:
    """True or false."""
    return Value(default, meaning, {"type": "boolean"})


def quantity(default: str, meaning: str) -> Value:
    """An amount as Kubernetes writes it, e.g. 10Gi."""
    pattern = r"^([0-9]+(\.[0-9]+)?([EPTGMk]i?|Ki|m)?)?$"
    return Value(default, meaning, {"type": "string", "pattern": pattern})


def strings(default: Sequence[str], meaning: str) -> Value:
    """A list of texts."""
    return Value(list(default), meaning, {"type": "array", "items": {"type": "string"}})


def string_map(default: Mapping[str, str], meaning: str) -> Value:
    """Texts by name."""
    schema = {"type": "object", "additionalProperties": {"type": "string"}}
    return Value(dict(default), meaning, schema)


def kube_object(default: Mapping[str, Any], meaning: str) -> Value:
    """Part of a Kubernetes object, which the API server checks."""
    return Value(dict(default), meaning, {"type": "object"})


def kube_list(default: Sequence[Any], meaning: str, *, required: str = "") -> Value:
    """A list of parts of Kubernetes objects; each has the key `required`."""
    item: Schema = {"type": "object"} | ({"required": [required]} if required else {})
    return Value(list(default), meaning, {"type": "array", "items": item})


def environment(meaning: str) -> Value:
    """Environment variables, as in a container."""
    item = {
        "type": "object",
        "required": ["name"],
        "additionalProperties": False,
        "properties": {
            "name": {"type": "string"},
            "value": {"type": "string"},
            "valueFrom": {"type": "object"},
        },
    }
    return Value([], meaning, {"type": "array", "items": item})


def resources(default: Mapping[str, Any], meaning: str) -> Value:
    """Requests and limits of a container."""
    amounts = {"type": "object", "additionalProperties": {"type": ["string", "number"]}}
    return Value(
        dict(default),
        meaning,
        {
            "type": "object",
            "additionalProperties": False,
            "properties": {
                "limits": amounts,
                "requests": amounts,
                "claims": {"type": "array", "items": {"type": "object"}},
            },
        },
    )
