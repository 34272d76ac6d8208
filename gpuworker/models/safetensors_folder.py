"""Weights of a Hugging Face folder: config.json and safetensors, sharded or not, memory-mapped.

The format is a JSON header of names, types, shapes and offsets, then the bytes; it is read here so
that a truncated file can be refused with the name of the tensor that it cut.
"""

import json
import math
import mmap
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

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
_MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor lies."""

    file: Path
    buffer: mmap.mmap
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int  # bytes from the file's start


class SafetensorsSource:
    """A WeightSource over a folder; the maps live as long as this object and its tensors."""

    def __init__(self, folder: Path) -> None:
        hf = _read_json(folder / "config.json")
        self.config: ModelConfig = model_config(hf)
        self.eos_token_ids = _eos_token_ids(folder, hf)
        self._place_by_name: dict[str, _Place] = {}
        for file in _files(folder):
            self._place_by_name.update(_places(file))
        dtypes = [place.dtype for place in self._place_by_name.values()]
        self.dtype = max(set(dtypes), key=dtypes.count)

    def names(self) -> set[str]:
        return set(self._place_by_name)

    def read(self, name: str) -> torch.Tensor:
        place = self._place_by_name.get(name)
        if place is None:
            raise WeightError(f"tensor {name!r} is missing")
        with warnings.catch_warnings():
            # The map is read-only and nobody writes to it: that is what the warning is about.
            warnings.simplefilter("ignore", UserWarning)
            flat = torch.frombuffer(
                place.buffer,
                dtype=place.dtype,
                count=math.prod(place.shape),
                offset=place.offset,
            )
        return flat.view(place.shape)

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
    """The files that the index names, or all there are."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        names = sorted(set(_read_json(index)["weight_map"].values()))
        files = [folder / name for name in names]
        missing = [file.name for file in files if not file.exists()]
        if missing:
            raise WeightError(f"{index.name} names {missing[0]!r}, which is not in {folder}")
        return files
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise WeightError(f"{folder} has no .safetensors file")
    return files


def _places(file: Path) -> dict[str, _Place]:
    """Reads a file's header."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        head = stream.read(8)
        header_bytes = int.from_bytes(head, "little")
        if len(head) < 8 or header_bytes > min(size - 8, _MAX_HEADER_BYTES):
            raise WeightError(f"{file.name} is not a whole safetensors file: its header is cut")
        try:
            header: dict[str, Any] = json.loads(stream.read(header_bytes))
        except ValueError as error:
            raise WeightError(f"{file.name} is not a safetensors file: {error}") from None
        buffer = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    header.pop("__metadata__", None)
    places = {}
    for name, entry in header.items():
        if entry["dtype"] not in _DTYPES:
            raise WeightError(
                f"tensor {name!r} in {file.name} has type {entry['dtype']}; "
                f"supported are: {', '.join(_DTYPES)}"
            )
        dtype, shape = _DTYPES[entry["dtype"]], tuple(entry["shape"])
        start, end = (8 + header_bytes + int(offset) for offset in entry["data_offsets"])
        if end > size or end - start != math.prod(shape) * dtype.itemsize:
            raise WeightError(
                f"tensor {name!r} in {file.name} is truncated: it should end at byte {end}, "
                f"the file has {size}"
            )
        places[name] = _Place(file, buffer, dtype, shape, start)
    return places


def _eos_token_ids(folder: Path, hf: dict[str, Any]) -> tuple[int, ...]:
    """generation_config.json's, or config.json's."""
    generation = folder / "generation_config.json"
    ids = _read_json(generation).get("eos_token_id") if generation.exists() else None
    if ids is None:
        ids = hf.get("eos_token_id")
    if ids is None:
        return ()
    return tuple(ids) if isinstance(ids, list) else (int(ids),)


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise WeightError(f"{file.parent} has no {file.name}") from None
    except ValueError as error:
        raise WeightError(f"{file} is not JSON: {error}") from None
    return content
