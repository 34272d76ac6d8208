"""Places to sample from: a batch without a model, each place with its own settings."""

from collections.abc import Sequence

import numpy as np
import torch

from gpuworker.core.input_batch import BatchLimits, FlatBatch, InputBatch
from gpuworker.core.plan import RowRequest, SamplingSettings, StepPlan
from gpuworker.sampling.sampler import sample
from tests.gpuworker.driver import int32


def sampled(
    logits: torch.Tensor,
    settings: Sequence[SamplingSettings],
    *,
    tokens: Sequence[Sequence[int]] | None = None,
    num_prompt_tokens: int = 1,
    eos: tuple[int, ...] = (),
) -> list[int]:
    """One token for each row of logits, [num_rows, vocab_size]; tokens are the rows' so far."""
    num_rows, vocab_size = logits.shape
    tokens = tokens or [[0]] * num_rows
    rows, batch = make_places(settings, tokens, vocab_size, num_prompt_tokens, eos)
    return sample(logits.clone(), batch, rows).token_ids.tolist()


def make_places(
    settings: Sequence[SamplingSettings],
    tokens: Sequence[Sequence[int]],
    vocab_size: int,
    num_prompt_tokens: int = 1,
    eos: tuple[int, ...] = (),
) -> tuple[InputBatch, FlatBatch]:
    num_rows = len(settings)
    longest = max(map(len, tokens))
    limits = BatchLimits(
        max_num_seqs=num_rows,
        max_model_len=longest + 1,
        max_num_batched_tokens=num_rows * longest,
        block_size=longest,
        num_kv_blocks=num_rows + 1,
        vocab_size=vocab_size,
        eos_token_ids=eos,
    )
    rows = InputBatch(limits)
    every = np.arange(num_rows, dtype=np.int32)
    batch = rows.apply(
        StepPlan(
            step_id=0,
            row_requests=tuple(
                RowRequest(i, f"r{i}", int32(*tokens[i]), num_prompt_tokens, settings[i])
                for i in range(num_rows)
            ),
            appended_block_rows=every,
            appended_block_ids=every + 1,
            rows=every,
            num_computed_tokens=int32(*(len(t) - 1 for t in tokens)),
            num_scheduled_tokens=np.ones(num_rows, dtype=np.int32),
        )
    )
    return rows, batch
