"""Every quantized type against its layout, written out block by block from the format's text."""

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from gpuworker.models.errors import UnsupportedModelError
from gpuworker.models.gguf_file import GgufSource

KINDS = gguf.GGMLQuantizationType
NUM_ROWS, SUPER_BLOCK = 5, 256


def write_one(file: Path, kind: KINDS, data: np.ndarray) -> None:
    """A file whose only tensor has these bytes, [NUM_ROWS, bytes of a row]."""
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(1)
    writer.add_context_length(8)
    writer.add_embedding_length(SUPER_BLOCK)
    writer.add_feed_forward_length(1)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_tensor("token_embd.weight", data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def half(block: bytes, start: int) -> float:
    return float(np.frombuffer(block[start : start + 2], np.float16)[0])


def nibbles(packed: bytes) -> list[int]:
    """Low halves of all bytes, then high halves."""
    return [byte & 15 for byte in packed] + [byte >> 4 for byte in packed]


def bit(packed: bytes, number: int) -> int:
    return packed[number // 8] >> (number % 8) & 1


def q4_0(block: bytes) -> list[float]:
    return [half(block, 0) * (q - 8) for q in nibbles(block[2:])]


def q4_1(block: bytes) -> list[float]:
    return [half(block, 0) * q + half(block, 2) for q in nibbles(block[4:])]


def q5_0(block: bytes) -> list[float]:
    high = block[2:6]
    return [half(block, 0) * (q + 16 * bit(high, i) - 16) for i, q in enumerate(nibbles(block[6:]))]


def q5_1(block: bytes) -> list[float]:
    high = block[4:8]
    return [
        half(block, 0) * (q + 16 * bit(high, i)) + half(block, 2)
        for i, q in enumerate(nibbles(block[8:]))
    ]


def q8_0(block: bytes) -> list[float]:
    return [half(block, 0) * q for q in np.frombuffer(block[2:], np.int8).tolist()]


def six_bit_scales(packed: bytes) -> list[tuple[int, int]]:
    """Scale and minimum of each of 8 sub-blocks, 6 bits each, out of 12 bytes."""
    pairs = [(packed[i] & 63, packed[i + 4] & 63) for i in range(4)]
    pairs += [
        (
            packed[i + 8] & 15 | packed[i] >> 6 << 4,
            packed[i + 8] >> 4 | packed[i + 4] >> 6 << 4,
        )
        for i in range(4)
    ]
    return pairs


def q4_k(block: bytes) -> list[float]:
    scale, minimum = half(block, 0), half(block, 2)
    values = []
    for i, (s, m) in enumerate(six_bit_scales(block[4:16])):
        quarter = block[16 + i // 2 * 32 :][:32]
        values += [scale * s * (byte >> 4 * (i % 2) & 15) - minimum * m for byte in quarter]
    return values


def q5_k(block: bytes) -> list[float]:
    scale, minimum, high = half(block, 0), half(block, 2), block[16:48]
    values = []
    for i, (s, m) in enumerate(six_bit_scales(block[4:16])):
        quarter = block[48 + i // 2 * 32 :][:32]
        values += [
            scale * s * ((byte >> 4 * (i % 2) & 15) + 16 * (high[j] >> i & 1)) - minimum * m
            for j, byte in enumerate(quarter)
        ]
    return values


def q6_k(block: bytes) -> list[float]:
    low, high = block[:128], block[128:192]
    scales = np.frombuffer(block[192:208], np.int8).tolist()
    values = []
    for i in range(SUPER_BLOCK):
        part, place = divmod(i, 128)
        quarter, j = divmod(place, 32)
        four = low[part * 64 + j + 32 * (quarter % 2)] >> 4 * (quarter // 2) & 15
        two = high[part * 32 + j] >> 2 * quarter & 3
        values.append(half(block, 208) * scales[i // 16] * (four + 16 * two - 32))
    return values


LAYOUTS: dict[str, Callable[[bytes], list[float]]] = {
    "Q4_0": q4_0, "Q4_1": q4_1, "Q5_0": q5_0, "Q5_1": q5_1, "Q8_0": q8_0,
    "Q4_K": q4_k, "Q5_K": q5_k, "Q6_K": q6_k,
}  # fmt: skip
# Where a block has numbers in half precision: random bytes would make NaN of some.
HALVES = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}


@pytest.mark.parametrize("name", LAYOUTS)
def test_random_blocks_have_the_values_of_their_layout(name: str, tmp_path: Path) -> None:
    block_size, num_bytes = gguf.GGML_QUANT_SIZES[KINDS[name]]
    rng = np.random.default_rng(7)
    blocks = rng.integers(0, 256, (NUM_ROWS * SUPER_BLOCK // block_size, num_bytes), np.uint8)
    for start in HALVES.get(name, (0,)):
        scales = rng.normal(size=len(blocks)).astype(np.float16)
        blocks[:, start : start + 2] = scales.view(np.uint8).reshape(-1, 2)
    file = tmp_path / "model.gguf"
    write_one(file, KINDS[name], blocks.reshape(NUM_ROWS, -1))
    found = GgufSource(file).read("model.embed_tokens.weight")
    expected = [value for block in blocks for value in LAYOUTS[name](block.tobytes())]
    assert found.shape == (NUM_ROWS, SUPER_BLOCK)
    torch.testing.assert_close(
        found.flatten(), torch.tensor(expected, dtype=torch.float32), rtol=1e-5, atol=1e-5
    )


def test_a_type_that_cannot_be_read_is_refused_with_the_tensors_name(tmp_path: Path) -> None:
    _, num_bytes = gguf.GGML_QUANT_SIZES[KINDS.Q8_K]
    file = tmp_path / "model.gguf"
    write_one(file, KINDS.Q8_K, np.zeros((NUM_ROWS, num_bytes), np.uint8))
    with pytest.raises(UnsupportedModelError, match=r"'token_embd\.weight' has type Q8_K"):
        GgufSource(file).read("model.embed_tokens.weight")
