"""The KV blocks of running requests: how many a step needs, giving them out, and naming contents.

It joins rows of the RequestTable with the BlockPool and knows the prefix cache's rules. It does not
know policies: who gets blocks first and who loses them is the passes' business.
"""

from dataclasses import dataclass

import numpy as np

from scheduler.core.block_hash import block_digests
from scheduler.core.block_pool import BlockPool
from scheduler.core.plan import Int32Array, SchedulerConfig
from scheduler.core.request import Request
from scheduler.core.request_table import IntpArray, RequestTable


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """Cached blocks that an admission would start from."""

    block_ids: list[int]
    num_tokens: int
    num_unreferenced: int  # they leave the free list when touched


NO_HIT = PrefixHit([], 0, 0)


class KvCache:
    """Allocation and prefix caching over one pool."""

    def __init__(
        self, config: SchedulerConfig, table: RequestTable, *, max_walked_rows: int
    ) -> None:
        self._max_walked_rows = max_walked_rows
        self.pool = BlockPool(
            config.num_gpu_blocks, enable_prefix_caching=config.enable_prefix_caching
        )
        self._table = table
        self.block_size = config.block_size
        self._max_model_len = config.max_model_len
        self._offsets = np.arange(config.block_size)  # of tokens in a block
        self._is_caching = config.enable_prefix_caching
        # Draft models write KV ahead of the accepted tokens.
        self.num_lookahead = config.num_lookahead_tokens
        # The drafter reads the last hit block's hidden states, so that block is computed again.
        self._is_last_hit_dropped = config.spec_kind == "eagle"

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold num_tokens, lookahead excluded."""
        return -(-min(num_tokens, self._max_model_len) // self.block_size)

    def is_looked_up(self, request: Request) -> bool:
        """Whether the prefix cache serves a request at all."""
        return self._is_caching and not request.spec.skip_reading_prefix_cache

    def find_prefix(self, request: Request) -> PrefixHit:
        """The longest cached beginning of a waiting request, but for its last token.

        Hits are whole blocks, so a fully cached request computes its last block again.
        """
        if not self.is_looked_up(request):
            return NO_HIT
        num_full = (len(request.token_ids) - 1) // self.block_size
        hashes = request.block_hashes
        hashes.extend(request.token_ids, num_full)
        block_ids = self.pool.find_prefix(hashes.digests, num_full)
        if self._is_last_hit_dropped and block_ids:
            block_ids.pop()
        num_unreferenced = self.pool.num_unreferenced(block_ids)
        return PrefixHit(block_ids, len(block_ids) * self.block_size, num_unreferenced)

    def blocks_to_admit(self, num_tokens: int, hit: PrefixHit) -> int:
        """Free blocks that an admission with num_tokens would consume."""
        missing = max(self.blocks_for(num_tokens) - len(hit.block_ids), 0)
        return missing + hit.num_unreferenced

    def admit(self, row: int, hit: PrefixHit, num_new_tokens: int) -> list[int]:
        """Give a placed request its hits and the blocks for its first tokens: its whole table."""
        table = self._table
        num_hits = len(hit.block_ids)
        self.pool.touch(hit.block_ids)
        num_blocks = self.blocks_for(hit.num_tokens + num_new_tokens + self.num_lookahead)
        block_ids = hit.block_ids + self.pool.take(max(num_blocks - num_hits, 0))
        table.block_table[row, : len(block_ids)] = block_ids
        table.num_blocks[row] = len(block_ids)
        table.num_registered[row] = num_hits
        self.register(row, hit.num_tokens + num_new_tokens)
        return block_ids

    def blocks_to_grow(self, row: int, num_computed: int) -> int:
        """Blocks that a row lacks to have num_computed tokens computed."""
        num_blocks = self.blocks_for(num_computed + self.num_lookahead)
        return max(num_blocks - self._table.num_blocks.item(row), 0)

    def grow(self, row: int, num_missing: int) -> list[int]:
        """Append blocks to a row's table; the pool has that many."""
        table = self._table
        num_blocks = table.num_blocks.item(row)
        block_ids = self.pool.take(num_missing)
        table.block_table[row, num_blocks : num_blocks + num_missing] = block_ids
        table.num_blocks[row] = num_blocks + num_missing
        return block_ids

    def grow_rows(
        self, rows: IntpArray, num_computed: Int32Array
    ) -> tuple[IntpArray, list[int], int]:
        """Append the blocks that rows lack to have num_computed tokens, and name full blocks.

        Stops before the first row for which the pool has too few.

        Args:
            rows: [num_rows] in running order.
            num_computed: [num_rows] tokens computed after the step.

        Returns:
            [num_appended] the row of each appended block, the blocks, and how many rows were
            served.
        """
        if len(rows) <= self._max_walked_rows:
            return self._grow_one_by_one(rows, num_computed)
        table = self._table
        size = self.block_size
        num_blocks = table.num_blocks[rows]
        ahead = num_computed + (self.num_lookahead + size - 1)
        np.minimum(ahead, self._max_model_len + size - 1, out=ahead)
        num_missing = ahead // size - num_blocks
        np.maximum(num_missing, 0, out=num_missing)
        ends = np.add.accumulate(num_missing)
        total, num_served = int(ends[-1]), len(rows)
        if total > self.pool.num_free:
            num_served = int(np.searchsorted(ends, self.pool.num_free, side="right"))
            total = int(ends[num_served - 1]) if num_served else 0
            rows, num_computed = rows[:num_served], num_computed[:num_served]
            num_blocks, num_missing = num_blocks[:num_served], num_missing[:num_served]
        block_ids = self.pool.take(total)
        grown_rows = np.repeat(rows, num_missing)
        first_places = num_blocks - (ends[:num_served] - num_missing)
        table.block_table[grown_rows, np.arange(total) + np.repeat(first_places, num_missing)] = (
            block_ids
        )
        num_blocks += num_missing
        table.num_blocks[rows] = num_blocks
        next_growth = num_blocks * size + (1 - self.num_lookahead)
        if not self._is_caching:
            table.next_block_event[rows] = next_growth
            return grown_rows, block_ids, num_served
        num_full = np.minimum(num_computed, table.num_tokens[rows]) // size
        num_registered = table.num_registered[rows]
        np.maximum(num_full, num_registered, out=num_full)
        self._name_blocks_of_rows(rows, num_registered, num_full)
        table.num_registered[rows] = num_full
        table.next_block_event[rows] = np.minimum(next_growth, (num_full + 1) * size)
        return grown_rows, block_ids, num_served

    def _grow_one_by_one(
        self, rows: IntpArray, num_computed: Int32Array
    ) -> tuple[IntpArray, list[int], int]:
        """As grow_rows, for few."""
        grown_rows: list[int] = []
        block_ids: list[int] = []
        num_served = 0
        for row, count in zip(rows.tolist(), num_computed.tolist(), strict=True):
            num_missing = self.blocks_to_grow(row, count)
            if num_missing > self.pool.num_free:
                break
            if num_missing:
                block_ids += self.grow(row, num_missing)
                grown_rows += [row] * num_missing
            self.register(row, count)
            num_served += 1
        return np.array(grown_rows, dtype=np.intp), block_ids, num_served

    def register(self, row: int, num_computed: int) -> None:
        """Name the blocks that known tokens fill within the first num_computed; set the next event.

        Drafts and tokens in flight are not known, so they never count.
        """
        table = self._table
        next_growth = table.num_blocks.item(row) * self.block_size - self.num_lookahead + 1
        if not self._is_caching:
            table.next_block_event[row] = next_growth
            return
        num_full = min(num_computed, table.num_tokens.item(row)) // self.block_size
        num_registered = table.num_registered.item(row)
        if num_full > num_registered:
            self._name_blocks(row, num_registered, num_full)
            table.num_registered[row] = num_registered = num_full
        next_full = (num_registered + 1) * self.block_size
        table.next_block_event[row] = min(next_growth, next_full)

    def _name_blocks(self, row: int, first: int, end: int) -> None:
        """Register a row's blocks from `first` up to `end` under their digests."""
        table = self._table
        hashes = table.request(row).block_hashes
        hashes.extend(table.token_ids[row], end)
        block_ids = table.block_table[row, first:end].tolist()
        self.pool.register(block_ids, hashes.digests[first:end])

    def _name_blocks_of_rows(self, rows: IntpArray, firsts: Int32Array, ends: Int32Array) -> None:
        """As _name_blocks for several rows, in their order; most rows have one block at most."""
        is_named = ends > firsts
        if not np.count_nonzero(is_named):
            return
        table, size = self._table, self.block_size
        rows, firsts, ends = rows[is_named], firsts[is_named], ends[is_named]
        # The first block's tokens of every row are read together.
        places = (firsts * size)[:, None] + self._offsets
        data = table.token_ids[rows[:, None], places].tobytes()
        chains = [table.request(row).block_hashes for row in rows.tolist()]
        digests = block_digests(chains, firsts.tolist(), data)
        block_ids = table.block_table[rows, firsts].tolist()
        done = 0
        for index in (ends - firsts > 1).nonzero()[0].tolist():
            # Of equal contents the block registered first is found, so the order counts.
            self.pool.register(block_ids[done:index], digests[done:index])
            self._name_blocks(int(rows[index]), int(firsts[index]), int(ends[index]))
            done = index + 1
        self.pool.register(block_ids[done:], digests[done:])

    def release(self, row: int) -> None:
        """Give back every block of a row."""
        table = self._table
        self.pool.release(table.block_table[row, : table.num_blocks[row]].tolist())
        table.num_blocks[row] = 0

    def num_common_prefix_blocks(self) -> int:
        """Leading blocks that every running request shares; 0 without a prefix cache."""
        table = self._table
        if not self._is_caching or not table.num_running:
            return 0
        row = int(table.running_rows[0])
        count = 0
        for block_id in table.block_table[row, : table.num_blocks[row]].tolist():
            if self.pool.num_refs(block_id) != table.num_running:
                break
            count += 1
        return count
