"""Puts a worker's model together: weights, KV pool, attention, rows."""

import logging
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from gpuworker import kv_pool
from gpuworker.attention import flashinfer
from gpuworker.attention.cpu import TorchAttention
from gpuworker.attention.flashinfer import (
    FlashInferAttention,
    FlashInferSetup,
    FlashInferUnavailableError,
)
from gpuworker.attention.interface import AttentionBackend
from gpuworker.attention.native import NativeAttention
from gpuworker.attention.native_library import NativeUnavailableError
from gpuworker.attention.triton.device import detect, float8_type
from gpuworker.config import KvCacheSettings, WorkerSettings
from gpuworker.core.input_batch import BatchLimits
from gpuworker.models.config import ModelConfig
from gpuworker.models.loader import Progress, load_decoder, with_max_model_len
from gpuworker.models.source import WeightSource, open_source
from gpuworker.runner import ModelRunner

logger = logging.getLogger(__name__)

# The first is the best where it runs.
_ATTENTION_BY_DEVICE = {"cpu": ("native", "torch"), "cuda": ("triton", "flashinfer", "torch")}
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class Engine:
    """A runner and what it is, in words."""

    runner: ModelRunner
    device: str  # e.g. "cpu" or "NVIDIA H100 80GB"
    dtype: str  # e.g. "float32"
    kv_dtype: str


def load_engine(
    settings: WorkerSettings, kv_cache: KvCacheSettings, model: Path, progress: Progress
) -> Engine:
    """Loads the model and allocates its KV pool; takes seconds to minutes.

    To be called on the thread that will run the model.

    Raises:
        WeightError, UnsupportedModelError: the model cannot be read or run.
        KvPoolError: there is no memory for a KV pool.
        ValueError: a setting does not fit the model or the machine.
    """
    return engine_of(open_source(model), settings, kv_cache, progress)


def engine_of(
    source: WeightSource, settings: WorkerSettings, kv_cache: KvCacheSettings, progress: Progress
) -> Engine:
    """As load_engine, with weights from anywhere."""
    if settings.num_spec_tokens < 0:
        raise ValueError("num-spec-tokens must be at least 0")
    device = _device(settings.device)
    source.config = with_max_model_len(source.config, settings.max_model_len)
    dtype = _dtype(settings.dtype, device)
    kv_dtype = _kv_dtype(kv_cache.kv_cache_dtype, device, dtype)
    decoder = load_decoder(source, device, dtype, progress)
    place = (device, kv_dtype)
    limits = _limits(settings, kv_cache, source.config, source.eos_token_ids, place)
    kv = kv_pool.allocate(source.config, limits.num_kv_blocks, limits.block_size, kv_dtype, device)
    attention = attention_backend(
        settings.attention, limits, source.config, (device, dtype), kv_dtype
    )
    runner = ModelRunner(
        decoder, attention, kv, limits, time.perf_counter, settings.num_spec_tokens
    )
    names = (str(dtype).removeprefix("torch.") for dtype in (dtype, kv_dtype))
    return Engine(runner, _device_name(device), *names)


