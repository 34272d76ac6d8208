"""Paged attention with the FlashInfer library, an optional backend for NVIDIA GPUs.

FlashInfer's wrappers plan on the host, once per step and kind of layer, so steps are not replayed
from CUDA graphs. Requests with one query run in FlashInfer's decode kernels, all others in its
prefill kernels. The layout of the pool is the one that FlashInfer calls HND.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gpuworker.attention.interface import (
    AttentionBackend,
    AttentionLayer,
    KvShape,
    LayerKv,
    PreparedStep,
    StepShape,
)

_HEAD_DIMS = {64, 128, 256}
_DTYPES = {torch.float16, torch.bfloat16}
# The size that FlashInfer recommends. One kernel at a time uses the workspace.
_WORKSPACE_BYTES = 128 << 20
# With at least this many query heads per KV head, a decode is faster on tensor cores.
_TENSOR_CORE_GROUP = 4


class FlashInferUnavailableError(Exception):
    """FlashInfer is not installed or does not support this model; the message says which."""


@dataclass(frozen=True, slots=True)
class FlashInferSetup:
    """The model that attention is built for; dtype is the type of queries."""

    shape: KvShape
    num_heads: int
    dtype: torch.dtype
    kv_dtype: torch.dtype


class FlashInferAttention(AttentionBackend):
    """FlashInfer's attention on one device.

    Args:
        setup: the model.
        device: the device of all tensors.
        library: the module that `load()` returns.

    Raises:
        FlashInferUnavailableError: FlashInfer does not support this model.
    """

    def __init__(self, setup: FlashInferSetup, device: torch.device, library: ModuleType) -> None:
        if setup.dtype not in _DTYPES or setup.shape.head_dim not in _HEAD_DIMS:
            raise FlashInferUnavailableError(
                f"flashinfer has no code for {setup.dtype} and heads of {setup.shape.head_dim}; "
                "flashinfer takes float16 or bfloat16 and heads of 64, 128 or 256"
            )
        self.setup = setup
        self.device = device
        self._library = library
        # FlashInfer requires a zeroed workspace at the first use.
        self._workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._kernels: dict[tuple[AttentionLayer, bool], _Kernels] = {}

    def prepare(self, shape: StepShape) -> PreparedStep:
        return _FlashInferStep(shape, self)

    def kernels(self, layer: AttentionLayer, *, is_decode: bool) -> "_Kernels":
        """The FlashInfer wrapper for one kind of layer; a wrapper holds the plan of one step."""
        name = (layer, is_decode)
        if name not in self._kernels:
            wrapper = self._make_wrapper(is_decode=is_decode)
            self._kernels[name] = _Kernels(wrapper, self.device)
        return self._kernels[name]

    def _make_wrapper(self, *, is_decode: bool) -> Any:
        if not is_decode:
            return self._library.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "HND")
        group = self.setup.num_heads // self.setup.shape.num_kv_heads
        return self._library.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace, "HND", use_tensor_cores=group >= _TENSOR_CORE_GROUP
        )


class _Kernels:
    """A FlashInfer wrapper that plans a step only after the last plan was copied to the device.

    Plans share one host buffer, and the host may be a step ahead of the device: without the wait,
    a new plan could overwrite the buffer during the copy.
    """

    def __init__(self, wrapper: Any, device: torch.device) -> None:
        self.run = wrapper.run
        self._plan = wrapper.plan
        self._copied: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def plan(self, *arguments: Any, **options: Any) -> None:
        """Plans a step, with the arguments of the wrapper's own `plan`."""
        if self._copied is not None:
            self._copied.synchronize()
        self._plan(*arguments, **options)
        if self._copied is not None:
            self._copied.record()


@dataclass(frozen=True, slots=True)
class _Part:
    """Requests of a step that run in the same kernels, in FlashInfer's format.

    Tensors are int32 on the host: FlashInfer plans there and copies the plan to the device.
    """

    is_decode: bool
    tokens: torch.Tensor | None  # [num_tokens] int64 on the device; None: all tokens of the step
    query_starts: torch.Tensor  # [num_reqs + 1]
    page_starts: torch.Tensor  # [num_reqs + 1]
    pages: torch.Tensor  # [page_starts[-1]]
    last_page_lens: torch.Tensor  # [num_reqs] tokens in each request's last page


