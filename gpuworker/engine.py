"""Puts a worker's model together: weights, KV pool, attention, rows."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from gpuworker import kv_pool, memory_profile
from gpuworker.attention import flashinfer
from gpuworker.attention.cpu import TorchAttention
from gpuworker.attention.flashinfer import (
    FlashInferAttention,
    FlashInferSetup,
    FlashInferUnavailableError,
)
from gpuworker.attention.interface import AttentionBackend, LayerKv
from gpuworker.attention.native import NativeAttention
from gpuworker.attention.native_library import NativeUnavailableError
from gpuworker.attention.triton.device import detect, float8_type
from gpuworker.config import KvCacheSettings, WorkerSettings
from gpuworker.core.input_batch import BatchLimits
from gpuworker.device.graphs import (
    CudaGraphRecorder,
    GraphRecorder,
    checked_sizes,
    default_sizes,
)
from gpuworker.device.memory import CudaMemory, MemoryReader
from gpuworker.device.transfers import CudaTransfers, HostTransfers, Transfers
from gpuworker.forward import Forward
from gpuworker.kernels.choice import ops_for
from gpuworker.kernels.ops import Ops
from gpuworker.kernels.twins import TorchOps
from gpuworker.machine import driver_version, give_back_freed_memory, gpu_driver
from gpuworker.models.config import ModelConfig
from gpuworker.models.decoder import Decoder
from gpuworker.models.loader import ReportCount, load_decoder, with_max_model_len
from gpuworker.models.source import WeightSource
from gpuworker.runner import ModelRunner
from gpuworker.sampling.sampler import Sampler
from gpuworker.step_inputs import InputStaging
from headrace.service.progress import say

logger = logging.getLogger(__name__)

# The first backend of a device is the fastest one where it can run.
_ATTENTION_BY_DEVICE = {"cpu": ("native", "torch"), "cuda": ("triton", "flashinfer", "torch")}
# Backends whose steps a CUDA graph can replay: they prepare on the host, at fixed addresses.
_CAPTURABLE_ATTENTION = {"auto", "triton"}
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A loaded model: its runner, and its device and types in words."""

    runner: ModelRunner
    device: str  # e.g. "cpu" or "NVIDIA H100 80GB"
    dtype: str  # e.g. "float32"
    kv_dtype: str
    # Steps to keep in flight: 1 on a CPU or with drafts, where a step ends before the next begins.
    pipeline_depth: int = 1
    # Of a GPU; see `machine.driver_version`.
    driver: str = ""
    device_memory_bytes: int = 0


@dataclass(frozen=True, slots=True)
class DeviceParts:
    """The parts of a runner that depend on the kind of device.

    make_recorder is None where there are no CUDA graphs, memory where the device has no memory of
    its own.
    """

    ops: Ops
    transfers: Transfers
    make_recorder: Callable[[], GraphRecorder] | None = None
    memory: MemoryReader | None = None

    @staticmethod
    def of(device: torch.device) -> "DeviceParts":
        """The fused kernels on a GPU, torch's own elsewhere."""
        if device.type == "cpu":
            return DeviceParts(ops_for(device), HostTransfers())
        ops = ops_for(device)
        # TorchOps reads values back from the device, which a CUDA graph cannot record.
        make_recorder = None if isinstance(ops, TorchOps) else CudaGraphRecorder
        return DeviceParts(ops, CudaTransfers(device), make_recorder, CudaMemory(device))


