"""The CPU paths against the definition of correct, on fresh random batches with poison around."""

import os
import shutil
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from gpuworker.attention.cpu import TorchAttention
from gpuworker.attention.interface import (
    AttentionBackend,
    AttentionLayer,
    KvShape,
    LayerKv,
    PreparedStep,
    StepShape,
)
from gpuworker.attention.native import NativeAttention
from gpuworker.attention.native_library import COMPILERS, NativeUnavailableError
from gpuworker.attention.reference import ReferenceAttention

# (query tokens, context after the step) of each request.
MIXED = ((1, 1), (1, 16), (1, 130), (1, 257), (3, 40), (5, 5), (17, 150), (140, 300), (1, 31))


@dataclass
class Case:
    shape: StepShape
    kv_shape: KvShape
    num_heads: int
    kv: LayerKv
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor


def make_case(
    requests: tuple[tuple[int, int], ...],
    *,
    heads: tuple[int, int] = (6, 2),
    head_dim: int = 64,
    block_size: int = 16,
    num_padded: int = 3,
    seed: int = 0,
) -> Case:
    """A batch over a pool whose every slot outside the contexts holds NaN."""
    rng = np.random.default_rng(seed)
    generator = torch.Generator().manual_seed(seed)
    num_heads, num_kv_heads = heads
    queries = np.array([q for q, _ in requests])
    seq_lens = np.array([n for _, n in requests], dtype=np.int32)
    num_blocks = 1 + int(sum(-(-seq_lens // block_size))) + 1
    kv_shape = KvShape(num_blocks, block_size, num_kv_heads, head_dim)
    size = (num_blocks, num_kv_heads, block_size, head_dim)
    kv = LayerKv(torch.full(size, torch.nan), torch.full(size, torch.nan))
    free = rng.permutation(np.arange(1, num_blocks - 1)).tolist()
    width = int((-(-seq_lens // block_size)).max()) + 2
    # Unused entries point at a block that nobody owns.
    table = np.full((len(requests), width), num_blocks - 1, dtype=np.int32)
    slots = []
    for i, (num_queries, seq_len) in enumerate(requests):
        for column in range(-(-seq_len // block_size)):
            table[i, column] = free.pop()
        for position in range(seq_len):
            block, offset = table[i, position // block_size], position % block_size
            if position >= seq_len - num_queries:
                slots.append(block * block_size + offset)
            else:
                for pool in (kv.key, kv.value):
                    pool[block, :, offset] = torch.randn(
                        num_kv_heads, head_dim, generator=generator
                    )
    num_tokens = int(queries.sum())
    starts = np.concatenate([[0], np.cumsum(queries)]).astype(np.int32)
    shape = StepShape(
        starts, seq_lens, np.array(slots, dtype=np.int64), table, num_tokens + num_padded
    )

    def tensor(count: int) -> torch.Tensor:
        return torch.randn(num_tokens + num_padded, count, head_dim, generator=generator)

    return Case(
        shape,
        kv_shape,
        num_heads,
        kv,
        tensor(num_heads),
        tensor(num_kv_heads),
        tensor(num_kv_heads),
    )


def expected(case: Case, layer: AttentionLayer) -> torch.Tensor:
    """By the reference in float64, on a pool of its own."""
    kv = LayerKv(case.kv.key.clone(), case.kv.value.clone())
    step = ReferenceAttention().prepare(case.shape)
    step.write(kv, case.key, case.value)
    return step.attend(case.query.double(), kv, layer)[: case.shape.num_tokens]


@pytest.fixture(params=["torch", "native", "native with 8 lanes", "native with 4 lanes"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A backend, with the vectors of this machine or as AVX2 and NEON have them."""
    name, _, lanes = request.param.partition(" with ")
    if lanes:
        compiler = os.environ.get("CXX") or next(filter(shutil.which, COMPILERS), "")
        monkeypatch.setenv("CXX", compiler and f"{compiler} -DLANES={lanes[0]}")
    return name


def make_backend(name: str, case: Case, dtype: torch.dtype = torch.float32) -> AttentionBackend:
    if name == "torch":
        return TorchAttention(case.kv_shape, case.num_heads, torch.device("cpu"))
    try:
        return NativeAttention(case.kv_shape, case.num_heads, dtype, dtype)
    except NativeUnavailableError as error:
        pytest.skip(str(error))


def attended(backend: str, case: Case, layer: AttentionLayer) -> torch.Tensor:
    step = make_backend(backend, case).prepare(case.shape)
    step.write(case.kv, case.key, case.value)
    return step.attend(case.query, case.kv, layer)


LAYERS = {
    "plain": AttentionLayer(0.125),
    "window": AttentionLayer(0.125, sliding_window=24),
    "wide window": AttentionLayer(0.125, sliding_window=200),
    "soft cap": AttentionLayer(0.5, soft_cap=5.0),
    "window and soft cap": AttentionLayer(0.5, sliding_window=100, soft_cap=2.0),
}


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS.keys())
def test_a_mixed_batch_equals_the_reference(backend: str, layer: AttentionLayer) -> None:
    case = make_case(MIXED, seed=1)
    result = attended(backend, case, layer)[: case.shape.num_tokens].double()
    torch.testing.assert_close(result, expected(case, layer), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("heads", [(1, 1), (4, 4), (8, 1), (9, 3), (10, 2)])
@pytest.mark.parametrize("block_size", [16, 32, 128])
def test_head_groups_and_block_sizes_equal_the_reference(
    backend: str, heads: tuple[int, int], block_size: int
) -> None:
    requests = ((1, 77), (4, 9), (33, 140))
    case = make_case(requests, heads=heads, head_dim=32, block_size=block_size, seed=2)
    layer = AttentionLayer(0.2)
    result = attended(backend, case, layer)[: case.shape.num_tokens].double()
    torch.testing.assert_close(result, expected(case, layer), rtol=2e-5, atol=2e-5)


def test_padded_rows_are_finite(backend: str) -> None:
    case = make_case(((1, 20), (6, 6)), num_padded=9)
    case.query[case.shape.num_tokens :] = torch.nan
    assert torch.isfinite(attended(backend, case, LAYERS["plain"])).all()


def test_writing_changes_only_the_slots_of_the_step(backend: str) -> None:
    case = make_case(((1, 20), (6, 6)))
    before = case.kv.key.clone()
    attended(backend, case, LAYERS["plain"])
    is_changed = ~torch.isclose(before, case.kv.key, rtol=0, atol=0, equal_nan=True)
    slots = is_changed.all(dim=(1, 3)).flatten().nonzero().squeeze(1)
    assert sorted(slots.tolist()) == sorted(case.shape.slot_mapping.tolist())
    assert not is_changed.any(dim=3).any(dim=1).flatten()[~_mask(slots, before)].any()


def _mask(slots: torch.Tensor, pool: torch.Tensor) -> torch.Tensor:
    mask = torch.zeros(pool.shape[0] * pool.shape[2], dtype=torch.bool)
    mask[slots] = True
    return mask


@pytest.mark.parametrize("layer", [LAYERS["plain"], LAYERS["window and soft cap"]])
def test_a_query_has_the_same_bits_alone_in_a_batch_and_in_a_chunk(
    backend: str, layer: AttentionLayer
) -> None:
    seq_len = 261
    whole = make_case(((seq_len, seq_len),), heads=(9, 3), num_padded=0, seed=3)
    all_at_once = attended(backend, whole, layer)
    for num_queries in (1, 2, 7, 100):
        chunk = make_case(
            ((num_queries, seq_len), (1, 500), (9, 30)), heads=(9, 3), num_padded=0, seed=4
        )
        positions = range(seq_len)
        for i, position in enumerate(positions):
            block, offset = divmod(position, 16)
            place = int(chunk.shape.block_table[0, block])
            source = int(whole.shape.block_table[0, block])
            chunk.kv.key[place, :, offset] = whole.kv.key[source, :, offset]
            chunk.kv.value[place, :, offset] = whole.kv.value[source, :, offset]
            if position >= seq_len - num_queries:
                row = i - (seq_len - num_queries)
                chunk.query[row] = whole.query[position]
                chunk.key[row] = whole.key[position]
                chunk.value[row] = whole.value[position]
        result = attended(backend, chunk, layer)[:num_queries]
        assert torch.equal(result, all_at_once[seq_len - num_queries :])


@pytest.mark.parametrize("head_dim", [16, 80, 96, 128, 256])
def test_head_sizes_equal_the_reference(backend: str, head_dim: int) -> None:
    case = make_case(((1, 50), (19, 40)), heads=(4, 2), head_dim=head_dim, seed=5)
    layer = AttentionLayer(head_dim**-0.5, sliding_window=30)
    result = attended(backend, case, layer)[: case.shape.num_tokens].double()
    torch.testing.assert_close(result, expected(case, layer), rtol=2e-5, atol=2e-5)


def test_bfloat16_equals_the_reference_on_the_same_values(backend: str) -> None:
    case = make_case(MIXED, seed=6)
    kv = LayerKv(case.kv.key.bfloat16(), case.kv.value.bfloat16())
    narrow = [t.bfloat16() for t in (case.query, case.key, case.value)]
    wide = Case(
        case.shape,
        case.kv_shape,
        case.num_heads,
        LayerKv(kv.key.float(), kv.value.float()),
        *(t.float() for t in narrow),
    )
    step = make_backend(backend, case, torch.bfloat16).prepare(case.shape)
    step.write(kv, narrow[1], narrow[2])
    result = step.attend(narrow[0], kv, LAYERS["plain"])[: case.shape.num_tokens]
    assert result.dtype == torch.bfloat16
    # Half a unit in the last of bfloat16's eight bits, and a little.
    torch.testing.assert_close(
        result.double(), expected(wide, LAYERS["plain"]), rtol=2**-8, atol=1e-5
    )


def test_scores_of_any_size_do_not_overflow(backend: str) -> None:
    case = make_case(((1, 300), (40, 90)), seed=7)
    layer = AttentionLayer(40.0)
    result = attended(backend, case, layer)[: case.shape.num_tokens].double()
    torch.testing.assert_close(result, expected(case, layer), rtol=1e-3, atol=1e-3)


def test_a_value_that_is_not_finite_reaches_every_query_that_sees_it(backend: str) -> None:
    case = make_case(((1, 40), (2, 20)), seed=8)
    case.kv.value[case.shape.block_table[0, 1], :, 3] = torch.nan
    result = attended(backend, case, LAYERS["plain"])
    assert torch.isnan(result[0]).all()
    assert torch.isfinite(result[1:]).all()


def test_strided_heads_are_read_where_they_lie(backend: str) -> None:
    case = make_case(MIXED, seed=9)
    fused = torch.cat((case.query, case.key, case.value), dim=1)
    expected_result = expected(case, LAYERS["plain"])
    case.query, case.key, case.value = fused[:, :6], fused[:, 6:8], fused[:, 8:]
    result = attended(backend, case, LAYERS["plain"])[: case.shape.num_tokens].double()
    torch.testing.assert_close(result, expected_result, rtol=2e-5, atol=2e-5)


def test_the_native_kernel_has_no_code_for_odd_sizes() -> None:
    for shape in (KvShape(4, 8, 1, 64), KvShape(4, 16, 1, 72)):
        with pytest.raises(NativeUnavailableError, match="no code for"):
            NativeAttention(shape, 1, torch.float32, torch.float32)
    with pytest.raises(NativeUnavailableError, match="no code for"):
        NativeAttention(KvShape(4, 16, 1, 64), 1, torch.float16, torch.float16)
    with pytest.raises(NativeUnavailableError, match="float8"):
        NativeAttention(KvShape(4, 16, 1, 64), 1, torch.float32, torch.float8_e4m3fn)


def test_a_block_size_that_does_not_divide_a_tile_is_refused() -> None:
    with pytest.raises(ValueError, match="block-size"):
        TorchAttention(KvShape(4, 24, 1, 16), 1, torch.device("cpu"))


FLOAT8 = [torch.float8_e4m3fn, torch.float8_e4m3fnuz]


def in_eight_bits(case: Case, dtype: torch.dtype) -> LayerKv:
    return LayerKv(case.kv.key.to(dtype), case.kv.value.to(dtype))


@pytest.mark.parametrize("dtype", FLOAT8)
def test_eight_bit_keys_and_values_are_attended_as_stored(dtype: torch.dtype) -> None:
    case = make_case(MIXED, seed=10)
    kv = in_eight_bits(case, dtype)
    step = make_backend("torch", case).prepare(case.shape)
    step.write(kv, case.key, case.value)
    result = step.attend(case.query, kv, LAYERS["plain"])[: case.shape.num_tokens]
    case.kv = in_eight_bits(case, dtype)
    torch.testing.assert_close(
        result.double(), expected(case, LAYERS["plain"]), rtol=2e-5, atol=2e-5
    )


class DefaultWrite(PreparedStep):
    """Writes as a backend does that only knows slots."""

    def __init__(self, shape: StepShape) -> None:
        self._slots = torch.from_numpy(shape.padded_slots())

    @property
    def slots(self) -> torch.Tensor:
        return self._slots


@pytest.mark.parametrize("dtype", FLOAT8)
@pytest.mark.parametrize("writer", ["torch", "reference", "default"])
def test_what_eight_bits_do_not_hold_is_clamped(writer: str, dtype: torch.dtype) -> None:
    case = make_case(((3, 20),), seed=11)
    case.key[:], case.value[:] = 1000.0, -torch.inf
    case.value[0] = torch.nan
    kv = in_eight_bits(case, dtype)
    step: PreparedStep = DefaultWrite(case.shape)
    if writer != "default":
        backend = make_backend("torch", case) if writer == "torch" else ReferenceAttention()
        step = backend.prepare(case.shape)
    step.write(kv, case.key, case.value)
    blocks, offsets = divmod(case.shape.slot_mapping, 16)
    limit = 240.0 if dtype == torch.float8_e4m3fnuz else 448.0
    assert (kv.key[blocks, :, offsets].float() == limit).all()
    assert kv.value[blocks[0], :, offsets[0]].float().isnan().all()
    assert (kv.value[blocks[1:], :, offsets[1:]].float() == -limit).all()
