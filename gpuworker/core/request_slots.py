"""Which request occupies each row, and the sampling settings of each row.

Sampling settings are columns indexed by row, so that a step gathers them with one vector operation;
settings that few requests use (biases, stop tokens, bad words) are kept in dictionaries by row.
Tokens and blocks are in `input_batch`.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpuworker.core.bad_words import BadWords
from gpuworker.core.plan import (
    AssignedRequest,
    Float32Array,
    Int32Array,
    Int64Array,
    PlanError,
    SamplingSettings,
)
from headrace.parameters import PARAMETERS, Column

BoolArray = NDArray[np.bool_]

NOT_ASKED = -1  # in the logprob columns

# Lower temperatures are greedy: dividing logits by them would leave only rounding errors.
MIN_TEMPERATURE = 1e-5

_TYPES: dict[Column, type[np.generic]] = {
    Column.FLOAT32: np.float32,
    Column.FLOAT64: np.float64,
    Column.INT32: np.int32,
}
# The columns that a sampler reads, in two tables, so that two `take`s gather a step's settings.
WORD_COLUMNS = (
    "slot",  # the row itself
    "is_drawn",  # 0 where the likeliest token is taken
    *(p.name for p in PARAMETERS if p.column is not Column.FLOAT64),
)
LONG_COLUMNS = (
    "row",  # the row itself
    "seed",  # the bits of an unsigned integer
    *(p.name for p in PARAMETERS if p.column is Column.FLOAT64),
)


@dataclass(frozen=True, slots=True)
class TokenBias:
    """A bias on the logits of some tokens."""

    token_ids: NDArray[np.int64]  # [num_biased]
    values: Float32Array  # [num_biased]


class RequestSlots:
    """The rows of the persistent batch: occupancy and sampling columns, each [max_num_seqs].

    Args:
        max_num_seqs: number of rows.
        vocab_size: token ids are in [0, vocab_size).
        eos_token_ids: tokens that end a request, unless the request ignores them.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self.max_num_seqs = max_num_seqs
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._order: Int32Array = np.arange(max_num_seqs, dtype=np.int32)
        self._last_index: Int32Array = np.zeros(max_num_seqs, dtype=np.int32)
        self.is_occupied: BoolArray = np.zeros(max_num_seqs, dtype=np.bool_)
        self.request_ids: list[str] = [""] * max_num_seqs
        # [len(WORD_COLUMNS), max_num_seqs] and [len(LONG_COLUMNS), max_num_seqs]; floats as bits.
        self.words: Int32Array = np.zeros((len(WORD_COLUMNS), max_num_seqs), dtype=np.int32)
        self.longs: Int64Array = np.zeros((len(LONG_COLUMNS), max_num_seqs), dtype=np.int64)
        self.words[WORD_COLUMNS.index("slot")] = np.arange(max_num_seqs)
        self.longs[LONG_COLUMNS.index("row")] = np.arange(max_num_seqs)
        self.is_drawn: Int32Array = self._column("is_drawn", np.int32)
        self.seed: NDArray[np.uint64] = self._column("seed", np.uint64)
        # Where the likeliest token is taken, the temperature is 0.
        self.number_by_name = {p.name: self._column(p.name, _TYPES[p.column]) for p in PARAMETERS}
        self.min_tokens: Int32Array = np.zeros(max_num_seqs, dtype=np.int32)
        self.num_logprobs: Int32Array = np.full(max_num_seqs, NOT_ASKED, dtype=np.int32)
        self.num_prompt_logprobs: Int32Array = np.full(max_num_seqs, NOT_ASKED, dtype=np.int32)
        self.has_penalties: BoolArray = np.zeros(max_num_seqs, dtype=np.bool_)
        self.bias_by_row: dict[int, TokenBias] = {}
        self.stop_token_ids_by_row: dict[int, NDArray[np.int64]] = {}
        self.bad_words_by_row: dict[int, BadWords] = {}

    @property
    def looks_back(self) -> bool:
        """Whether some request's next token depends on the order of its tokens (bad words)."""
        return any(words.looks_back for words in self.bad_words_by_row.values())

    def free(self, rows: Int32Array) -> None:
        """Empties rows.

        Raises:
            PlanError: a row is out of range or already empty.
        """
        self.check_occupied(rows, "freed_rows")
        self.is_occupied[rows] = False
        for row in rows.tolist():
            self.request_ids[row] = ""
            self.bias_by_row.pop(row, None)
            self.stop_token_ids_by_row.pop(row, None)
            self.bad_words_by_row.pop(row, None)

    def occupy(self, request: AssignedRequest) -> None:
        """Puts a request in its row.

        Raises:
            PlanError: the row is out of range or taken, or a setting names an impossible token.
        """
        row = request.row
        if not 0 <= row < self.max_num_seqs:
            raise PlanError(f"row_requests: row {row} is not in [0, {self.max_num_seqs})")
        if self.is_occupied[row]:
            raise PlanError(
                f"row_requests: row {row} is taken by {self.request_ids[row]!r}, "
                f"cannot place {request.request_id!r}"
            )
        self._set_columns(row, request.sampling)
        self._set_token_lists(row, request.sampling)
        self.request_ids[row] = request.request_id
        self.is_occupied[row] = True

    def clear(self) -> None:
        """Empties every row."""
        self.is_occupied[:] = False
        self.request_ids = [""] * self.max_num_seqs
        self.bias_by_row.clear()
        self.stop_token_ids_by_row.clear()
        self.bad_words_by_row.clear()

    def check_range(self, rows: Int32Array, field: str) -> None:
        """Checks that rows are in range; there must be at least one.

        Raises:
            PlanError: naming the field.
        """
        if rows.min() < 0 or rows.max() >= self.max_num_seqs:
            raise PlanError(f"{field}: rows must be in [0, {self.max_num_seqs})")

    def are_distinct(self, rows: Int32Array) -> bool:
        """Whether no row appears twice; all are in range."""
        if len(rows) > self.max_num_seqs:
            return False
        # Of equal rows the last assignment stays. This is cheaper than sorting or hashing.
        order = self._order[: len(rows)]
        self._last_index[rows] = order
        return bool((self._last_index[rows] == order).all())

    def check_occupied(self, rows: Int32Array, field: str) -> None:
        """Checks that rows are in range, distinct and occupied.

        Raises:
            PlanError: naming the field and the first bad row.
        """
        if not len(rows):
            return
        self.check_range(rows, field)
        if not self.are_distinct(rows):
            raise PlanError(f"{field}: a row appears twice")
        occupied = self.is_occupied[rows]
        if not occupied.all():
            raise PlanError(f"{field}: row {int(rows[~occupied][0])} is empty")

    def _column(self, name: str, dtype: type[np.generic]) -> NDArray[Any]:
        """A column of one of the tables, in its own type; writing to it writes to the table."""
        is_word = name in WORD_COLUMNS
        names, table = (WORD_COLUMNS, self.words) if is_word else (LONG_COLUMNS, self.longs)
        column: NDArray[Any] = table[names.index(name)].view(dtype)
        return column

    def _set_columns(self, row: int, sampling: SamplingSettings) -> None:
        for parameter in PARAMETERS:
            # Settings cross the wire as float32; a row set in another way must draw the same.
            value = sampling.number(parameter.name)
            column = self.number_by_name[parameter.name]
            column[row] = value if parameter.is_whole else np.float32(value)
        temperature = self.number_by_name["temperature"]
        self.is_drawn[row] = temperature[row] >= MIN_TEMPERATURE
        temperature[row] *= self.is_drawn[row]
        self.seed[row] = sampling.seed
        self.min_tokens[row] = sampling.min_tokens
        self.num_logprobs[row] = _or_not_asked(sampling.num_logprobs)
        self.num_prompt_logprobs[row] = _or_not_asked(sampling.num_prompt_logprobs)
        self.has_penalties[row] = any(
            sampling.number(p.name) != p.off for p in PARAMETERS if p.counts_tokens
        )

    def _set_token_lists(self, row: int, sampling: SamplingSettings) -> None:
        if sampling.logit_bias:
            biased = np.array([token for token, _ in sampling.logit_bias], dtype=np.int64)
            if biased.min() < 0 or biased.max() >= self._vocab_size:
                raise PlanError(f"logit_bias: token ids must be in [0, {self._vocab_size})")
            values = np.array([value for _, value in sampling.logit_bias], dtype=np.float32)
            self.bias_by_row[row] = TokenBias(biased, values)
        if sampling.min_tokens > 0:
            eos = () if sampling.ignore_eos else self._eos_token_ids
            stops = np.array([*sampling.stop_token_ids, *eos], dtype=np.int64)
            # A stop token outside the vocabulary can never be sampled: nothing to mask.
            in_range = (stops >= 0) & (stops < self._vocab_size)
            self.stop_token_ids_by_row[row] = np.unique(stops[in_range])
        if sampling.bad_token_ids:
            self.bad_words_by_row[row] = BadWords(sampling.bad_token_ids, self._vocab_size)


def _or_not_asked(value: int | None) -> int:
    return NOT_ASKED if value is None else value
