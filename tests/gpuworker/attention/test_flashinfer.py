"""Our side of FlashInfer: what its wrappers are given means what the reference computes.

The library needs a GPU. A stand-in with its signatures computes attention from exactly the
arguments that it gets, by their documented meaning.
"""

import sys
import types
from dataclasses import replace
from typing import Any

import pytest
import torch

from gpuworker.attention.flashinfer import (
    FlashInferAttention,
    FlashInferSetup,
    FlashInferUnavailableError,
    load,
)
from gpuworker.attention.interface import AttentionLayer, LayerKv
from tests.gpuworker.attention.test_cpu import LAYERS, MIXED, Case, expected, make_case

CPU = torch.device("cpu")


class Wrapper:
    """What both of the library's wrappers share; `plans` counts them over all."""

    plans = 0

    def __init__(self, workspace: torch.Tensor, layout: str, **options: Any) -> None:
        assert workspace.dtype == torch.uint8
        assert layout == "HND"
        self.options = options

    def keep(self, pages: tuple[torch.Tensor, ...], sizes: tuple[int, ...], **options: Any) -> None:
        type(self).plans += 1
        for column in pages:
            assert column.dtype == torch.int32
            assert column.device.type == "cpu"
        starts, ids, last = pages
        assert len(starts) == len(last) + 1
        assert starts[-1] == len(ids)
        self.num_heads, self.num_kv_heads, self.head_dim, self.page = sizes
        assert (last >= 1).all()
        assert (last <= self.page).all()
        self.pages = pages
        self.layer = options

    def attention(
        self, query: torch.Tensor, pools: tuple[torch.Tensor, torch.Tensor], starts: torch.Tensor
    ) -> torch.Tensor:
        assert query.dtype == self.layer["q_data_type"]
        assert pools[0].dtype == self.layer["kv_data_type"]
        assert query.is_contiguous()
        assert query.shape == (int(starts[-1]), self.num_heads, self.head_dim)
        out = torch.empty_like(query)
        page_starts, ids, last = self.pages
        for i in range(len(last)):
            own = ids[page_starts[i] : page_starts[i + 1]].long()
            length = (len(own) - 1) * self.page + int(last[i])
            rows = slice(int(starts[i]), int(starts[i + 1]))
            keys, values = (
                pool[own].transpose(1, 2).flatten(0, 1)[:length].double() for pool in pools
            )
            out[rows] = self.one(query[rows].double(), keys, values).to(out.dtype)
        return out

    def one(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        group = self.num_heads // self.num_kv_heads
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) * self.layer["sm_scale"]
        cap = self.layer["logits_soft_cap"] or 0
        if cap > 0:
            scores = cap * torch.tanh(scores / cap)
        place = len(k) - len(q) + torch.arange(len(q))[:, None]
        distance = place - torch.arange(len(k))
        is_hidden = distance < 0
        if self.layer["window_left"] >= 0:
            is_hidden |= distance > self.layer["window_left"]
        weights = torch.softmax(scores.masked_fill(is_hidden, -torch.inf), -1)
        return torch.einsum("hqk,khd->qhd", weights, v)


