"""An estimate of what a worker's prefix cache holds.

A prompt's prefix is a chain of hashes, one for each CHUNK_TOKENS tokens: equal hashes mean equal
tokens up to that chunk. A worker's index holds the hashes of the prompts that were sent to the
worker, least recently used first, and never more than the worker's KV pool can hold. Admissions
correct the index: when less of a prompt was cached than the index said, the worker has evicted
everything that was last used when the missing part was, or earlier, and so does the index.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

CHUNK_TOKENS = 64
_MAX_CHUNKS = 256
_MAX_HASHES = 65_536

Prefix = Sequence[bytes]


def shared_salt(tenant: str, cache_salt: str, *, across_tenants: bool) -> str:
    """The salt of a request's prefixes: requests of equal salts share cached blocks.

    The scheduler gets the salt too, and hashes it with a prompt's first block. A tenant that shared
    blocks with another tenant could tell from usage.cached_tokens what the other tenant sent.
    """
    if across_tenants:
        return f":{cache_salt}" if cache_salt else ""
    # The length keeps tenants apart from salts: no two pairs give the same text.
    return f"{len(tenant)}:{tenant}{cache_salt}" if tenant or cache_salt else ""


def prefix_of(token_ids: NDArray[np.int32], salt: str = "") -> Prefix:
    """The hashes of a prompt, [num_tokens]; the last token is never taken from a cache."""
    num_chunks = min(_MAX_CHUNKS, max(0, len(token_ids) - 1) // CHUNK_TOKENS)
    if not num_chunks:
        return ()
    data = np.ascontiguousarray(token_ids, dtype="<i4").tobytes()
    size = 4 * CHUNK_TOKENS
    hashes = []
    last = hashlib.blake2b(salt.encode(), digest_size=8).digest()
    for begin in range(0, num_chunks * size, size):
        last = hashlib.blake2b(data[begin : begin + size], digest_size=8, key=last).digest()
        hashes.append(last)
    return hashes


class PrefixIndex:
    """Hashes that a worker probably has cached, in order of last use."""

    def __init__(self, num_kv_tokens: int) -> None:
        self._max_hashes = min(_MAX_HASHES, num_kv_tokens // CHUNK_TOKENS)
        self._use_by_hash: OrderedDict[bytes, int] = OrderedDict()
        self._num_uses = 0

    def __len__(self) -> int:
        return len(self._use_by_hash)

    def num_matched(self, prefix: Prefix) -> int:
        """How many hashes, from the first on, are in the index."""
        known = self._use_by_hash
        for position, block_hash in enumerate(prefix):
            if block_hash not in known:
                return position
        return len(prefix)

    def uses(self, prefix: Prefix) -> list[int]:
        """When each of the matched hashes was last used; later is greater."""
        return [self._use_by_hash[block_hash] for block_hash in prefix[: self.num_matched(prefix)]]

    def use(self, prefix: Prefix) -> None:
        """Record that a prompt with this prefix was sent to the worker."""
        self._num_uses += 1
        # The tail first: it is evicted before the head, which more prompts share.
        for block_hash in reversed(prefix):
            self._use_by_hash[block_hash] = self._num_uses
            self._use_by_hash.move_to_end(block_hash)
        while len(self._use_by_hash) > self._max_hashes:
            self._use_by_hash.popitem(last=False)

    def drop_used_until(self, last_use: int) -> None:
        """Forget the hashes that were last used at that time or before."""
        while self._use_by_hash:
            block_hash = next(iter(self._use_by_hash))
            if self._use_by_hash[block_hash] > last_use:
                return
            del self._use_by_hash[block_hash]