class _FlashInferStep(PreparedStep):
    def __init__(self, shape: StepShape, backend: FlashInferAttention) -> None:
        self._backend = backend
        self._num_tokens = shape.num_tokens
        self._slots = torch.from_numpy(shape.padded_slots()).to(backend.device, non_blocking=True)
        self._parts = list(_parts(shape, backend.setup.shape.block_size, backend.device))
        self._planned: set[AttentionLayer] = set()

    @property
    def slots(self) -> torch.Tensor:
        return self._slots

    def attend(self, query: torch.Tensor, kv: LayerKv, layer: AttentionLayer) -> torch.Tensor:
        if layer not in self._planned:
            for part in self._parts:
                self._plan(part, layer)
            self._planned.add(layer)
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        out[self._num_tokens :] = 0
        for part in self._parts:
            kernels = self._backend.kernels(layer, is_decode=part.is_decode)
            pools = (kv.key, kv.value)
            if part.tokens is None:
                out[: self._num_tokens] = kernels.run(query[: self._num_tokens].contiguous(), pools)
            else:
                result = kernels.run(query.index_select(0, part.tokens), pools)
                out.index_copy_(0, part.tokens, result)
        return out

    def _plan(self, part: _Part, layer: AttentionLayer) -> None:
        setup = self._backend.setup
        pages = (part.page_starts, part.pages, part.last_page_lens)
        sizes = (
            setup.num_heads,
            setup.shape.num_kv_heads,
            setup.shape.head_dim,
            setup.shape.block_size,
        )
        window = layer.sliding_window
        options: dict[str, Any] = {
            "sm_scale": layer.scale,
            # Number of keys before the query; -1 means all.
            "window_left": -1 if window is None else window - 1,
            "logits_soft_cap": layer.soft_cap,
            "q_data_type": setup.dtype,
            "kv_data_type": setup.kv_dtype,
        }
        kernels = self._backend.kernels(layer, is_decode=part.is_decode)
        if part.is_decode:
            kernels.plan(*pages, *sizes, **options)
        else:
            kernels.plan(part.query_starts, *pages, *sizes, causal=True, **options)


def _parts(shape: StepShape, page: int, device: torch.device) -> Iterator[_Part]:
    """Splits a step into the requests with one query and all other requests."""
    queries = np.diff(shape.query_start_loc)
    for is_decode in (True, False):
        members = np.flatnonzero((queries == 1) == is_decode)
        if not len(members):
            continue
        tokens = None
        if len(members) < len(queries):
            ranges = zip(shape.query_start_loc[members], queries[members], strict=True)
            index = np.concatenate([np.arange(start, start + count) for start, count in ranges])
            tokens = torch.from_numpy(index.astype(np.int64)).to(device, non_blocking=True)
        seq_lens = shape.seq_lens[members]
        num_pages = -(-seq_lens // page)
        is_used = np.arange(shape.block_table.shape[1]) < num_pages[:, None]
        yield _Part(
            is_decode,
            tokens,
            _host(np.concatenate(([0], np.cumsum(queries[members])))),
            _host(np.concatenate(([0], np.cumsum(num_pages)))),
            _host(shape.block_table[members][is_used]),
            _host((seq_lens - 1) % page + 1),
        )


def _host(values: NDArray[np.integer]) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.int32))


def load() -> ModuleType:
    """Imports FlashInfer; called only when this backend is chosen.

    Raises:
        FlashInferUnavailableError: FlashInfer is not installed.
    """
    try:
        import flashinfer
    except ImportError as error:
        raise FlashInferUnavailableError(
            f"{error}; pip install 'headrace[flashinfer]', or choose another attention"
        ) from error
    library: ModuleType = flashinfer
    return library