def _device(name: str) -> torch.device:
    has_cuda = torch.cuda.is_available()
    if name == "cuda" and not has_cuda:
        raise ValueError("device cuda: torch sees no GPU here")
    if name == "cpu" or not has_cuda:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _dtype(name: str, device: torch.device) -> torch.dtype:
    if name != "auto":
        return _DTYPES[name]
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def _kv_dtype(name: str, device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """The pool's type: the model's, or the device's eight-bit float.

    Raises:
        ValueError: the device has none.
    """
    if name == "auto":
        return dtype
    if device.type == "cpu":
        return torch.float8_e4m3fn
    target = detect(device)
    float8 = float8_type(target)
    if float8 is None:
        raise ValueError(
            f"kv-cache-dtype fp8: {target.arch} has no eight-bit floats (NVIDIA has them from "
            "sm89 on, AMD on gfx942); leave it at auto"
        )
    return float8


def attention_backend(
    name: str,
    limits: BatchLimits,
    config: ModelConfig,
    place: tuple[torch.device, torch.dtype],
    kv_dtype: torch.dtype,
) -> AttentionBackend:
    """The backend of that name, or for "auto" the best there is; place is the model's.

    Raises:
        ValueError: the one asked for cannot run here.
    """
    device, dtype = place
    shape = kv_pool.kv_shape(config, limits.num_kv_blocks, limits.block_size)
    best, *others = _ATTENTION_BY_DEVICE[device.type]
    if name not in {"auto", best, *others}:
        raise ValueError(f"attention {name}: does not run on {device.type}")
    if name == "torch":
        return TorchAttention(shape, config.attention.num_heads, device)
    try:
        if name == "flashinfer":
            setup = FlashInferSetup(shape, config.attention.num_heads, dtype, kv_dtype)
            return FlashInferAttention(setup, device, flashinfer.load())
        if best == "native":
            return NativeAttention(shape, config.attention.num_heads, dtype, kv_dtype)
        return _triton_attention(limits, config, device, kv_dtype)
    except (NativeUnavailableError, FlashInferUnavailableError, ImportError) as error:
        if name != "auto":
            raise ValueError(f"attention {name}: {error}") from error
        logger.warning("attention by torch, which is slower: %s", error)
        return TorchAttention(shape, config.attention.num_heads, device)


def _triton_attention(
    limits: BatchLimits, config: ModelConfig, device: torch.device, kv_dtype: torch.dtype
) -> AttentionBackend:
    """The GPU kernels; triton is imported only where they run."""
    from gpuworker.attention.triton.backend import AttentionSetup, TritonAttention

    setup = AttentionSetup(
        shape=kv_pool.kv_shape(config, limits.num_kv_blocks, limits.block_size),
        num_heads=config.attention.num_heads,
        kv_dtype=kv_dtype,
        windows=tuple({layer.sliding_window for layer in config.layers}),
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_model_len=limits.max_model_len,
    )
    return TritonAttention(setup, detect(device), device)


def _limits(
    settings: WorkerSettings,
    kv_cache: KvCacheSettings,
    config: ModelConfig,
    eos_token_ids: tuple[int, ...],
    pool_place: tuple[torch.device, torch.dtype],
) -> BatchLimits:
    """Sizes of rows and pool, from the settings, the model and the memory that is left."""
    device, kv_dtype = pool_place
    is_cpu = device.type == "cpu"
    block_size = kv_cache.block_size or (16 if is_cpu else 64)
    max_num_batched_tokens = settings.max_num_batched_tokens or (512 if is_cpu else 8192)
    if settings.max_num_seqs < 1 or max_num_batched_tokens < 1:
        raise ValueError("max-num-seqs and max-num-batched-tokens must be at least 1")
    num_kv_blocks = kv_cache.num_kv_blocks
    if num_kv_blocks is None:
        pool_bytes = kv_cache.kv_cache_memory_bytes or kv_pool.available_bytes(device)
        blocks_per_request = -(-config.max_model_len // block_size)
        num_kv_blocks = kv_pool.num_blocks_that_fit(
            pool_bytes,
            kv_pool.block_bytes(config, block_size, kv_dtype),
            settings.max_num_seqs * blocks_per_request,
        )
    elif num_kv_blocks < 1:
        raise ValueError("num-kv-blocks must be at least 1")
    else:
        num_kv_blocks += 1  # the null block
    return BatchLimits(
        max_num_seqs=settings.max_num_seqs,
        max_model_len=config.max_model_len,
        max_num_batched_tokens=max_num_batched_tokens,
        block_size=block_size,
        num_kv_blocks=num_kv_blocks,
        vocab_size=config.vocab_size,
        eos_token_ids=eos_token_ids,
    )