def load_engine(
    settings: WorkerSettings,
    kv_cache: KvCacheSettings,
    source: WeightSource,
    *,
    loading: ReportCount,
    capturing: ReportCount,
    parts: DeviceParts | None = None,
) -> LoadedModel:
    """Loads the model, allocates its KV pool and captures its graphs; takes seconds to minutes.

    To be called on the thread that will run the model.

    Args:
        settings: of the worker.
        kv_cache: of its pool.
        source: the model's weights; its configuration gets the context length of the settings.
        loading: told how many tensors are loaded.
        capturing: told how many graphs are captured.
        parts: the device's own by default.

    Raises:
        WeightError, UnsupportedModelError: the model cannot be read or run.
        KvPoolError: there is no memory for a KV pool.
        ValueError: a setting does not fit the model or the machine.
    """
    if settings.num_spec_tokens < 0:
        raise ValueError("num-spec-tokens must be at least 0")
    device = _device(settings.device)
    parts = parts or DeviceParts.of(device)
    source.config = with_max_model_len(source.config, settings.max_model_len)
    dtype = _dtype(settings.dtype, device)
    kv_dtype = _kv_dtype(kv_cache.kv_cache_dtype, device, dtype)
    limits = _limits(settings, kv_cache, source.config, source.eos_token_ids, device)
    graph_sizes = _graph_sizes(settings, limits, parts)
    started = time.monotonic()
    decoder = load_decoder(source, device, dtype, loading, parts.ops)
    logger.info(
        "read %d tensors in %.1f s, as %s on %s",
        len(source.names()),
        time.monotonic() - started,
        dtype,
        _device_name(device),
    )
    give_back_freed_memory()
    assembly = Assembly(decoder, limits, settings.attention, kv_dtype, parts)
    num_kv_blocks = _num_kv_blocks(kv_cache, assembly, graph_sizes)
    runner = assembly.runner(num_kv_blocks, settings.num_spec_tokens)
    if graph_sizes and parts.make_recorder is not None:
        started = time.monotonic()
        runner.forward.capture(graph_sizes, parts.make_recorder(), capturing)
        logger.info(
            "captured %d CUDA graphs in %.1f s", len(graph_sizes), time.monotonic() - started
        )
    is_ahead = device.type != "cpu" and settings.num_spec_tokens == 0
    return LoadedModel(
        runner,
        _device_name(device),
        str(dtype).removeprefix("torch."),
        str(kv_dtype).removeprefix("torch."),
        pipeline_depth=2 if is_ahead else 1,
        driver=_driver(device),
        device_memory_bytes=_memory_bytes(device),
    )


@dataclass(frozen=True, slots=True)
class Assembly:
    """A runner except for the size of its KV pool; num_kv_blocks of the limits is not set."""

    decoder: Decoder
    limits: BatchLimits
    attention: str
    kv_dtype: torch.dtype
    parts: DeviceParts

    def runner(self, num_kv_blocks: int, num_spec_tokens: int = 0) -> ModelRunner:
        """Builds a runner with a KV pool of num_kv_blocks blocks, including the null block."""
        decoder, config = self.decoder, self.decoder.config
        limits = replace(self.limits, num_kv_blocks=num_kv_blocks)
        kv = kv_pool.allocate(
            config, num_kv_blocks, limits.block_size, self.kv_dtype, decoder.device
        )
        target = (decoder.device, decoder.dtype)
        attention = attention_backend(self.attention, limits, config, target, self.kv_dtype)
        return build_runner(decoder, attention, kv, limits, self.parts, num_spec_tokens)


def build_runner(
    decoder: Decoder,
    attention: AttentionBackend,
    kv: Sequence[LayerKv],
    limits: BatchLimits,
    parts: DeviceParts,
    num_spec_tokens: int = 0,
) -> ModelRunner:
    """Builds a runner from its parts."""
    sampler = Sampler(parts.ops, limits, decoder.device, parts.transfers)
    staging = InputStaging(limits, decoder.device)
    forward = Forward(decoder, attention, kv, staging, sampler.last_tokens)
    return ModelRunner(
        forward,
        sampler,
        parts.transfers,
        limits,
        clock=time.perf_counter,
        num_spec_tokens=num_spec_tokens,
    )


