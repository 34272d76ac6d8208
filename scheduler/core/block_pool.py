"""The KV blocks of one worker: reference counts, the free list, and cached contents.

The pool knows block ids and digests, not requests. Block 0 is the null block and is never
allocated. Every other block is either referenced or in the free list. A free block may still be
cached: it is found by its digest until it is allocated again.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice


class BlockPool:
    """Free list in eviction order, reference counts, and the digest of each cached block."""

    def __init__(self, num_blocks: int, *, enable_prefix_caching: bool) -> None:
        self.num_usable = num_blocks - 1
        self._is_caching = enable_prefix_caching
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))
        self._num_refs = [0] * num_blocks
        # Free blocks that are cached.
        self.num_free_cached = 0
        self._digest_by_block: list[bytes | None] = [None] * num_blocks
        # Most digests have one block; several are kept in the order of registration.
        self._blocks_by_digest: dict[bytes, int | dict[int, None]] = {}

    @property
    def num_free(self) -> int:
        """Unreferenced blocks, including cached ones."""
        return len(self._free)

    @property
    def free_blocks(self) -> Iterable[int]:
        """Free block ids in the order of allocation."""
        return self._free.keys()

    @property
    def ref_counts(self) -> Sequence[int]:
        """[num_blocks] requests that hold each block."""
        return self._num_refs

    @property
    def digests(self) -> Sequence[bytes | None]:
        """[num_blocks] the digest of each cached block."""
        return self._digest_by_block

    @property
    def num_cached(self) -> int:
        """Blocks that can be found by a digest."""
        return sum(digest is not None for digest in self._digest_by_block)

    def num_refs(self, block_id: int) -> int:
        """Requests that hold the block."""
        return self._num_refs[block_id]

    def allocate(self, count: int) -> list[int]:
        """Allocate the first `count` free blocks; their cached contents are evicted."""
        pop, num_refs, digests = self._free.popitem, self._num_refs, self._digest_by_block
        allocated = []
        for _ in range(count):
            block_id = pop(last=False)[0]
            if digests[block_id] is not None:
                self._forget(block_id)
                self.num_free_cached -= 1
            num_refs[block_id] = 1
            allocated.append(block_id)
        return allocated

    def touch(self, block_ids: Iterable[int]) -> None:
        """Reference cached blocks once more; free ones leave the free list."""
        free, num_refs = self._free, self._num_refs
        for block_id in block_ids:
            if num_refs[block_id] == 0:
                del free[block_id]
                self.num_free_cached -= 1
            num_refs[block_id] += 1

    def release(self, block_ids: Sequence[int]) -> None:
        """Drop a request's references; block_ids is its block table.

        Blocks are freed last to first. Blocks without a digest go to the head of the free list (the
        last of them becomes the head), cached blocks to its tail. So blocks without cached contents
        are allocated first, then the least recently used, and a prefix is evicted from its end.
        """
        free, num_refs, digests = self._free, self._num_refs, self._digest_by_block
        useless: list[int] = []
        for block_id in reversed(block_ids):
            num_refs[block_id] -= 1
            if num_refs[block_id]:
                continue
            if self._is_caching and digests[block_id] is None:
                useless.append(block_id)
            else:
                free[block_id] = None
                self.num_free_cached += self._is_caching
        for block_id in reversed(useless):
            free[block_id] = None
            free.move_to_end(block_id, last=False)

    def register(self, block_ids: Sequence[int], digests: Sequence[bytes]) -> None:
        """Cache the contents of referenced blocks under their digests."""
        digest_by_block, blocks_by_digest = self._digest_by_block, self._blocks_by_digest
        for block_id, digest in zip(block_ids, digests, strict=True):
            digest_by_block[block_id] = digest
            holders = blocks_by_digest.setdefault(digest, block_id)
            if isinstance(holders, dict):
                holders[block_id] = None
            elif holders != block_id:
                blocks_by_digest[digest] = {holders: None, block_id: None}

    def find_prefix(self, digests: Sequence[bytes], max_blocks: int) -> list[int]:
        """Blocks of the longest cached run of digests, at most max_blocks."""
        found: list[int] = []
        blocks_by_digest = self._blocks_by_digest
        for digest in islice(digests, max_blocks):
            holders = blocks_by_digest.get(digest)
            if holders is None:
                break
            found.append(next(iter(holders)) if isinstance(holders, dict) else holders)
        return found

    def num_unreferenced(self, block_ids: Iterable[int]) -> int:
        """How many of the blocks are not referenced."""
        return list(map(self._num_refs.__getitem__, block_ids)).count(0)

    def forget(self, block_ids: Iterable[int]) -> None:
        """Drop the cached contents of blocks."""
        for block_id in block_ids:
            self._forget(block_id)
            self.num_free_cached -= not self._num_refs[block_id]

    def forget_all(self) -> None:
        """Drop every cached content; the free list keeps its order."""
        self._blocks_by_digest.clear()
        self.num_free_cached = 0
        self._digest_by_block = [None] * len(self._digest_by_block)

    def _forget(self, block_id: int) -> None:
        digest = self._digest_by_block[block_id]
        assert digest is not None, f"block {block_id} has no digest"
        self._digest_by_block[block_id] = None
        holders = self._blocks_by_digest[digest]
        if isinstance(holders, dict) and len(holders) > 1:
            del holders[block_id]
        else:
            del self._blocks_by_digest[digest]

    def cached_blocks(self) -> Iterator[tuple[bytes, list[int]]]:
        """Each cached content and its blocks, the one registered first in front."""
        for digest, held in self._blocks_by_digest.items():
            yield digest, list(held) if isinstance(held, dict) else [held]

    def restore(
        self,
        free_blocks: Iterable[int],
        held: Iterable[Iterable[int]],
        cached: Iterable[tuple[bytes, list[int]]],
    ) -> None:
        """Bring a new pool into a state.

        Args:
            free_blocks: in eviction order.
            held: blocks of each request.
            cached: as cached_blocks() gave them.
        """
        self._free = OrderedDict.fromkeys(free_blocks)
        for block_id in chain.from_iterable(held):
            self._num_refs[block_id] += 1
        for digest, block_ids in cached:
            self.register(block_ids, [digest] * len(block_ids))
        digests = self._digest_by_block
        self.num_free_cached = sum(digests[block_id] is not None for block_id in self._free)
