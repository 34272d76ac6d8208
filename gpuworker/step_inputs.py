"""A step's integers on the device: tokens, samples, settings, drafts; one copy for all.

Where each section begins depends on the step's sizes alone, so that a CUDA graph finds the inputs
of every step of its size at the same addresses.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from gpuworker.core.input_batch import BatchLimits, FlatBatch
from gpuworker.core.plan import Int32Array
from gpuworker.core.ragged import ranks, starts
from gpuworker.core.request_slots import LONG_COLUMNS, WORD_COLUMNS, RequestSlots
from gpuworker.device.staging import StagingRing
from gpuworker.kernels.ops import Draws, Verification
from headrace.parameters import PARAMETERS, Column, Stage

# Kernels are compiled for sections that begin at multiples of 16 bytes.
_ALIGNED = 4
# After the columns of the rows: the drafts and the number of output tokens before each sample.
_NUM_WORDS = len(WORD_COLUMNS) + 2
_NUM_LONGS = len(LONG_COLUMNS) + 1
_NUM_VERIFICATION_COLUMNS = 3
# Serving takes a few hundred sizes; views of each are made once.
_NUM_KEPT_VIEWS = 1024

_Array = TypeVar("_Array", Int32Array, torch.Tensor)


@dataclass(frozen=True, slots=True)
class StepSizes:
    """The sizes that decide where a step's sections begin."""

    num_padded_tokens: int
    num_logits: int  # rows of hidden states that logits are made of, padding included
    num_samples: int
    num_verified: int = 0  # requests, when some have drafts to verify
    num_drafts: int = 0


@dataclass(frozen=True, slots=True)
class SampleColumns:
    """The sampler's inputs; [num_samples] each unless said otherwise."""

    rows: torch.Tensor  # int64, row of the persistent batch
    slots: torch.Tensor  # int32, the same
    adjustments: Mapping[str, torch.Tensor]  # the numbers of Stage.ADJUST, by name
    draft_starts: torch.Tensor  # int32, set where there are drafts
    draft_counts: torch.Tensor  # int32, likewise
    draws: Draws
    verification: Verification | None  # None where there are no drafts


@dataclass(frozen=True, slots=True)
class StepInputs:
    """A step on the device, valid until the next step is sent."""

    token_ids: torch.Tensor  # [num_padded_tokens] int32; negative where `core` says unknown
    positions: torch.Tensor  # [num_padded_tokens] int32
    logits_indices: torch.Tensor  # [num_logits] int32, set where not every token is sampled
    samples: SampleColumns


