"""Reads weights from a Hugging Face folder: config.json and memory-mapped safetensors files.

A safetensors file is a JSON header of names, types, shapes and offsets, then the bytes. This module
parses the header itself, so that the error for a truncated file can name the incomplete tensor.
"""

import json
import math
import mmap
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gpuworker.models.checks import HF_BOUNDS, check_values
from gpuworker.models.config import ModelConfig
from gpuworker.models.embedding import StoredRows
from gpuworker.models.errors import WeightError
from gpuworker.models.families import model_config

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
# Limit for a header or a configuration; the header of 100,000 tensors in one file has 12 MB.
_MAX_JSON_BYTES = 1 << 25
_MAX_DIMENSIONS = 8


@dataclass(frozen=True, slots=True)
class _StoredTensor:
    """A tensor's location, type and shape."""

    file: Path
    buffer: mmap.mmap
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int  # bytes from the file's start


class SafetensorsSource:
    """A WeightSource over a folder; the maps live as long as this object and its tensors."""

    def __init__(self, folder: Path) -> None:
        hf = _read_json(folder / "config.json")
        check_values("config.json", hf, HF_BOUNDS)
        self.config: ModelConfig = model_config(hf)
        self.eos_token_ids = _eos_token_ids(folder, hf)
        self._tensor_by_name: dict[str, _StoredTensor] = {}
        for file in _files(folder):
            for name, tensor in _stored_tensors(file).items():
                if name in self._tensor_by_name:
                    raise WeightError(f"tensor {name!r} is in two files, {file.name} is one")
                self._tensor_by_name[name] = tensor
        if not self._tensor_by_name:
            raise WeightError(f"{folder} has no tensor in its .safetensors files")
        dtypes = [tensor.dtype for tensor in self._tensor_by_name.values()]
        self.dtype = max(set(dtypes), key=dtypes.count)

    def names(self) -> set[str]:
        return set(self._tensor_by_name)

    def read(self, name: str) -> torch.Tensor:
        tensor = self._tensor_by_name.get(name)
        if tensor is None:
            raise WeightError(f"tensor {name!r} is missing")
        with warnings.catch_warnings():
            # torch warns that the mapping is read-only; no code writes to these tensors.
            warnings.simplefilter("ignore", UserWarning)
            flat = torch.frombuffer(
                tensor.buffer,
                dtype=tensor.dtype,
                count=math.prod(tensor.shape),
                offset=tensor.offset,
            )
        return flat.view(tensor.shape)

    def stored_rows(self, name: str) -> StoredRows | None:
        table = self.read(name)
        return _NarrowRows(table.clone()) if table.dtype.itemsize < 4 else None


class _NarrowRows(StoredRows):
    """Rows in half precision; table is [num_rows, num_columns]."""

    def __init__(self, table: torch.Tensor) -> None:
        self._table = table

    def read(self, index: torch.Tensor) -> torch.Tensor:
        return self._table.index_select(0, index)


def _files(folder: Path) -> list[Path]:
    """The files that the index names; without an index, all safetensors files."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        by_tensor = _read_json(index).get("weight_map")
        if not isinstance(by_tensor, dict) or not by_tensor:
            raise WeightError(f"{index.name} has no weight_map of tensors to files")
        for name in by_tensor.values():
            if not isinstance(name, str) or Path(name).name != name:
                raise WeightError(f"{index.name} names {str(name)[:100]!r}, which is no file name")
        files = [folder / name for name in sorted(set(by_tensor.values()))]
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            raise WeightError(f"{index.name} names {missing[0]!r}, which is not in {folder}")
        return files
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise WeightError(f"{folder} has no .safetensors file")
    return files


def _stored_tensors(file: Path) -> dict[str, _StoredTensor]:
    """Reads a file's header: each tensor's location by name."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        head = stream.read(8)
        header_bytes = int.from_bytes(head, "little")
        if len(head) < 8 or header_bytes > min(size - 8, _MAX_JSON_BYTES):
            raise WeightError(f"{file.name} is not a whole safetensors file: its header is cut")
        header = _parsed(file.name, stream.read(header_bytes))
        buffer = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        dtype, shape = _type_and_shape(f"tensor {name!r} in {file.name}", entry)
        start, end = (8 + header_bytes + offset for offset in entry["data_offsets"])
        if end > size or end - start != math.prod(shape) * dtype.itemsize:
            raise WeightError(
                f"tensor {name!r} in {file.name} is truncated: it should end at byte {end}, "
                f"the file has {size}"
            )
        tensors[name] = _StoredTensor(file, buffer, dtype, shape, start)
    _refuse_overlap(file.name, tensors)
    return tensors


def _type_and_shape(where: str, entry: Any) -> tuple[torch.dtype, tuple[int, ...]]:
    """Type and shape of a header's entry; also checks that its offsets are numbers."""
    if not isinstance(entry, dict):
        raise WeightError(f"{where} is no object in the header")
    fields: list[Any] = [entry.get(key) for key in ("dtype", "shape", "data_offsets")]
    dtype, shape, offsets = fields
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise WeightError(
            f"{where} has type {str(dtype)[:40]}; supported are: {', '.join(_DTYPES)}"
        )
    if not _are_counts(shape, least=1) or len(shape) > _MAX_DIMENSIONS:
        raise WeightError(
            f"{where} has shape {str(shape)[:60]}; it must be at most {_MAX_DIMENSIONS} numbers "
            "from 1 on"
        )
    if not _are_counts(offsets, least=0) or len(offsets) != 2:
        raise WeightError(f"{where} has data_offsets {str(offsets)[:60]}; they must be two numbers")
    return _DTYPES[dtype], tuple(shape)


def _are_counts(value: Any, least: int) -> bool:
    """Whether a value is a list of integers in the range of file sizes."""
    return isinstance(value, list) and all(
        isinstance(number, int) and not isinstance(number, bool) and least <= number < 1 << 63
        for number in value
    )


def _refuse_overlap(file: str, tensors: dict[str, _StoredTensor]) -> None:
    """Rejects a file in which two tensors share a byte; the format forbids that."""
    end, before = 0, ""
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].offset):
        if tensor.offset < end:
            raise WeightError(f"tensors {before!r} and {name!r} in {file} overlap")
        end, before = tensor.offset + math.prod(tensor.shape) * tensor.dtype.itemsize, name


def _eos_token_ids(folder: Path, hf: dict[str, Any]) -> tuple[int, ...]:
    """The end-of-sequence tokens of generation_config.json, else of config.json."""
    file = folder / "generation_config.json"
    generation = _read_json(file) if file.exists() else {}
    check_values(file.name, generation, HF_BOUNDS)
    ids = generation.get("eos_token_id")
    if ids is None:
        ids = hf.get("eos_token_id")
    if ids is None:
        return ()
    return tuple(ids) if isinstance(ids, list) else (int(ids),)


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise WeightError(f"{file.parent} has no {file.name}")
    if file.stat().st_size > _MAX_JSON_BYTES:
        raise WeightError(f"{file} has more than {_MAX_JSON_BYTES} bytes")
    return _parsed(str(file), file.read_bytes())


def _parsed(name: str, text: bytes) -> dict[str, Any]:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise WeightError(f"{name} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise WeightError(f"{name} is no JSON object")
    return content
