"""The fused passes of a decoder layer under the interpreter against their twins."""

import numpy as np
import pytest
import torch

from gpuworker.attention.interface import LayerKv
from gpuworker.kernels.fused import TritonOps
from gpuworker.kernels.ops import HeadNorms, RopeTables, StepTokens
from gpuworker.kernels.twins import TorchOps
from tests.kernels.batches import Slots, beyond_int32, poison_allocations

TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3}
DTYPES = list(TOLERANCE)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    poison_allocations(monkeypatch)


def random(*size, dtype=torch.float32, seed=0):
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(ours, theirs, dtype):
    return torch.allclose(
        ours.float(), theirs.float(), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [64, 576, 1000])
def test_add_rms_norm_equals_its_twin(dtype, size):
    residual, update = random(3, size, dtype=dtype, seed=1), random(3, size, dtype=dtype, seed=2)
    weight = random(size, seed=3)
    ours, theirs = residual.clone(), residual.clone()
    normed = TritonOps().add_rms_norm(ours, update, weight, 1e-5)
    expected = TorchOps().add_rms_norm(theirs, update, weight, 1e-5)
    assert torch.equal(ours, theirs)
    assert close(normed, expected, dtype)


def test_a_norm_without_an_update_leaves_the_residual_alone():
    residual, weight = random(2, 100), random(100, seed=1)
    before = residual.clone()
    normed = TritonOps().add_rms_norm(residual, None, weight, 1e-2)
    assert torch.equal(residual, before)
    assert close(normed, TorchOps().add_rms_norm(residual, None, weight, 1e-2), torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("size", [96, 1536])
def test_gate_equals_its_twin(dtype, activation, size):
    gate_up = 3 * random(3, 2 * size, dtype=dtype, seed=size)
    expected = TorchOps().gate(gate_up, activation)
    assert close(TritonOps().gate(gate_up, activation), expected, dtype)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gate_is_finite_for_large_inputs(activation):
    gate_up = torch.tensor([[-1e4, 1e4, -200.0, 200.0, 1.0, 1.0, 1.0, 1.0]])
    with np.errstate(over="ignore"):
        ours = TritonOps().gate(gate_up, activation)
    assert torch.equal(ours, torch.tensor([[0.0, 1e4, 0.0, 200.0]]))


def rotation(num_heads, num_kv_heads, head_dim, rotary_dim, page, dtype, pool_dtype):
    """Inputs of rotate_and_write: five tokens, one of them without a slot."""
    qkv = random(5, num_heads + 2 * num_kv_heads, head_dim, dtype=dtype, seed=head_dim)
    pool = torch.full((4, num_kv_heads, page, head_dim), torch.nan).to(pool_dtype)
    tokens = StepTokens(
        torch.tensor([0, 7, 3, 20, 1]),
        Slots(torch.tensor([page, 3 * page + 5, page + 1, -1, 2], dtype=torch.int32)),
    )
    norms = HeadNorms(random(head_dim), random(head_dim, seed=9), 1e-6)
    angles = torch.outer(torch.arange(32.0), 0.5 ** torch.arange(rotary_dim // 2))
    rope = RopeTables(angles.cos(), angles.sin())
    return qkv, LayerKv(pool, pool.clone()), tokens, norms, rope


def check_rotation(qkv, kv, tokens, norms, rope, dtype):
    other = LayerKv(kv.key.clone(), kv.value.clone())
    query = TritonOps().rotate_and_write(qkv, kv, tokens, norms, rope)
    expected = TorchOps().rotate_and_write(qkv, other, tokens, norms, rope)
    assert close(query, expected, dtype)
    for pool, twin in ((kv.key, other.key), (kv.value, other.value)):
        ours, theirs = pool.float(), twin.float()
        assert torch.equal(ours.isnan(), theirs.isnan()), "written where nothing belongs"
        assert close(ours.nan_to_num(), theirs.nan_to_num(), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "rotary_dim"),
    [(4, 2, 64, 64), (9, 3, 64, 64), (20, 9, 32, 16), (3, 1, 96, 96), (2, 2, 80, 32)],
)
def test_rotate_and_write_equals_its_twin(dtype, num_heads, num_kv_heads, head_dim, rotary_dim):
    given = rotation(num_heads, num_kv_heads, head_dim, rotary_dim, 16, dtype, dtype)
    check_rotation(*given, dtype)


@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize("has_rope", [False, True])
def test_norms_and_rotation_may_be_missing(has_norms, has_rope):
    qkv, kv, tokens, norms, rope = rotation(4, 2, 64, 64, 16, torch.float32, torch.float32)
    check_rotation(
        qkv, kv, tokens, norms if has_norms else None, rope if has_rope else None, torch.float32
    )


def test_eight_bit_pools_get_clamped_values():
    # The interpreter rounds 31.7 to 16: only what eight bits hold, or clamps, is compared.
    qkv, kv, tokens, _, _ = rotation(4, 2, 64, 64, 16, torch.float32, torch.float8_e4m3fn)
    qkv = 16 * (20 * qkv).to(torch.float8_e4m3fn).float()
    check_rotation(qkv, kv, tokens, None, None, torch.float32)
    assert kv.key.float().nan_to_num().abs().max() == 448.0


def test_keys_and_values_are_written_past_two_to_the_31_elements_of_a_pool():
    qkv, _, _, _, _ = rotation(4, 2, 64, 64, 16, torch.float16, torch.float16)
    kv = LayerKv(beyond_int32(2, 16, 64), beyond_int32(2, 16, 64))
    slots = torch.arange(5, dtype=torch.int32) + (len(kv.key) - 1) * 16
    TritonOps().rotate_and_write(qkv, kv, StepTokens(torch.arange(5), Slots(slots)), None, None)
    assert torch.equal(kv.key[-1, :, :5], qkv[:, 4:6].transpose(0, 1))
    assert torch.equal(kv.value[-1, :, :5], qkv[:, 6:].transpose(0, 1))