class BatchDecodeWithPagedKVCacheWrapper(Wrapper):
    def plan(
        self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size,
        *, sm_scale, window_left, logits_soft_cap, q_data_type, kv_data_type,
    ) -> None:  # fmt: skip
        assert self.options == {"use_tensor_cores": num_qo_heads // num_kv_heads >= 4}
        self.keep(
            (indptr, indices, last_page_len),
            (num_qo_heads, num_kv_heads, head_dim, page_size),
            sm_scale=sm_scale, window_left=window_left, logits_soft_cap=logits_soft_cap,
            q_data_type=q_data_type, kv_data_type=kv_data_type,
        )  # fmt: skip

    def run(self, q: torch.Tensor, paged_kv_cache: Any) -> torch.Tensor:
        return self.attention(q, paged_kv_cache, torch.arange(len(q) + 1))


class BatchPrefillWithPagedKVCacheWrapper(Wrapper):
    def plan(
        self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads,
        num_kv_heads, head_dim_qk, page_size,
        *, causal, sm_scale, window_left, logits_soft_cap, q_data_type, kv_data_type,
    ) -> None:  # fmt: skip
        assert causal
        assert qo_indptr.dtype == torch.int32
        self.starts = qo_indptr
        self.keep(
            (paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len),
            (num_qo_heads, num_kv_heads, head_dim_qk, page_size),
            sm_scale=sm_scale, window_left=window_left, logits_soft_cap=logits_soft_cap,
            q_data_type=q_data_type, kv_data_type=kv_data_type,
        )  # fmt: skip

    def run(self, q: torch.Tensor, paged_kv_cache: Any) -> torch.Tensor:
        return self.attention(q, paged_kv_cache, self.starts)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    module = types.ModuleType("flashinfer")
    for wrapper in (BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper):
        wrapper.plans = 0
        setattr(module, wrapper.__name__, wrapper)
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    return load()


def in_half(case: Case, kv_dtype: torch.dtype = torch.float16) -> Case:
    kv = LayerKv(case.kv.key.to(kv_dtype), case.kv.value.to(kv_dtype))
    narrow = {name: getattr(case, name).half() for name in ("query", "key", "value")}
    return replace(case, kv=kv, **narrow)


def backend_for(case: Case, library: types.ModuleType) -> FlashInferAttention:
    dtypes = (case.query.dtype, case.kv.key.dtype)
    return FlashInferAttention(
        FlashInferSetup(case.kv_shape, case.num_heads, *dtypes), CPU, library
    )


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS.keys())
@pytest.mark.parametrize(
    "requests", [MIXED, ((1, 1), (1, 40)), ((3, 3), (20, 50)), ((9, 16),)], ids=len
)
def test_what_the_library_is_told_is_the_references_attention(
    library: types.ModuleType, requests: tuple[tuple[int, int], ...], layer: AttentionLayer
) -> None:
    case = in_half(make_case(requests, heads=(8, 2), seed=1))
    step = backend_for(case, library).prepare(case.shape)
    step.write(case.kv, case.key, case.value)
    result = step.attend(case.query, case.kv, layer)
    num_tokens = case.shape.num_tokens
    # Rounded to float16 at the end, by both.
    torch.testing.assert_close(
        result[:num_tokens].double(), expected(case, layer), rtol=2e-3, atol=2e-3
    )
    assert not result[num_tokens:].any()


def test_eight_bit_pools_are_named_to_the_library(library: types.ModuleType) -> None:
    case = in_half(make_case(MIXED, heads=(6, 2), seed=2), torch.float8_e4m3fn)
    step = backend_for(case, library).prepare(case.shape)
    step.write(case.kv, case.key, case.value)
    result = step.attend(case.query, case.kv, LAYERS["plain"])[: case.shape.num_tokens]
    torch.testing.assert_close(
        result.double(), expected(case, LAYERS["plain"]), rtol=2e-3, atol=2e-3
    )


def test_a_step_is_planned_once_for_each_kind_of_layer(library: types.ModuleType) -> None:
    case = in_half(make_case(((1, 30), (5, 9)), heads=(4, 2), seed=3))
    backend = backend_for(case, library)
    for step in (backend.prepare(case.shape), backend.prepare(case.shape)):
        step.write(case.kv, case.key, case.value)
        for name in ("plain", "window", "plain", "window", "plain"):
            result = step.attend(case.query, case.kv, LAYERS[name])[: case.shape.num_tokens]
            torch.testing.assert_close(
                result.double(), expected(case, LAYERS[name]), rtol=2e-3, atol=2e-3
            )
    decodes, prefills = BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper
    assert (decodes.plans, prefills.plans) == (4, 4)


def test_a_step_of_padding_alone_gives_zeros(library: types.ModuleType) -> None:
    case = in_half(make_case(((1, 30),), heads=(4, 2)))
    nothing = replace(
        case.shape,
        query_start_loc=case.shape.query_start_loc[:1],
        seq_lens=case.shape.seq_lens[:0],
        slot_mapping=case.shape.slot_mapping[:0],
        block_table=case.shape.block_table[:0],
        num_padded_tokens=4,
    )
    step = backend_for(case, library).prepare(nothing)
    assert step.slots.tolist() == [-1] * 4
    assert not step.attend(case.query, case.kv, LAYERS["plain"]).any()


def test_models_without_code_are_refused(library: types.ModuleType) -> None:
    odd = in_half(make_case(((1, 3),), head_dim=80))
    wide = make_case(((1, 3),), head_dim=64)
    for case, named in ((odd, "heads of 80"), (wide, "float32")):
        with pytest.raises(FlashInferUnavailableError, match=named):
            backend_for(case, library)


def test_a_library_that_is_not_there_is_said_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(FlashInferUnavailableError, match=r"headrace\[flashinfer\]"):
        load()