def _device(name: str) -> torch.device:
    has_cuda = torch.cuda.is_available()
    if name == "cuda" and not has_cuda:
        raise ValueError("device cuda: torch sees no GPU here")
    if name == "cpu" or not has_cuda:
        if name == "auto" and (driver := gpu_driver()) is not None:
            logger.warning(
                "running on the CPU although there is a GPU driver (%s): this torch, %s, sees no "
                "GPU; install one built for the driver, or say --device cpu",
                driver,
                torch.__version__,
            )
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _driver(device: torch.device) -> str:
    """The GPU's runtime and driver, for people; "" on a CPU."""
    if device.type != "cuda":
        return ""
    runtime = f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
    return f"{runtime}, driver {driver_version() or 'unknown'}"


def _memory_bytes(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0


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
    target: tuple[torch.device, torch.dtype],
    kv_dtype: torch.dtype,
) -> AttentionBackend:
    """The attention backend called `name`, or for "auto" the fastest that runs here.

    Raises:
        ValueError: the backend that was asked for cannot run here.
    """
    device, dtype = target
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
    device: torch.device,
) -> BatchLimits:
    """The limits of a batch; num_kv_blocks is set later, when the memory is known."""
    is_cpu = device.type == "cpu"
    max_num_batched_tokens = settings.max_num_batched_tokens or (512 if is_cpu else 8192)
    if settings.max_num_seqs < 1 or max_num_batched_tokens < 1:
        raise ValueError("max-num-seqs and max-num-batched-tokens must be at least 1")
    return BatchLimits(
        max_num_seqs=settings.max_num_seqs,
        max_model_len=config.max_model_len,
        max_num_batched_tokens=max_num_batched_tokens,
        block_size=kv_cache.block_size or (16 if is_cpu else 64),
        num_kv_blocks=0,
        vocab_size=config.vocab_size,
        eos_token_ids=eos_token_ids,
    )


def _graph_sizes(
    settings: WorkerSettings, limits: BatchLimits, parts: DeviceParts
) -> tuple[int, ...]:
    """Padded sizes of steps to capture; none where there are no graphs."""
    can_capture = settings.attention in _CAPTURABLE_ATTENTION
    if settings.enforce_eager or parts.make_recorder is None or not can_capture:
        return ()
    most = limits.max_num_seqs * (1 + settings.num_spec_tokens)
    most = min(most, limits.max_num_batched_tokens)
    return checked_sizes(settings.cuda_graph_sizes, most) or default_sizes(most)


def _num_kv_blocks(
    kv_cache: KvCacheSettings, assembly: Assembly, graph_sizes: tuple[int, ...]
) -> int:
    """Blocks of the pool, the null block included: as asked for, or what memory there is."""
    if kv_cache.num_kv_blocks is not None:
        if kv_cache.num_kv_blocks < 1:
            raise ValueError("num-kv-blocks must be at least 1")
        return kv_cache.num_kv_blocks + 1
    limits, config = assembly.limits, assembly.decoder.config
    block_bytes = kv_pool.block_bytes(config, limits.block_size, assembly.kv_dtype)
    most = limits.max_num_seqs * -(-limits.max_model_len // limits.block_size)
    pool_bytes = kv_cache.kv_cache_memory_bytes
    if pool_bytes is None:
        pool_bytes = _free_bytes(kv_cache.gpu_memory_utilization, assembly, graph_sizes)
    return kv_pool.num_blocks_that_fit(pool_bytes, block_bytes, most)


def _free_bytes(utilization: float, assembly: Assembly, graph_sizes: tuple[int, ...]) -> int:
    """Bytes for the KV pool: what weights, activations and graphs leave."""
    parts = assembly.parts
    if parts.memory is None:
        return kv_pool.host_bytes()
    name, started = _device_name(assembly.decoder.device), time.monotonic()
    say("running the largest step to measure memory")
    budget = memory_profile.measure(
        lambda: assembly.runner(memory_profile.NUM_PROFILE_BLOCKS),
        parts.memory,
        utilization,
        graph_sizes,
        parts.make_recorder if graph_sizes else None,
    )
    logger.info("measured in %.1f s: memory of %s\n%s", time.monotonic() - started, name, budget)
    return budget.kv_pool