class InputStaging:
    """Packs steps and sends them.

    Args:
        limits: of a step.
        device: the model's device.
    """

    def __init__(self, limits: BatchLimits, device: torch.device) -> None:
        # A step has no more samples, and no more drafts, than tokens; padding adds a third or 64.
        most = max(limits.max_num_batched_tokens * 4 // 3, limits.max_num_batched_tokens + 64)
        largest = StepSizes(most, most, most, limits.max_num_seqs, most)
        self._ring = StagingRing(_sections(largest).end, device)
        self._views = lru_cache(_NUM_KEPT_VIEWS)(self._make_views)

    def send(self, batch: FlatBatch, slots: RequestSlots, sizes: StepSizes) -> StepInputs:
        """Starts the copy of a step, which overwrites the previous step in stream order."""
        sections = _sections(sizes)
        values = self._ring.reserve(sections.end)
        _fill(sections.token_ids(values), batch.token_ids)
        _fill(sections.positions(values), batch.positions)
        if batch.num_tokens != sizes.num_samples:
            _fill(sections.logits_indices(values), batch.logits_indices)
        if sizes.num_samples:
            _fill_samples(sections, values, batch, slots)
        if sizes.num_verified:
            _fill_drafts(sections, values, batch)
        self._ring.send()
        return self._views(sizes)

    def at(self, sizes: StepSizes) -> StepInputs:
        """The device's views of steps of these sizes."""
        return self._views(sizes)

    def _make_views(self, sizes: StepSizes) -> StepInputs:
        sections, buffer = _sections(sizes), self._ring.device_buffer
        words = sections.words(buffer)
        longs = sections.longs(buffer).view(torch.int64)
        floats, doubles = words.view(torch.float32), longs.view(torch.float64)

        tables = {Column.INT32: words, Column.FLOAT32: floats, Column.FLOAT64: doubles}

        def column(table: torch.Tensor, name: str) -> torch.Tensor:
            names = WORD_COLUMNS if name in WORD_COLUMNS else LONG_COLUMNS
            return table[names.index(name), : sizes.num_samples]

        def numbers(stage: Stage) -> dict[str, torch.Tensor]:
            return {
                p.name: column(tables[p.column], p.name) for p in PARAMETERS if p.stage is stage
            }

        verification = None
        if sizes.num_verified:
            sample_starts, counts, firsts = sections.verification(buffer)[:, : sizes.num_verified]
            verification = Verification(
                sample_starts=sample_starts,
                num_samples=counts,
                draft_starts=firsts,
                drafts=sections.drafts(buffer),
            )
        samples = SampleColumns(
            rows=column(longs, "row"),
            slots=column(words, "slot"),
            adjustments=numbers(Stage.ADJUST),
            draft_starts=words[-2, : sizes.num_samples],
            draft_counts=words[-1, : sizes.num_samples],
            draws=Draws(
                seeds=column(longs, "seed"),
                positions=longs[-1, : sizes.num_samples],
                is_drawn=column(words, "is_drawn"),
                numbers=numbers(Stage.DRAW),
            ),
            verification=verification,
        )
        return StepInputs(
            sections.token_ids(buffer),
            sections.positions(buffer),
            sections.logits_indices(buffer),
            samples,
        )


@dataclass(frozen=True, slots=True)
class _StepSections:
    """Where each section of a step begins, in 32-bit integers, and views of the sections."""

    sizes: StepSizes
    starts: tuple[int, ...]
    width: int  # columns of the samples' tables

    @property
    def end(self) -> int:
        return self.starts[-1]

    def token_ids(self, values: _Array) -> _Array:
        return self._section(values, 0, self.sizes.num_padded_tokens)

    def positions(self, values: _Array) -> _Array:
        return self._section(values, 1, self.sizes.num_padded_tokens)

    def logits_indices(self, values: _Array) -> _Array:
        return self._section(values, 2, self.sizes.num_logits)

    def words(self, values: _Array) -> _Array:
        """[_NUM_WORDS, width]."""
        return self._section(values, 3, _NUM_WORDS * self.width).reshape(_NUM_WORDS, -1)

    def longs(self, values: _Array) -> _Array:
        """[_NUM_LONGS, 2 * width], two integers each."""
        return self._section(values, 4, 2 * _NUM_LONGS * self.width).reshape(_NUM_LONGS, -1)

    def verification(self, values: _Array) -> _Array:
        """[_NUM_VERIFICATION_COLUMNS, requests and padding]."""
        size = _NUM_VERIFICATION_COLUMNS * _aligned(self.sizes.num_verified)
        return self._section(values, 5, size).reshape(_NUM_VERIFICATION_COLUMNS, -1)

    def drafts(self, values: _Array) -> _Array:
        return self._section(values, 6, self.sizes.num_drafts)

    def _section(self, values: _Array, number: int, size: int) -> _Array:
        start = self.starts[number]
        return values[start : start + size]


@lru_cache(_NUM_KEPT_VIEWS)
def _sections(sizes: StepSizes) -> _StepSections:
    width = max(_aligned(sizes.num_samples), _ALIGNED)  # torch cannot look at nothing as int64
    lengths = (
        _aligned(sizes.num_padded_tokens),
        _aligned(sizes.num_padded_tokens),
        _aligned(sizes.num_logits),
        _NUM_WORDS * width,
        2 * _NUM_LONGS * width,
        _NUM_VERIFICATION_COLUMNS * _aligned(sizes.num_verified),
        _aligned(sizes.num_drafts),
    )
    starts = np.cumsum((0, *lengths)).tolist()
    return _StepSections(sizes, tuple(starts), width)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


def _fill(section: Int32Array, values: NDArray[np.integer]) -> None:
    """Values, then zeros."""
    section[: len(values)] = values
    section[len(values) :] = 0


def _fill_samples(
    sections: _StepSections, values: Int32Array, batch: FlatBatch, slots: RequestSlots
) -> None:
    """The settings of the rows that sample, and how far each is."""
    words, longs = sections.words(values), sections.longs(values).view(np.int64)
    count = sections.sizes.num_samples
    # Rows were checked: clipping saves numpy a copy.
    np.take(slots.words, batch.sample_rows, 1, words[: len(WORD_COLUMNS), :count], "clip")
    np.take(slots.longs, batch.sample_rows, 1, longs[: len(LONG_COLUMNS), :count], "clip")
    longs[-1, :count] = batch.sample_positions


def _fill_drafts(sections: _StepSections, values: Int32Array, batch: FlatBatch) -> None:
    """Which drafts precede each sample, and which samples each request has."""
    words, verification = sections.words(values), sections.verification(values)
    num_samples, num_drafts = batch.num_samples, batch.num_draft_tokens
    firsts = starts(num_drafts)
    verification[:, : batch.num_reqs] = starts(num_samples), num_samples, firsts
    count = sections.sizes.num_samples
    words[-2, :count] = np.repeat(firsts, num_samples)
    words[-1, :count] = ranks(num_samples)
    sections.drafts(values)[:] = batch.draft_token_ids
