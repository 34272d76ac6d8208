"""The batched sampler: chooses one token for each sample of a step, on the device.

The sampler does not wait for the device. State that later steps need stays on the device: the last
token of each row and the token counts of rows with penalties.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from gpuworker.core.input_batch import BatchLimits, FlatBatch, InputBatch
from gpuworker.core.plan import AssignedRequest, Int32Array
from gpuworker.core.ragged import starts
from gpuworker.device.transfers import Transfers
from gpuworker.kernels.ops import Adjustments, Ops
from gpuworker.sampling.edits import logit_edits
from gpuworker.sampling.penalties import PenaltyState
from gpuworker.step_inputs import SampleColumns


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """Sampled tokens on the device; a token is invalid where is_finite is False."""

    token_ids: torch.Tensor  # [num_samples] int32
    is_finite: torch.Tensor  # [num_samples] bool
    num_kept: torch.Tensor | None  # [num_reqs] int32; None if no drafts were verified


class Sampler:
    """Chooses tokens by the rows' settings.

    Args:
        ops: the kernels of the device.
        limits: sizes of the persistent batch.
        device: the device of the logits.
        transfers: copies to the device.
    """

    def __init__(
        self, ops: Ops, limits: BatchLimits, device: torch.device, transfers: Transfers
    ) -> None:
        self._ops = ops
        self._transfers = transfers
        self._penalties = PenaltyState(limits.max_num_seqs, limits.vocab_size, device, transfers)
        self.last_tokens = torch.zeros(limits.max_num_seqs, dtype=torch.int32, device=device)
        # For steps in which no sample has a grammar, and for samples without drafts before them.
        self._no_grammars = torch.full(
            (limits.max_num_batched_tokens,), -1, dtype=torch.int32, device=device
        )
        self._none = torch.zeros(limits.max_num_batched_tokens, dtype=torch.int32, device=device)
        self._no_bits = torch.zeros((1, 1), dtype=torch.int32, device=device)

    def reset_rows(self, requests: Sequence[AssignedRequest], rows: InputBatch) -> None:
        """Initializes the penalty state of requests that were newly assigned to rows."""
        for request in requests:
            if rows.slots.has_penalties[request.row]:
                self._penalties.reset_row(request)

    def sample(
        self, logits: torch.Tensor, columns: SampleColumns, batch: FlatBatch, rows: InputBatch
    ) -> SampledTokens:
        """Chooses a token for each of a step's samples.

        Args:
            logits: [num_samples, vocab_size] float32; changed in place.
            columns: the samples' columns.
            batch: the step.
            rows: settings of every row.
        """
        # The sum is not finite if any logit is not, and computing the sum reads the logits once.
        is_finite = torch.isfinite(logits.sum(-1))
        if not len(logits):
            # A kernel cannot be launched with an empty grid.
            return SampledTokens(columns.slots, is_finite, None)
        if (edits := logit_edits(batch, rows, self._transfers)) is not None:
            self._ops.edit_logits(logits, edits)
        has_penalties = bool(rows.slots.has_penalties[batch.sample_rows].any())
        if has_penalties or rows.slots.is_drawn[batch.sample_rows].any():
            self._ops.adjust_logits(logits, self._adjustments(columns))
        token_ids = self._ops.sample(logits, columns.draws).masked_fill_(~is_finite, 0)
        if columns.verification is not None:
            num_kept = self._ops.accept(token_ids, columns.verification)
            return SampledTokens(token_ids, is_finite, num_kept)
        self.last_tokens.index_copy_(0, columns.rows, token_ids)
        if has_penalties:
            self._penalties.count(columns.rows, token_ids.long())
        return SampledTokens(token_ids, is_finite, None)

    def count_accepted(
        self, batch: FlatBatch, counts: Int32Array, token_ids: Int32Array, rows: InputBatch
    ) -> None:
        """Adds the accepted tokens of a step with drafts to the counts of rows with penalties.

        Args:
            batch: the step.
            counts: [num_reqs] how many of each request's tokens were kept.
            token_ids: [sum(counts)] the kept tokens, on the host.
            rows: settings of every row.
        """
        first_tokens = starts(counts)
        for rank in range(int(counts.max(initial=0))):
            members = np.flatnonzero((counts > rank) & rows.slots.has_penalties[batch.rows])
            if len(members):
                self._penalties.count(
                    self._transfers.to_device(batch.rows[members].astype(np.int64)),
                    self._transfers.to_device(
                        token_ids[first_tokens[members] + rank].astype(np.int64)
                    ),
                )

    def _adjustments(self, columns: SampleColumns) -> Adjustments:
        num_samples = len(columns.rows)
        draft_starts = draft_counts = self._none[:num_samples]
        drafts = self._none
        if columns.verification is not None:
            draft_starts, draft_counts = columns.draft_starts, columns.draft_counts
            drafts = columns.verification.drafts
        return Adjustments(
            slots=columns.slots,
            output_counts=self._penalties.output_counts,
            prompt_bits=self._penalties.prompt_bits,
            grammar_rows=self._no_grammars[:num_samples],
            grammar_bits=self._no_bits,
            draft_starts=draft_starts,
            draft_counts=draft_counts,
            drafts=drafts,
            numbers=columns.adjustments,
        )
