"""What a step's integers are on the device, padding included."""

import numpy as np
import torch

from gpuworker.core.input_batch import BatchLimits, InputBatch
from gpuworker.core.plan import AssignedRequest, ReceivedPlan, SamplingSettings
from gpuworker.step_inputs import InputStaging, StepSizes

LIMITS = BatchLimits(
    max_num_seqs=2,
    max_model_len=64,
    max_num_batched_tokens=32,
    block_size=16,
    num_kv_blocks=8,
    vocab_size=100,
)


def int32(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def test_padding_is_zero_whatever_earlier_steps_left_there() -> None:
    """It is looked up, in tables that would not have what other sections left."""
    staging = InputStaging(LIMITS, torch.device("cpu"))
    staging._ring._host_views[0].fill(1 << 30)
    rows = InputBatch(LIMITS)
    batch = rows.apply(
        ReceivedPlan(
            step_id=0,
            row_requests=(AssignedRequest(1, "a", int32(7, 8, 9), 3, SamplingSettings()),),
            appended_block_rows=int32(1),
            appended_block_ids=int32(1),
            rows=int32(1),
            num_computed_tokens=int32(0),
            num_scheduled_tokens=int32(3),
        )
    )
    inputs = staging.send(batch, rows.slots, StepSizes(8, num_logits=4, num_samples=1))
    assert inputs.token_ids.tolist() == [7, 8, 9, 0, 0, 0, 0, 0]
    assert inputs.positions.tolist() == [0, 1, 2, 0, 0, 0, 0, 0]
    assert inputs.logits_indices.tolist() == [2, 0, 0, 0]
    assert inputs.samples.rows.tolist() == [1]
