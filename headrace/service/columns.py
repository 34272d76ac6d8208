"""Packs columns: little-endian arrays in `bytes` fields of messages between services."""

import numpy as np
from numpy.typing import NDArray

from headrace.service.errors import invalid

_INT32 = np.dtype("<i4")
_UINT32 = np.dtype("<u4")


def pack_int32(values: NDArray[np.int32]) -> bytes:
    """The bytes of a column; values is [n]."""
    return np.ascontiguousarray(values, dtype=_INT32).tobytes()


def pack_uint32(values: NDArray[np.uint32]) -> bytes:
    """The bytes of a column; values is [n]."""
    return np.ascontiguousarray(values, dtype=_UINT32).tobytes()


def unpack_int32(data: bytes, field: str) -> NDArray[np.int32]:
    """A read-only view of the column in `data`; ServiceError names `field` for a wrong size."""
    _check_size(data, field)
    return np.frombuffer(data, dtype=_INT32)


def unpack_uint32(data: bytes, field: str) -> NDArray[np.uint32]:
    """A read-only view of the column in `data`; ServiceError names `field` for a wrong size."""
    _check_size(data, field)
    return np.frombuffer(data, dtype=_UINT32)


def _check_size(data: bytes, field: str) -> None:
    if len(data) % 4:
        raise invalid(field, f"must hold 4-byte integers, has {len(data)} bytes")
