"""A model that is a hash function, and what it says: the same function for worker and checker.

The key and value of a token are a hash of the token and its position, and attention is the sum over
all tokens before. So the next token depends on every KV block of the request, as with a real model:
a block that is lost, shared or stale shows as other tokens. Bytes of a character of several bytes
follow each other, so that the text is valid UTF-8 and characters are cut between tokens.
"""

import hashlib
import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

MODEL = "stub"
EOS_TOKEN_ID = 256
VOCAB_SIZE = 257

_FIRST_BYTES = {0xC3: 0xA9, 0xE2: 0x82, 0x82: 0xAC}  # of "é" and of "€"
_MENU = [*b"aaabcdeeefghiijklmnoopqrsttuvwxyz     .,\n", 0xC3, 0xC3, 0xE2]
_EOS_EVERY = 600  # tokens
_TOP = 20

Hashes = NDArray[np.uint64]


def _mix(values: Hashes) -> Hashes:
    """The finalizer of splitmix64, a bijection of 64 bits."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def key_values(token_ids: NDArray[Any], positions: NDArray[Any]) -> Hashes:
    """What is stored in the KV cache for each token, [num_tokens]; never 0."""
    words = (token_ids.astype(np.uint64) << np.uint64(32)) | positions.astype(np.uint64)
    return _mix(words + np.uint64(0x9E3779B97F4A7C15)) | np.uint64(1)


def next_tokens(
    contexts: Hashes, last_ids: NDArray[Any], seeds: Hashes, num_generated: NDArray[Any]
) -> NDArray[np.int32]:
    """The next token of each request, [num_reqs].

    Args:
        contexts: sums of the key_values of all tokens.
        last_ids: last token of each.
        seeds: 0 where the likeliest token is taken.
        num_generated: tokens generated before.
    """
    draws = _mix(contexts ^ _mix(seeds + num_generated.astype(np.uint64)))
    chosen = _MENU_IDS[(draws >> np.uint64(16)) % np.uint64(len(_MENU_IDS))]
    chosen = np.where(draws % np.uint64(_EOS_EVERY) == 0, EOS_TOKEN_ID, chosen)
    following = _FOLLOWING[last_ids]
    return np.where(following >= 0, following, chosen).astype(np.int32)


_MENU_IDS = np.array(_MENU, dtype=np.int64)
_FOLLOWING = np.full(VOCAB_SIZE, -1, dtype=np.int64)
_FOLLOWING[list(_FIRST_BYTES)] = list(_FIRST_BYTES.values())


def logprobs(token_ids: NDArray[Any], num_top: int) -> tuple[NDArray[Any], ...]:
    """Log probability, rank, likeliest tokens and their log probabilities; exact in float32."""
    ids = token_ids.astype(np.int32)
    order = np.arange(num_top, dtype=np.int32)
    top_ids = (ids[:, None] + order) % VOCAB_SIZE
    top_logprobs = np.broadcast_to(-(order + 1) / 4, top_ids.shape).astype(np.float32)
    return (-(1 + ids % 16) / 8).astype(np.float32), 1 + ids % 7, top_ids, top_logprobs


def generated(
    prompt_ids: Sequence[int], num_tokens: int, *, seed: int, ignore_eos: bool = True
) -> list[int]:
    """What a request generates, EOS included; seed 0 for a greedy request."""
    with np.errstate(over="ignore"):
        ids = np.array(prompt_ids, dtype=np.int64)
        context = key_values(ids, np.arange(len(ids))).sum(keepdims=True)
        last, tokens = ids[-1:], list[int]()
        seeds = np.array([seed], dtype=np.uint64)
        while len(tokens) < num_tokens:
            last = next_tokens(context, last, seeds, np.array([len(tokens)]))
            tokens.append(int(last[0]))
            if tokens[-1] == EOS_TOKEN_ID and not ignore_eos:
                break
            position = np.array([len(ids) + len(tokens) - 1])
            context = context + key_values(last, position)
    return tokens


def seed_of(seed: int, index: int) -> int:
    """The seed of a completion, as routers derive it from the request's."""
    if not index:
        return seed
    digest = hashlib.blake2b(struct.pack("<QI", seed, index), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def text_of(token_ids: Sequence[int]) -> str:
    """The text of generated tokens; a character that is cut off at the end is left out."""
    return bytes(token for token in token_ids if token < EOS_TOKEN_ID).decode("utf-8", "ignore")


def write_model(folder: Path) -> Path:
    """Writes a model folder for routers: each byte is a token, and EOS."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocab = {char: byte for byte, char in _byte_stand_ins().items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True, normalized=False)])
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"eos_token_id": EOS_TOKEN_ID}))
    return folder


def _byte_stand_ins() -> dict[int, str]:
    """The printable character that stands for each byte in a byte-level vocabulary (GPT-2's)."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {byte: chr(byte) for byte in shown} | {b: chr(256 + i) for i, b in enumerate(hidden)}
