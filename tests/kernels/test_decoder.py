"""Whole forwards of every family under the interpreter, against torch and the reference."""

import pytest
import torch

from gpuworker.attention.triton.configs import Target
from gpuworker.kernels.twins import TorchOps
from tests.kernels.batches import poison_allocations
from tests.kernels.families import FAMILIES, STEPS, compare, with_kernels, with_torch

TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-2}
# Small, with eight-bit floats.
TARGET = Target("sm90", 4)


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_computes_the_same_with_kernels_and_with_torch(
    monkeypatch: pytest.MonkeyPatch, name: str, dtype: torch.dtype
) -> None:
    ours, theirs = with_kernels(name, dtype, TARGET), with_torch(name, dtype)
    poison_allocations(monkeypatch)
    steps = STEPS if dtype == torch.float32 else STEPS[:2]
    compare(ours, theirs, TOLERANCE[dtype], steps)


def test_a_model_over_eight_bit_keys_and_values_computes_the_same() -> None:
    # Torch writes on both sides: the interpreter rounds to eight bits wrongly, but reads them well.
    pool = torch.float8_e4m3fn
    ours = with_kernels("qwen3", torch.float32, TARGET, kv_dtype=pool, ops=TorchOps())
    theirs = with_torch("qwen3", torch.float32, kv_dtype=pool)
    compare(ours, theirs, TOLERANCE[torch.float32])
