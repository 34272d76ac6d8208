"""Sampling parameters that are one number, each declared once. Pure: any core may import it.

What services check, the flags of the command line, the keys of a model's generation_config.json and
the columns of the worker's tables follow from here; protos/headrace/v1/common.proto has a field of
each name. Parameters that are lists, or that decide when a request ends, are declared where they
are used.
"""

import dataclasses
import enum
import math
from dataclasses import dataclass
from typing import Any


class Column(enum.Enum):
    """The type of a parameter in the worker's tables."""

    FLOAT32 = enum.auto()
    FLOAT64 = enum.auto()
    INT32 = enum.auto()


class Stage(enum.Enum):
    """The pass of the sampler that reads a parameter; the order is that of the passes."""

    ADJUST = enum.auto()  # changes whole rows of logits
    DRAW = enum.auto()  # decides which tokens may be drawn


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A number that a request may set.

    off: the value that changes nothing; a parameter that neither request nor model sets is off.
    low, high: what is allowed; low itself only if has_low. high may be infinity, a value may not.
    counts_tokens: the sampler must count a request's tokens for it.
    is_recommended: a model's generation_config.json may set it, under the same name.
    help: of the flag.
    """

    off: float
    low: float
    high: float
    has_low: bool = True
    column: Column
    stage: Stage
    counts_tokens: bool = False
    is_recommended: bool = True
    help: str
    name: str = ""  # that of the field of Numbers

    @property
    def is_whole(self) -> bool:
        return self.column is Column.INT32

    def allows(self, value: float) -> bool:
        """Whether a request may have this value."""
        is_low = self.low <= value if self.has_low else self.low < value
        return is_low and value <= self.high and value < math.inf

    @property
    def must(self) -> str:
        """What a value must be, for an error."""
        low = f"{'at least' if self.has_low else 'above'} {self.low:g}"
        if self.high == math.inf:
            return f"must be a finite number {'of ' if self.has_low else ''}{low}"
        if self.has_low:
            return f"must be between {self.low:g} and {self.high:g}"
        return f"must be {low} and at most {self.high:g}"


def _number(parameter: Parameter, **changes: Any) -> Any:
    """The field of a parameter, which has `changes` over the given one."""
    parameter = dataclasses.replace(parameter, **changes)
    return dataclasses.field(default=None, metadata={"parameter": parameter})


# What several parameters have in common.
_FACTOR = Parameter(
    off=1.0, low=0.0, high=math.inf, column=Column.FLOAT32, stage=Stage.ADJUST, help=""
)
_PENALTY = dataclasses.replace(
    _FACTOR, off=0.0, low=-2.0, high=2.0, counts_tokens=True, is_recommended=False
)
_SHARE = Parameter(off=1.0, low=0.0, high=1.0, column=Column.FLOAT64, stage=Stage.DRAW, help="")


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """The values of a request; None is the model's default, else off.

    Kernels take the columns in this order, each those of its stage.
    """

    repetition_penalty: float | None = _number(
        _FACTOR, has_low=False, counts_tokens=True, help="Above 1 makes repetitions less likely."
    )
    presence_penalty: float | None = _number(
        _PENALTY, help="-2 to 2; subtracted once from tokens in the output."
    )
    frequency_penalty: float | None = _number(_PENALTY, help="-2 to 2; subtracted per occurrence.")
    temperature: float | None = _number(_FACTOR, help="Randomness; 0 is greedy.")
    top_k: int | None = _number(
        _SHARE,
        off=0,
        low=0,
        high=2**32 - 1,
        column=Column.INT32,
        help="Sample from this many likeliest tokens; 0: all.",
    )
    top_p: float | None = _number(
        _SHARE, has_low=False, help="Sample from the likeliest tokens up to this sum."
    )
    min_p: float | None = _number(
        _SHARE, off=0.0, help="Least probability of a token, relative to the likeliest."
    )

    def number(self, name: str) -> float:
        """A parameter's value: off where none is set."""
        given: float | None = getattr(self, name)
        return _OFF_BY_NAME[name] if given is None else given


PARAMETERS: tuple[Parameter, ...] = tuple(
    dataclasses.replace(field.metadata["parameter"], name=field.name)
    for field in dataclasses.fields(Numbers)
)

_OFF_BY_NAME = {parameter.name: parameter.off for parameter in PARAMETERS}
