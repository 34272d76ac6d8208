"""Hashes the contents of KV blocks: a chain of digests, one per full block of a request.

A digest covers the block's tokens and, through the digest before it, all tokens of the prefix. The
salt is hashed into the root and so into the whole chain. With 256 bits, equal digests mean equal
contents.
"""

import hashlib
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

# Blocks per call for a caller that hashes ahead: about 0.3 ms.
BLOCKS_PER_SLICE = 256
DIGEST_BYTES = 32


class BlockHashes:
    """The digests of a request's full blocks, extended when asked.

    A long prompt can be hashed before it is submitted, a slice at a time, so that no step waits
    for it: `while not hashes.advance(prompt): await sleep(0)`.
    """

    __slots__ = ("block_size", "digests", "root")

    def __init__(self, block_size: int, cache_salt: str = "") -> None:
        self.block_size = block_size
        self.digests: list[bytes] = []
        self.root = hashlib.blake2b(cache_salt.encode(), digest_size=DIGEST_BYTES).digest()

    def is_like(self, other: "BlockHashes") -> bool:
        """Whether equal tokens have equal digests in both."""
        return self.block_size == other.block_size and self.root == other.root

    def extend(self, token_ids: NDArray[np.int32], num_blocks: int) -> None:
        """Digest blocks up to `num_blocks`; token_ids is [at least num_blocks * block_size]."""
        digests = self.digests
        first = len(digests)
        if num_blocks <= first:
            return
        size = self.block_size
        parent = digests[-1] if digests else self.root
        data = token_ids[first * size : num_blocks * size].tobytes()
        width = size * token_ids.itemsize
        for start, end in pairwise(range(0, len(data) + 1, width)):
            parent = hashlib.blake2b(parent + data[start:end], digest_size=DIGEST_BYTES).digest()
            digests.append(parent)

    def advance(self, token_ids: NDArray[np.int32], num_blocks: int = BLOCKS_PER_SLICE) -> bool:
        """Digest at most `num_blocks` more of token_ids; True when all full blocks are done."""
        num_full = len(token_ids) // self.block_size
        self.extend(token_ids, min(len(self.digests) + num_blocks, num_full))
        return len(self.digests) >= num_full


def block_digests(
    chains: Sequence[BlockHashes], indexes: Sequence[int], data: bytes
) -> list[bytes]:
    """The digest of one block of each chain; a chain's next block is digested first.

    Args:
        indexes: the block's index in each chain; at most the chain's length.
        data: the tokens of these blocks as bytes, one block after the other.
    """
    blake2b = hashlib.blake2b
    width = len(data) // len(chains)
    found = []
    start = 0
    for chain, index in zip(chains, indexes, strict=True):
        digests = chain.digests
        if index == len(digests):
            parent = digests[-1] if digests else chain.root
            digests.append(
                blake2b(parent + data[start : start + width], digest_size=DIGEST_BYTES).digest()
            )
        found.append(digests[index])
        start += width
    return found
