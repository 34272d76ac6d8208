"""The forward pass of a step: kernel by kernel, or as a CUDA graph captured before.

A step in which every token is sampled (decodes and drafts to verify) is padded to one of a few
sizes, and that size's graph is replayed. Other steps launch their kernels one by one. Nothing here
waits for the device.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from gpuworker.attention.interface import AttentionBackend, LayerKv, PreparedStep, StepShape
from gpuworker.core.input_batch import FlatBatch
from gpuworker.core.plan import EMPTY_INT32
from gpuworker.core.request_slots import RequestSlots
from gpuworker.device.graphs import GraphRecorder, StepGraph
from gpuworker.models.decoder import Decoder
from gpuworker.models.linear import padded_rows
from gpuworker.models.loader import ReportCount
from gpuworker.step_inputs import InputStaging, SampleColumns, StepInputs, StepSizes


@dataclass(frozen=True, slots=True)
class Outputs:
    """Results of a step on the device; valid until the next step starts."""

    hidden: torch.Tensor | None  # [num_padded_tokens, hidden_size]; None of a replayed step
    logits: torch.Tensor  # [num_samples, vocab_size] float32; may be changed
    samples: SampleColumns


class Forward:
    """Runs the model's steps.

    Args:
        decoder: the model.
        attention: the backend.
        kv: one pool per layer; changed by every step.
        staging: sends inputs to the device.
        last_tokens: [max_num_seqs] int32, each row's last token on the device.
    """

    def __init__(
        self,
        decoder: Decoder,
        attention: AttentionBackend,
        kv: Sequence[LayerKv],
        staging: InputStaging,
        last_tokens: torch.Tensor,
    ) -> None:
        self.attention = attention
        self.kv = kv
        self._decoder = decoder
        self._staging = staging
        self._last_tokens = last_tokens
        self._graph_sizes: tuple[int, ...] = ()
        self._graphs: dict[int, StepGraph] = {}
        # [largest graph size, vocab_size]; shared, because each graph would keep a copy of its own.
        self._graph_logits = torch.empty(0, device=decoder.device)

    def capture(self, sizes: Sequence[int], recorder: GraphRecorder, progress: ReportCount) -> None:
        """Captures steps without chunks, the largest first: smaller steps reuse the memory.

        Args:
            sizes: padded numbers of tokens, in rising order.
            recorder: of the device.
            progress: told how many sizes are captured.
        """
        if not sizes:
            return
        if len(self._graph_logits) < sizes[-1]:
            shape = (sizes[-1], self._decoder.config.vocab_size)
            self._graph_logits = torch.empty(
                shape, dtype=torch.float32, device=self._decoder.device
            )
        for done, size in enumerate(reversed(sizes)):
            progress(done, len(sizes))
            self._graphs[size] = self._record(size, recorder, self._graph_logits[:size])
        progress(len(sizes), len(sizes))
        self._graph_sizes = tuple(sizes)

    def run(self, batch: FlatBatch, slots: RequestSlots) -> Outputs:
        """Starts a step."""
        num_samples, num_drafts = len(batch.sample_rows), len(batch.draft_token_ids)
        is_sampled = num_samples == batch.num_tokens
        num_padded = self._num_padded(batch.num_tokens, is_sampled)
        sizes = StepSizes(
            num_padded_tokens=num_padded,
            num_logits=padded_rows(num_samples) if num_samples else 0,
            num_samples=num_samples,
            num_verified=batch.num_reqs if num_drafts else 0,
            num_drafts=num_drafts,
        )
        inputs = self._staging.send(batch, slots, sizes)
        prepared = self.attention.prepare(StepShape.of(batch, num_padded))
        if is_sampled and prepared.has_fixed_layout and num_padded in self._graphs:
            self._graphs[num_padded].replay()
            return Outputs(None, self._graph_logits[:num_samples], inputs.samples)
        hidden = self._hidden(inputs, prepared)
        logits = self._logits_of_samples(hidden, inputs, batch)
        return Outputs(hidden, logits, inputs.samples)

    def logits(self, hidden: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        """Logits of some tokens of the step just started: [len(indices), vocab_size].

        Args:
            hidden: [num_padded_tokens, hidden_size].
            indices: of tokens, on the device.
        """
        count = len(indices)
        missing = padded_rows(count) - count
        padded = torch.cat((indices, indices[:1].expand(missing)))
        return self._decoder.logits(hidden.index_select(0, padded))[:count]

    def _num_padded(self, num_tokens: int, is_sampled: bool) -> int:
        """The number of tokens that a step is padded to; is_sampled: every token is sampled."""
        index = bisect_left(self._graph_sizes, num_tokens)
        if is_sampled and index < len(self._graph_sizes):
            return self._graph_sizes[index]
        return padded_rows(num_tokens)

    def _hidden(self, inputs: StepInputs, prepared: PreparedStep) -> torch.Tensor:
        token_ids = fed(inputs.token_ids, self._last_tokens)
        return self._decoder.forward(token_ids.long(), inputs.positions.long(), self.kv, prepared)

    def _logits_of_samples(
        self, hidden: torch.Tensor, inputs: StepInputs, batch: FlatBatch
    ) -> torch.Tensor:
        """[num_samples, vocab_size]."""
        num_samples = len(batch.sample_rows)
        if not num_samples:
            return torch.empty(0, self._decoder.config.vocab_size, device=hidden.device)
        if num_samples != batch.num_tokens:
            hidden = hidden.index_select(0, inputs.logits_indices)
        return self._decoder.logits(hidden)[:num_samples]

    def _record(self, size: int, recorder: GraphRecorder, logits: torch.Tensor) -> StepGraph:
        """Captures a step of padding only, at the addresses that every step of its size uses."""
        inputs = self._staging.at(StepSizes(size, 0, 0))
        prepared = self.attention.prepare(_padding_only(size))

        def run() -> None:
            logits.copy_(self._decoder.logits(self._hidden(inputs, prepared)))

        return recorder.record(run)


def fed(token_ids: torch.Tensor, last_tokens: torch.Tensor) -> torch.Tensor:
    """Token ids, with tokens that the host does not know yet read from the last step's output.

    Args:
        token_ids: [num_tokens] int32; -1 - row stands for that row's last token.
        last_tokens: [max_num_seqs] int32.
    """
    rows = token_ids.bitwise_not().clamp_(min=0)
    return torch.where(token_ids < 0, last_tokens.index_select(0, rows), token_ids)


def _padding_only(num_padded_tokens: int) -> StepShape:
    """A step without requests."""
    nothing: NDArray[np.int64] = np.empty(0, dtype=np.int64)
    return StepShape(
        np.zeros(1, dtype=np.int32),
        EMPTY_INT32,
        nothing,
        np.zeros((0, 1), dtype=np.int32),
        num_padded_tokens,
    )
