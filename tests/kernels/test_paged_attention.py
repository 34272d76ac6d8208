"""Paged attention under the interpreter against the float64 reference.

Each step has fresh random numbers, NaN in every KV slot outside the contexts, impossible block ids
in unused table entries, and NaN in every buffer before it is written.
"""

import numpy as np
import pytest
import torch

from gpuworker.attention.interface import AttentionLayer, LayerKv
from gpuworker.attention.triton.backend import TritonAttention
from gpuworker.attention.triton.configs import Target
from gpuworker.attention.triton.work import build
from tests.kernels.batches import CPU, SMALL_DEVICE, Case, Step, beyond_int32, poison_allocations

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3}
MIXED = ((1, 37), (5, 130), (40, 70), (1, 1), (3, 3))
# With a target that has descriptors, pages of 64 come through them.
DESCRIPTOR_DEVICE = Target("sm90", 4)


def attend(step, monkeypatch, target=SMALL_DEVICE, tolerance=None):
    """Runs a step and compares it with the reference."""
    poison_allocations(monkeypatch)
    backend = TritonAttention(step.setup(), target, CPU)
    out = step.run(backend)
    expected = step.expected()
    num_tokens = step.shape.num_tokens
    error = (out[:num_tokens].double() - expected[:num_tokens]).abs().max()
    assert error <= (tolerance or TOLERANCE[step.case.dtype]), f"error {error}"
    assert torch.isfinite(out).all(), "rows past the tokens must be finite"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_mixed_batch_of_chunks_decodes_and_verify_rows_is_right(monkeypatch, dtype):
    attend(Step(Case(MIXED, dtype=dtype, seed=1)), monkeypatch)


@pytest.mark.parametrize("page", [8, 16, 32, 64, 128])
@pytest.mark.parametrize("target", [SMALL_DEVICE, DESCRIPTOR_DEVICE], ids=lambda t: t.arch)
def test_every_page_size_is_right_with_pointers_and_descriptors(monkeypatch, page, target):
    attend(Step(Case(MIXED, page=page, seed=page)), monkeypatch, target)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads"), [(2, 2), (9, 3), (7, 1), (8, 1), (20, 1), (40, 1)]
)
def test_any_group_of_query_heads_is_right(monkeypatch, num_heads, num_kv_heads):
    case = Case(((1, 40), (5, 70), (45, 50)), num_heads, num_kv_heads, seed=num_heads)
    attend(Step(case), monkeypatch)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("target", [SMALL_DEVICE, DESCRIPTOR_DEVICE], ids=lambda t: t.arch)
def test_any_head_dim_is_right(monkeypatch, head_dim, target):
    layer = AttentionLayer(head_dim**-0.5)
    case = Case(((1, 70), (34, 66)), head_dim=head_dim, page=64, layer=layer, seed=head_dim)
    attend(Step(case), monkeypatch, target)


@pytest.mark.parametrize("window", [1, 20, 64, 90])
@pytest.mark.parametrize("target", [SMALL_DEVICE, DESCRIPTOR_DEVICE], ids=lambda t: t.arch)
def test_a_sliding_window_hides_what_lies_before_it(monkeypatch, window, target):
    layer = AttentionLayer(0.125, sliding_window=window)
    case = Case(((1, 150), (6, 150), (70, 200)), page=64, layer=layer, seed=window)
    attend(Step(case), monkeypatch, target)


def test_blocks_that_left_the_window_may_hold_anything(monkeypatch):
    layer = AttentionLayer(0.125, sliding_window=20)
    step = Step(Case(((1, 150), (40, 150)), page=16, layer=layer))
    backend = TritonAttention(step.setup(), SMALL_DEVICE, CPU)
    expected = step.run(backend)
    step.shape.block_table[:, :5] = step.shape.block_table[0, 9]
    step.kv.key[step.shape.block_table[0, 5], :, 0] = torch.nan
    step.kv.value[step.shape.block_table[0, 5], :, 0] = torch.nan
    # Position 80 is before the chunk's first window, and in no decode's.
    assert torch.equal(step.run(backend), expected)


