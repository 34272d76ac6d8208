"""A batch of samples without a model, each sample with its own settings."""

from collections.abc import Sequence

import numpy as np
import torch

from gpuworker.core.input_batch import BatchLimits, InputBatch
from gpuworker.core.plan import AssignedRequest, ReceivedPlan, SamplingSettings
from gpuworker.device.transfers import HostTransfers
from gpuworker.kernels.twins import TorchOps
from gpuworker.sampling.sampler import Sampler
from gpuworker.step_inputs import InputStaging, StepSizes
from tests.gpuworker.driver import int32

CPU = torch.device("cpu")


def sampled(
    logits: torch.Tensor,
    settings: Sequence[SamplingSettings],
    *,
    tokens: Sequence[Sequence[int]] | None = None,
    num_prompt_tokens: int = 1,
    eos: tuple[int, ...] = (),
) -> list[int]:
    """One token for each row of logits, [num_rows, vocab_size]; tokens are the rows' so far."""
    tokens = tokens or [[0]] * len(logits)
    return sample(logits.clone(), settings, tokens, num_prompt_tokens, eos)


def sample(
    logits: torch.Tensor,
    settings: Sequence[SamplingSettings],
    tokens: Sequence[Sequence[int]],
    num_prompt_tokens: int = 1,
    eos: tuple[int, ...] = (),
) -> list[int]:
    """As a runner has it done; logits are changed in place."""
    num_rows, vocab_size = logits.shape
    longest = max(map(len, tokens))
    limits = BatchLimits(
        max_num_seqs=num_rows,
        max_model_len=longest + 1,
        max_num_batched_tokens=num_rows,
        block_size=longest,
        num_kv_blocks=num_rows + 1,
        vocab_size=vocab_size,
        eos_token_ids=eos,
    )
    rows = InputBatch(limits)
    every = np.arange(num_rows, dtype=np.int32)
    requests = tuple(
        AssignedRequest(i, f"r{i}", int32(*tokens[i]), num_prompt_tokens, settings[i])
        for i in range(num_rows)
    )
    batch = rows.apply(
        ReceivedPlan(
            step_id=0,
            row_requests=requests,
            appended_block_rows=every,
            appended_block_ids=every + 1,
            rows=every,
            num_computed_tokens=int32(*(len(t) - 1 for t in tokens)),
            num_scheduled_tokens=np.ones(num_rows, dtype=np.int32),
        )
    )
    sampler = Sampler(TorchOps(), limits, CPU, HostTransfers())
    sampler.reset_rows(requests, rows)
    sizes = StepSizes(num_rows, num_rows, num_rows)
    columns = InputStaging(limits, CPU).send(batch, rows.slots, sizes).samples
    return sampler.sample(logits, columns, batch, rows).token_ids.tolist()
