"""Paged attention on a CPU, with a C++ kernel compiled for this machine (paged.cpp).

The kernel reads keys and values in place, so a decode reads its context's KV once. The bits of a
query's result do not depend on the other requests of the batch.
"""

import ctypes
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
from gpuworker.attention.native_library import NativeUnavailableError, load_library
from gpuworker.core.plan import Int32Array
from gpuworker.core.ragged import ranks

TILE = 16
# Rows per piece, so that its queries, keys and outputs fit the first-level cache.
_MAX_PIECE_ROWS = 48
_SUFFIXES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


class _Step(ctypes.Structure):
    """The struct Step of paged.cpp."""

    _fields_ = (
        ("query_start_loc", ctypes.c_void_p),
        ("seq_lens", ctypes.c_void_p),
        ("block_table", ctypes.c_void_p),
        ("slot_mapping", ctypes.c_void_p),
        ("pieces", ctypes.c_void_p),
        ("table_width", ctypes.c_int64),
        ("num_tokens", ctypes.c_int64),
        ("num_pieces", ctypes.c_int64),
        ("max_piece_queries", ctypes.c_int64),
        ("num_heads", ctypes.c_int64),
        ("num_kv_heads", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("block_size", ctypes.c_int64),
        ("num_threads", ctypes.c_int64),
    )


class _LayerArguments(ctypes.Structure):
    """The struct Layer of paged.cpp."""

    _fields_ = (
        ("query_stride", ctypes.c_int64),
        ("key_stride", ctypes.c_int64),
        ("value_stride", ctypes.c_int64),
        ("window", ctypes.c_int64),
        ("scale", ctypes.c_float),
        ("soft_cap", ctypes.c_float),
    )


class NativeAttention(AttentionBackend):
    """Attention with the compiled kernel.

    Args:
        shape: size of each layer's pool.
        num_heads: query heads; a multiple of the KV heads.
        dtype: type of queries.
        kv_dtype: type of the pool.

    Raises:
        NativeUnavailableError: the kernel cannot be built here, or does not support these sizes or
            types.
    """

    def __init__(
        self, shape: KvShape, num_heads: int, dtype: torch.dtype, kv_dtype: torch.dtype
    ) -> None:
        if kv_dtype != dtype:
            raise NativeUnavailableError(f"no code for keys and values in {kv_dtype}")
        if dtype not in _SUFFIXES or shape.block_size % TILE or shape.head_dim % TILE:
            raise NativeUnavailableError(
                f"no code for {dtype}, block size {shape.block_size}, head size {shape.head_dim}"
            )
        self.shape = shape
        self.num_heads = num_heads
        library = load_library()
        self.attend = _function(library, f"attend_{_SUFFIXES[dtype]}")
        self.write = _function(library, f"write_{_SUFFIXES[dtype]}")

    def prepare(self, shape: StepShape) -> PreparedStep:
        return _NativeStep(shape, self)


class _NativeStep(PreparedStep):
    def __init__(self, shape: StepShape, backend: NativeAttention) -> None:
        self._backend = backend
        self._shape = shape
        kv_shape = backend.shape
        group = backend.num_heads // kv_shape.num_kv_heads
        max_queries = max(_MAX_PIECE_ROWS // group, 1)
        pieces = _cut(np.diff(shape.query_start_loc), max_queries)
        # Keeps the arrays alive: `_Step` holds pointers into them.
        self._arrays = (
            np.ascontiguousarray(shape.query_start_loc, dtype=np.int32),
            np.ascontiguousarray(shape.seq_lens, dtype=np.int32),
            np.ascontiguousarray(shape.block_table, dtype=np.int32),
            np.ascontiguousarray(shape.slot_mapping, dtype=np.int64),
            pieces,
        )
        self._step = _Step(
            *(array.ctypes.data for array in self._arrays),
            table_width=shape.block_table.shape[1],
            num_tokens=shape.num_tokens,
            num_pieces=len(pieces),
            max_piece_queries=max_queries,
            num_heads=backend.num_heads,
            num_kv_heads=kv_shape.num_kv_heads,
            head_dim=kv_shape.head_dim,
            block_size=kv_shape.block_size,
            num_threads=torch.get_num_threads(),
        )

    @property
    def slots(self) -> torch.Tensor:
        return torch.from_numpy(self._shape.padded_slots())

    def write(self, kv: LayerKv, key: torch.Tensor, value: torch.Tensor) -> None:
        key, value = _dense_heads(key), _dense_heads(value)
        layer = _LayerArguments(key_stride=key.stride(0), value_stride=value.stride(0))
        self._call(self._backend.write, layer, key, value, kv.key, kv.value)

    def attend(self, query: torch.Tensor, kv: LayerKv, layer: AttentionLayer) -> torch.Tensor:
        query = _dense_heads(query)
        out = torch.empty(query.shape, dtype=query.dtype)
        out[self._shape.num_tokens :] = 0
        settings = _LayerArguments(
            query_stride=query.stride(0),
            window=layer.sliding_window or 0,
            scale=layer.scale,
            soft_cap=layer.soft_cap or 0.0,
        )
        self._call(self._backend.attend, settings, query, kv.key, kv.value, out)
        return out

    def _call(self, function: Any, layer: _LayerArguments, *tensors: torch.Tensor) -> None:
        function(
            ctypes.byref(self._step),
            ctypes.byref(layer),
            *(tensor.data_ptr() for tensor in tensors),
        )


def _cut(num_queries: Int32Array, max_queries: int) -> NDArray[np.int32]:
    """Cuts requests into pieces of at most max_queries.

    Returns:
        [num_pieces, 3]: request, first query, number of queries.
    """
    counts = -(-num_queries // max_queries)
    request = np.repeat(np.arange(len(num_queries)), counts)
    first = ranks(counts) * max_queries
    size = np.minimum(num_queries[request] - first, max_queries)
    return np.ascontiguousarray(np.stack([request, first, size], axis=1), dtype=np.int32)


def _dense_heads(x: torch.Tensor) -> torch.Tensor:
    """The tensor with each token's heads contiguous; tokens may be strided."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


def _function(library: ctypes.CDLL, name: str) -> Any:
    function = getattr(library, name)
    function.argtypes = [ctypes.c_void_p] * 6
    function.restype = None
    return function
