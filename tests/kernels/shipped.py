"""The kernels that a worker ships, as launches of its own wrappers on small CPU tensors."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import product

import numpy as np
import torch

from gpuworker.attention.interface import AttentionLayer, KvShape, LayerKv, StepShape
from gpuworker.attention.triton.backend import AttentionSetup, TritonAttention
from gpuworker.attention.triton.configs import ConfigKey, Target, tile_config
from gpuworker.attention.triton.device import float8_type
from gpuworker.kernels.fused import GATE_BLOCK, TritonOps
from gpuworker.kernels.ops import (
    Activation,
    Adjustments,
    Draws,
    HeadNorms,
    LogitEdits,
    RopeTables,
    StepTokens,
    Verification,
)
from headrace.parameters import PARAMETERS, Stage
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
    """What of a model its kernels depend on; named by who is made so.

    rotary_dim: None where whole heads turn. window: of some layers; the others have none.
    """

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    page: int = 64
    is_float8: bool = False
    window: int | None = None
    soft_cap: float | None = None
    rotary_dim: int | None = None
    has_head_norms: bool = False
    activation: Activation = "silu"


# Every family in the sizes it is published in, pages and pools spread over them. What another of
# them has too is compiled once; Mistral and Mixtral have nothing of their own beside Llama.
MODELS = (
    Model("llama 8b", 32, 8, 128, 4096, 14336),
    Model("llama 8b, float8", 32, 8, 128, 4096, 14336, is_float8=True),
    Model("llama 70b", 64, 8, 128, 8192, 28672),
    Model("qwen2 7b, pages of 16", 28, 4, 128, 3584, 18944, page=16),
    Model(
        "qwen3 8b, float8, pages of 32",
        *(32, 8, 128, 4096, 12288),
        page=32,
        is_float8=True,
        has_head_norms=True,
    ),
    Model("qwen3 moe 30b", 32, 4, 128, 2048, 768, has_head_norms=True),
    Model("smollm2", 9, 3, 64, 576, 1536),
    Model("smollm2, float8, pages of 16", 9, 3, 64, 576, 1536, page=16, is_float8=True),
    Model("smollm3, pages of 32", 16, 4, 128, 2048, 11008, page=32),
    Model("smollm3, no rope", 16, 4, 128, 2048, 11008, page=32, rotary_dim=0),
    Model("phi3 mini, pages of 32", 32, 32, 96, 3072, 8192, page=32),
    Model("phi4 mini", 24, 8, 128, 3072, 8192, rotary_dim=96),
    Model(
        "gemma2 9b",
        *(16, 8, 256, 3584, 14336),
        window=4096,
        soft_cap=50.0,
        activation="gelu_tanh",
    ),
    Model(
        "gemma2 27b",
        *(32, 16, 128, 4608, 36864),
        window=4096,
        soft_cap=50.0,
        activation="gelu_tanh",
    ),
    Model(
        "gemma3 1b, float8",
        *(4, 1, 256, 1152, 6912),
        is_float8=True,
        window=512,
        has_head_norms=True,
        activation="gelu_tanh",
    ),
    Model(
        "gemma3 27b",
        *(32, 16, 128, 5376, 21504),
        window=1024,
        has_head_norms=True,
        activation="gelu_tanh",
    ),
)


def all_models() -> Iterator[Model]:
    """Every combination of what attention is built for."""
    dims, pages = (64, 80, 96, 128, 256), (16, 32, 64)
    for head_dim, page, is_float8, window, cap in product(
        dims, pages, (False, True), (None, 1024), (None, 30.0)
    ):
        name = f"{head_dim} {page} {'float8' if is_float8 else 'wide'} {window} {cap}"
        yield Model(name, 8, 2, head_dim, 8 * head_dim, 2048, page, is_float8, window, cap)


def launches(models: Iterable[Model]) -> Iterator[Launch]:
    """What the decoder starts for these models, and what sampling does.

    A launch of the same kernels as an earlier one is left out.
    """
    seen: set[object] = set()
    for model in models:
        for key, launch in _launches_of(model):
            if key not in seen:
                seen.add(key)
                yield launch
    yield Launch("sampling", _sampling_ops, lambda target: {})


def _launches_of(model: Model) -> Iterator[tuple[object, Launch]]:
    """Launches of a model, each with what its kernels depend on."""

    def plain(what: str, start: Callable[[Target], None]) -> Launch:
        return Launch(f"{model.name} {what}", start, lambda target: {})

    size, inner = model.hidden_size, model.intermediate_size
    yield ("norm", size), plain("norm", lambda target: _norm(size))
    # Sizes differ by whether the last block is whole.
    yield (
        ("gate", inner % GATE_BLOCK == 0, model.activation),
        plain("gate", lambda target: TritonOps().gate(_zeros(2, 2 * inner), model.activation)),
    )
    heads = (model.num_heads, model.num_kv_heads, model.head_dim, model.rotary_dim)
    pool = (model.page, model.is_float8)
    yield (
        ("rotate", *heads, *pool, model.has_head_norms),
        plain("rotate", lambda target: _rotate(model, target)),
    )
    group = model.num_heads // model.num_kv_heads
    for kind, queries in (("decode", 1), ("chunk", 130)):
        for window in dict.fromkeys((None, model.window)):
            layer = AttentionLayer(model.head_dim**-0.5, window, model.soft_cap)
            features = (window is not None, model.soft_cap is not None)
            label = f"{model.name} {kind}{' in a window' * (window is not None)}"
            yield (
                (kind, group, model.head_dim, *pool, *features),
                Launch(
                    label,
                    lambda target, queries=queries, layer=layer: _attend(
                        model, target, queries, layer
                    ),
                    lambda target, kind=kind: _attention_needs(model, target, kind),
                ),
            )


def _norm(size: int) -> None:
    ops, hidden, weight = TritonOps(), _zeros(2, size), torch.zeros(size)
    ops.add_rms_norm(hidden, hidden.clone(), weight, 1e-5)
    ops.add_rms_norm(hidden, None, weight, 1e-5)


def _rotate(model: Model, target: Target) -> None:
    kv = _pool(model, target)
    if kv is None:
        return
    size = model.head_dim
    rotary_dim = size if model.rotary_dim is None else model.rotary_dim
    tokens = StepTokens(torch.zeros(2, dtype=torch.int64), Slots(torch.zeros(2).int()))
    norms = HeadNorms(torch.zeros(size), torch.zeros(size), 1e-6)
    rope = RopeTables(torch.zeros(16, rotary_dim // 2), torch.zeros(16, rotary_dim // 2))
    TritonOps().rotate_and_write(
        _zeros(2, model.num_heads + 2 * model.num_kv_heads, size),
        kv,
        tokens,
        norms if model.has_head_norms else None,
        rope if rotary_dim else None,
    )


def _pool(model: Model, target: Target) -> LayerKv | None:
    """A layer's pool, or None where the target has not its type."""
    kv_dtype = float8_type(target) if model.is_float8 else torch.bfloat16
    if kv_dtype is None:
        return None
    pool = _zeros(2, model.num_kv_heads, model.page, model.head_dim).to(kv_dtype)
    return LayerKv(pool, pool.clone())


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
        numbers={p.name: floats for p in PARAMETERS if p.stage is Stage.ADJUST},
    )
    ops.adjust_logits(logits, adjustments)
    share = torch.ones(1, dtype=torch.float64)
    draws = Draws(
        seeds=longs,
        positions=longs,
        is_drawn=ints,
        numbers={"top_k": ints, "top_p": share, "min_p": share},
    )
    tokens = ops.sample(logits, draws)
    verification = Verification(
        sample_starts=ints, num_samples=ints, draft_starts=ints, drafts=ints
    )
    ops.accept(tokens, verification)


def _zeros(*size: int) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.bfloat16)


def _attend(model: Model, target: Target, num_queries: int, layer: AttentionLayer) -> None:
    kv = _pool(model, target)
    if kv is None:
        return
    setup = AttentionSetup(
        shape=KvShape(2, model.page, model.num_kv_heads, model.head_dim),
        num_heads=model.num_heads,
        kv_dtype=kv.key.dtype,
        windows=(layer.sliding_window,),
        max_num_seqs=1,
        max_num_batched_tokens=num_queries,
        max_model_len=4096,
    )
    step = TritonAttention(setup, target, CPU).prepare(
        StepShape(
            np.array([0, num_queries], np.int32),
            np.array([4096], np.int32),
            np.zeros(num_queries, np.int64),
            np.zeros((1, 4096 // model.page), dtype=np.int32),
            num_queries,
        )
    )
    query = _zeros(num_queries, model.num_heads, model.head_dim)
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
