"""The kernels that a worker ships, as launches of its own wrappers on small CPU tensors."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product

import numpy as np
import torch

from gpuworker.attention.interface import AttentionLayer, KvShape, LayerKv, StepShape
from gpuworker.attention.triton.backend import AttentionSetup, TritonAttention
from gpuworker.attention.triton.configs import ConfigKey, Target, tile_config
from gpuworker.kernels.fused import TritonOps
from gpuworker.kernels.ops import (
    Adjustments,
    Draws,
    HeadNorms,
    LogitEdits,
    RopeTables,
    TokenPlaces,
    Verification,
)
from tests.kernels.batches import Slots

CPU = torch.device("cpu")
# A matrix instruction must be in the kernel; on NVIDIA which one depends on rows and generation.
MATRIX = "matrix"
WIDE_MATRIX = "wide matrix"
COPY_ENGINE = "copy engine"


@dataclass(frozen=True, slots=True)
class Launch:
    """Starts kernels for a target; `needs` are kinds of instructions, by kernel name."""

    name: str
    start: Callable[[Target], None]
    needs: Callable[[Target], dict[str, set[str]]]


@dataclass(frozen=True, slots=True)
class Model:
    """What of a model its attention depends on; named by who is made so."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    page: int = 64
    is_float8: bool = False
    window: int | None = None
    soft_cap: float | None = None


# One of each shape that families have; `--all` multiplies them out.
MODELS = (
    Model("llama", 32, 8, 128),
    Model("llama, float8", 32, 8, 128, is_float8=True),
    Model("qwen, pages of 16", 28, 4, 128, page=16),
    Model("smollm", 9, 3, 64),
    Model("phi, pages of 32", 32, 32, 96, page=32),
    Model("gemma 27b", 32, 16, 128, window=4096, soft_cap=50.0),
    Model("gemma", 8, 4, 256, window=4096, soft_cap=50.0),
)


def all_models() -> Iterator[Model]:
    """Every combination of what attention is built for."""
    dims, pages = (64, 96, 128, 256), (16, 32, 64)
    for head_dim, page, is_float8, window, cap in product(
        dims, pages, (False, True), (None, 1024), (None, 30.0)
    ):
        name = f"{head_dim} {page} {'float8' if is_float8 else 'wide'} {window} {cap}"
        yield Model(name, 8, 2, head_dim, page, is_float8, window, cap)


def op_launches() -> Iterator[Launch]:
    """The passes between products, at the sizes of an 8-billion-parameter Llama or Qwen."""
    yield Launch("layer", _layer_ops, lambda target: {})
    yield Launch("sampling", _sampling_ops, lambda target: {})


def _layer_ops(target: Target) -> None:
    ops = TritonOps()
    hidden, weight = _zeros(2, 4096), torch.zeros(4096)
    ops.add_rms_norm(hidden, hidden.clone(), weight, 1e-5)
    ops.add_rms_norm(hidden, None, weight, 1e-5)
    gate_up = _zeros(2, 2 * 14336)
    ops.gate(gate_up, "silu")
    ops.gate(gate_up, "gelu_tanh")
    slots = Slots(torch.zeros(2, dtype=torch.int32))
    places = TokenPlaces(torch.zeros(2, dtype=torch.int64), slots)
    norms = HeadNorms(torch.zeros(128), torch.zeros(128), 1e-6)
    rope = RopeTables(torch.zeros(16, 64), torch.zeros(16, 64))
    for kv_dtype in [torch.bfloat16] + [_float8(target)] * target.has_float8:
        pool = _zeros(2, 8, 64, 128).to(kv_dtype)
        kv = LayerKv(pool, pool.clone())
        ops.rotate_and_write(_zeros(2, 48, 128), kv, places, norms, rope)
        ops.rotate_and_write(_zeros(2, 48, 128), kv, places, None, rope)


def _sampling_ops(target: Target) -> None:
    ops, vocab_size, words = TritonOps(), 151936, 4748
    logits, floats = torch.zeros(1, vocab_size), torch.ones(1)
    ints, longs = torch.ones(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
    ops.edit_logits(logits, LogitEdits(ints, ints, floats))
    bits = torch.zeros(2, words, dtype=torch.int32)
    adjustments = Adjustments(
        slots=ints,
        output_counts=torch.zeros(2, vocab_size, dtype=torch.int16),
        prompt_bits=bits,
        grammar_rows=ints,
        grammar_bits=bits,
        draft_starts=ints,
        draft_counts=ints,
        drafts=ints,
        repetition=floats,
        presence=floats,
        frequency=floats,
        temperature=floats,
    )
    ops.adjust_logits(logits, adjustments)
    share = torch.ones(1, dtype=torch.float64)
    draws = Draws(seeds=longs, positions=longs, top_k=ints, top_p=share, min_p=share, is_drawn=ints)
    tokens = ops.sample(logits, draws)
    verification = Verification(
        sample_starts=ints, num_samples=ints, draft_starts=ints, drafts=ints
    )
    ops.accept(tokens, verification)


def _zeros(*size: int) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.bfloat16)


def _float8(target: Target) -> torch.dtype:
    return torch.float8_e4m3fnuz if target.is_amd else torch.float8_e4m3fn


def attention_launches(model: Model) -> Iterator[Launch]:
    """Decode and chunk kernels and the merge of a model."""
    for kind, queries in (("decode", 1), ("chunk", 130)):
        label = f"{model.name} {kind}"
        yield Launch(
            label,
            lambda target, queries=queries: _attend(model, target, queries),
            lambda target, kind=kind: _attention_needs(model, target, kind),
        )


def _attend(model: Model, target: Target, num_queries: int) -> None:
    if model.is_float8 and not target.has_float8:
        return
    kv_dtype = _float8(target) if model.is_float8 else torch.bfloat16
    shape = KvShape(2, model.page, model.num_kv_heads, model.head_dim)
    setup = AttentionSetup(
        shape=shape,
        num_heads=model.num_heads,
        kv_dtype=kv_dtype,
        windows=(model.window,),
        max_num_seqs=1,
        max_num_batched_tokens=num_queries,
        max_model_len=4096,
    )
    table = np.zeros((1, 4096 // model.page), dtype=np.int32)
    step = TritonAttention(setup, target, CPU).prepare(
        StepShape(
            np.array([0, num_queries], np.int32),
            np.array([4096], np.int32),
            np.zeros(num_queries, np.int64),
            table,
            num_queries,
        )
    )
    heads = torch.zeros(
        num_queries, model.num_heads + 2 * model.num_kv_heads, model.head_dim, dtype=torch.bfloat16
    )
    query = heads[:, : model.num_heads]
    pool = torch.zeros(2, model.num_kv_heads, model.page, model.head_dim).to(kv_dtype)
    kv = LayerKv(pool, pool.clone())
    layer = AttentionLayer(model.head_dim**-0.5, model.window, model.soft_cap)
    step.attend(query, kv, layer)
    # A second step goes the held way.
    step.attend(query, kv, layer)


def _attention_needs(model: Model, target: Target, kind: str) -> dict[str, set[str]]:
    key = ConfigKey(
        target.arch,
        model.head_dim,
        model.num_heads // model.num_kv_heads,
        model.page,
        "float8" if model.is_float8 else "wide",
        "decode" if kind == "decode" else "chunk",
    )
    config = tile_config(target, key)
    needs = {WIDE_MATRIX if config.block_m >= 64 else MATRIX}
    if config.uses_descriptors:
        needs.add(COPY_ENGINE)
    return {"paged_attention": needs}