@pytest.mark.parametrize("scale", [0.125, 2.0])
def test_a_soft_cap_bends_scores(monkeypatch, scale):
    attend(Step(Case(MIXED, layer=AttentionLayer(scale, soft_cap=3.0), seed=5)), monkeypatch)


def test_window_and_cap_work_together(monkeypatch):
    layer = AttentionLayer(0.2, sliding_window=33, soft_cap=5.0)
    attend(Step(Case(MIXED, layer=layer, seed=6)), monkeypatch)


def test_a_large_scale_does_not_overflow(monkeypatch):
    # Scores reach 2000, whose float32 rounding alone moves weights by 1e-4.
    step = Step(Case(MIXED, layer=AttentionLayer(50.0), seed=7))
    attend(step, monkeypatch, tolerance=1e-3)


@pytest.mark.parametrize("queries", [1, 5, 17])
def test_a_long_context_is_split_and_merged(monkeypatch, queries):
    step = Step(Case(((queries, 1100), (1, 60)), page=64, seed=queries))
    backend = TritonAttention(step.setup(), Target("sm80", 16), CPU)
    kind = "decode" if queries < 17 else "chunk"
    lists = build(step.shape, np.array([0, 1]), backend.tiles[kind], None)
    assert len(lists.merges) == queries, "the long request alone must be split"
    attend(step, monkeypatch, Target("sm80", 16))


def test_splits_are_merged_where_the_window_leaves_a_query_none_of_them(monkeypatch):
    layer = AttentionLayer(0.125, sliding_window=300)
    step = Step(Case(((6, 1000),), page=64, layer=layer, seed=3))
    attend(step, monkeypatch, Target("sm80", 64))


def test_more_splits_than_the_merge_takes_at_once(monkeypatch):
    step = Step(Case(((2, 2600),), 1, 1, page=64, seed=9))
    target = Target("sm80", 64)
    tile = TritonAttention(step.setup(), target, CPU).tiles["decode"]
    lists = build(step.shape, np.array([0]), tile, None)
    assert lists.merges[0, 2] > 16
    attend(step, monkeypatch, target)


def test_decodes_and_chunks_that_are_split_in_one_step_do_not_share_rows(monkeypatch):
    step = Step(Case(((1, 700), (34, 1100)), 2, 1, page=64, seed=10))
    target = Target("sm80", 16)
    tiles = TritonAttention(step.setup(), target, CPU).tiles
    for request, kind in enumerate(("decode", "chunk")):
        assert build(step.shape, np.array([request]), tiles[kind], None).num_partial_rows
    attend(step, monkeypatch, target)


def test_padding_tokens_get_zeros_and_write_nowhere(monkeypatch):
    step = Step(Case(((1, 40), (2, 30)), num_padding=9, seed=11))
    poison_allocations(monkeypatch)
    before = step.kv.key.clone()
    out = step.run(TritonAttention(step.setup(), SMALL_DEVICE, CPU))
    assert not out[step.shape.num_tokens :].any()
    changed = (step.kv.key != before) & ~(step.kv.key.isnan() & before.isnan())
    assert int(changed.any(-1).any(1).sum()) == step.shape.num_tokens


def test_steps_without_chunks_have_the_same_grids_for_any_contexts():
    long = Step(Case(((1, 900), (1, 30), (2, 500)), num_padding=4))
    short = Step(Case(((1, 2), (3, 9), (1, 1)), num_padding=3))
    assert long.shape.num_padded_tokens == short.shape.num_padded_tokens
    backend = TritonAttention(long.setup(), SMALL_DEVICE, CPU)
    counts = [backend.prepare(step.shape).counts(None) for step in (long, short)]
    assert counts[0] == counts[1]
    assert counts[0][1] == 0


