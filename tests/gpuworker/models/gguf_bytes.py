"""GGUF files byte by byte, so that they can say what no writer would write."""

import math
import struct
from pathlib import Path
from typing import Any

U32, STRING, ARRAY = 4, 8, 9
F32, Q4_0 = 0, 2
_BLOCK_BYTES = {F32: (1, 4), Q4_0: (32, 18)}


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def array(kind: int, values: list[Any]) -> bytes:
    """An array's type and value."""
    items = [text(v) if kind == STRING else struct.pack("<I", v) for v in values]
    return struct.pack("<IIQ", ARRAY, kind, len(values)) + b"".join(items)


class GgufBytes:
    """A file's parts; a pair or a tensor that is given again replaces the one before."""

    def __init__(self) -> None:
        self.pairs: dict[str, bytes] = {}
        self.num_pairs: int | None = None
        self.num_tensors: int | None = None
        self._tensors: dict[str, tuple[tuple[int, ...], int, int | None, bytes]] = {}

    def add(self, key: str, value: float | str) -> None:
        if isinstance(value, str):
            self.pairs[key] = struct.pack("<I", STRING) + text(value)
        elif isinstance(value, float):
            self.pairs[key] = struct.pack("<If", 6, value)
        else:
            self.pairs[key] = struct.pack("<II", U32, value)

    def tensor(
        self,
        name: str,
        shape: tuple[int, ...],
        kind: int = F32,
        *,
        offset: int | None = None,
        data: bytes | None = None,
    ) -> None:
        """Of zeros, as many as its shape says; the offset is right unless given."""
        block, size = _BLOCK_BYTES.get(kind, (1, 4))
        if data is None:
            data = bytes(math.prod(shape) // block * size)
        self._tensors[name] = (shape, kind, offset, data)

    def write(self, file: Path) -> Path:
        num_tensors = len(self._tensors) if self.num_tensors is None else self.num_tensors
        num_pairs = len(self.pairs) if self.num_pairs is None else self.num_pairs
        header = b"GGUF" + struct.pack("<IQQ", 3, num_tensors, num_pairs)
        for key, value in self.pairs.items():
            header += text(key) + value
        body = b""
        for name, (shape, kind, offset, data) in self._tensors.items():
            at = len(body) if offset is None else offset
            header += text(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
            header += struct.pack("<IQ", kind, at)
            body += data + bytes(-len(data) % 32)
        file.write_bytes(header + bytes(-len(header) % 32) + body)
        return file


def llama() -> GgufBytes:
    """A whole model, small enough to be read at once."""
    file = GgufBytes()
    file.add("general.architecture", "llama")
    for key, value in {
        "block_count": 1,
        "context_length": 64,
        "embedding_length": 32,
        "feed_forward_length": 64,
        "attention.head_count": 2,
        "attention.head_count_kv": 2,
    }.items():
        file.add(f"llama.{key}", value)
    file.add("llama.attention.layer_norm_rms_epsilon", 1e-5)
    file.add("tokenizer.ggml.eos_token_id", 3)
    file.tensor("token_embd.weight", (16, 32), Q4_0)
    file.tensor("output_norm.weight", (32,))
    for name, shape in {
        "attn_norm": (32,),
        "attn_q": (32, 32),
        "attn_k": (32, 32),
        "attn_v": (32, 32),
        "attn_output": (32, 32),
        "ffn_norm": (32,),
        "ffn_gate": (64, 32),
        "ffn_up": (64, 32),
        "ffn_down": (32, 64),
    }.items():
        file.tensor(f"blk.0.{name}.weight", shape)
    return file