def test_layers_with_and_without_a_window_share_a_step(monkeypatch):
    poison_allocations(monkeypatch)
    step = Step(Case(MIXED, seed=12))
    layers = [AttentionLayer(0.125, sliding_window=window) for window in (None, 16)]
    backend = TritonAttention(step.setup(windows=(None, 16)), SMALL_DEVICE, CPU)
    prepared = backend.prepare(step.shape)
    prepared.write(step.kv, step.key, step.value)
    for layer in layers:
        out = prepared.attend(step.query, step.kv, layer)
        error = (out.double() - step.expected(layer)).abs().max()
        assert error <= TOLERANCE[torch.float32]


def test_keys_and_values_land_in_their_slots_and_nowhere_else():
    step = Step(Case(MIXED, num_kv_heads=1, head_dim=80, page=16, seed=13))
    twin = Step(step.case)
    TritonAttention(step.setup(), SMALL_DEVICE, CPU).prepare(step.shape).write(
        step.kv, step.key, step.value
    )
    for token, slot in enumerate(twin.shape.slot_mapping):
        twin.kv.key[slot // 16, :, slot % 16] = twin.key[token]
        twin.kv.value[slot // 16, :, slot % 16] = twin.value[token]
    for pool, expected in zip(
        (step.kv.key, step.kv.value), (twin.kv.key, twin.kv.value), strict=True
    ):
        assert np.array_equal(pool.numpy(), expected.numpy(), equal_nan=True)


def test_eight_bit_keys_and_values_are_attended_as_stored(monkeypatch):
    # AMD's eight-bit type has no interpreter; `make check-kernels` compiles it.
    step = Step(Case(MIXED, page=64, kv_dtype=torch.float8_e4m3fn, seed=14))
    attend(step, monkeypatch, DESCRIPTOR_DEVICE)


def test_what_eight_bits_cannot_hold_is_clamped():
    step = Step(Case(((2, 2),), kv_dtype=torch.float8_e4m3fn, seed=15))
    step.key[:] = 1000.0
    step.value[:] = -1000.0
    backend = TritonAttention(step.setup(), DESCRIPTOR_DEVICE, CPU)
    backend.prepare(step.shape).write(step.kv, step.key, step.value)
    block = step.shape.block_table[0, 0]
    assert (step.kv.key[block, :, :2].float() == 448.0).all()
    assert (step.kv.value[block, :, :2].float() == -448.0).all()


@pytest.mark.parametrize(
    ("target", "kv_dtype"),
    [
        (Target("sm80", 4), torch.float8_e4m3fn),
        (Target("sm90", 4), torch.float8_e4m3fnuz),
        (Target("gfx942", 4), torch.float8_e4m3fn),
    ],
    ids=str,
)
def test_a_device_without_that_eight_bit_type_refuses_it(target, kv_dtype):
    step = Step(Case(((1, 1),), kv_dtype=kv_dtype))
    with pytest.raises(ValueError, match="kv-cache-dtype"):
        TritonAttention(step.setup(), target, CPU)


def test_heads_that_are_not_packed_are_refused():
    step = Step(Case(((1, 1),)))
    prepared = TritonAttention(step.setup(), SMALL_DEVICE, CPU).prepare(step.shape)
    with pytest.raises(ValueError, match="not packed"):
        prepared.attend(step.query[:, ::2], step.kv, step.case.layer)


@pytest.mark.parametrize("page", [16, 32])
def test_contexts_past_two_to_the_31_elements_of_a_pool_are_read(monkeypatch, page):
    """A tile of one page, and one of several; a pool that one GPU holds in eight bits."""
    step = Step(Case(((1, 40), (40, 50)), page=page, dtype=torch.float16, seed=page))
    pools = [beyond_int32(*old.shape[1:]) for old in (step.kv.key, step.kv.value)]
    for pool, old in zip(pools, (step.kv.key, step.kv.value), strict=True):
        pool[-len(old) :] = old
    moved = len(pools[0]) - len(step.kv.key)
    step.kv = LayerKv(*pools)
    step.shape.block_table[:] += moved
    step.shape.slot_mapping[:] += moved * page
    attend(step, monkeypatch)
