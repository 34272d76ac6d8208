"""KV blocks of requests: how many a step needs, allocating them, and the prefix cache.

The cache joins rows of the RequestTable with the BlockPool. It knows no policy: the passes decide
which request gets blocks and which loses them.
"""

from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from scheduler.core.block_hash import block_digests
from scheduler.core.block_pool import BlockPool
from scheduler.core.plan import Int32Array, SchedulerConfig
from scheduler.core.request import Request
from scheduler.core.request_table import IntpArray, RequestTable

N = TypeVar("N", int, Int32Array)


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """Cached blocks of a request's prefix; num_unreferenced of them are in the free list."""

    block_ids: list[int]
    num_tokens: int
    num_unreferenced: int


NO_HIT = PrefixHit([], 0, 0)


class KvCache:
    """Allocation and prefix caching over one pool."""

    def __init__(self, config: SchedulerConfig, table: RequestTable) -> None:
        self.pool = BlockPool(
            config.num_gpu_blocks, enable_prefix_caching=config.enable_prefix_caching
        )
        self._table = table
        self.block_size = config.block_size
        self._max_model_len = config.max_model_len
        self._offsets = np.arange(config.block_size)  # of tokens in a block
        self._is_caching = config.enable_prefix_caching
        # Draft models write KV beyond the scheduled tokens.
        self.num_lookahead = config.num_lookahead_tokens
        # EAGLE needs hidden states of the last hit block, so that block is computed again.
        self._is_last_hit_dropped = config.spec_kind == "eagle"

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold num_tokens."""
        return -(-min(num_tokens, self._max_model_len) // self.block_size)

    def is_looked_up(self, request: Request) -> bool:
        """Whether a request may start from cached blocks."""
        return self._is_caching and not request.spec.skip_reading_prefix_cache

    def find_prefix(self, request: Request) -> PrefixHit:
        """The longest cached prefix of a waiting request, without its last token.

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
        """Free blocks that an admission with num_tokens tokens would take."""
        missing = max(self.blocks_for(num_tokens) - len(hit.block_ids), 0)
        return missing + hit.num_unreferenced

    def admit(self, row: int, hit: PrefixHit, num_new_tokens: int) -> list[int]:
        """Allocate an admitted row's blocks, hits included; returns its block table."""
        table = self._table
        num_hits = len(hit.block_ids)
        self.pool.touch(hit.block_ids)
        num_blocks = self.blocks_for(hit.num_tokens + num_new_tokens + self.num_lookahead)
        block_ids = hit.block_ids + self.pool.allocate(max(num_blocks - num_hits, 0))
        table.block_table[row, : len(block_ids)] = block_ids
        table.num_blocks[row] = len(block_ids)
        if self._is_caching:
            num_known = min(hit.num_tokens + num_new_tokens, table.num_tokens.item(row))
            num_full = num_known // self.block_size
            self._register_row(row, num_hits, num_full)
            table.num_registered[row] = num_full
        self.set_events(row)
        return block_ids

    def set_events(self, row: int) -> None:
        """Set when a row needs blocks or has some to register, as its counts in the table say."""
        table = self._table
        table.growth_event[row] = self._growth_event(table.num_blocks.item(row))
        table.full_event[row] = (table.num_registered.item(row) + 1) * self.block_size

    def num_missing(self, rows: IntpArray, num_computed: Int32Array) -> Int32Array:
        """[num_rows] blocks that each row lacks to have num_computed tokens computed."""
        num_tokens = num_computed
        if self.num_lookahead:
            num_tokens = np.minimum(num_tokens + self.num_lookahead, self._max_model_len)
        num_blocks = (num_tokens + (self.block_size - 1)) // self.block_size
        num_missing: Int32Array = np.maximum(num_blocks - self._table.num_blocks[rows], 0)
        return num_missing

    def grow(self, rows: IntpArray, num_computed: Int32Array) -> tuple[IntpArray, list[int], int]:
        """Append the blocks that rows lack to have num_computed tokens.

        Stops before the first row for which the pool has too few.

        Args:
            rows: [num_rows] in running order; num_computed has reached their growth_event.
            num_computed: [num_rows] tokens computed after the step.

        Returns:
            [num_appended] the row of each appended block, the blocks, and the number of rows
            that have theirs.
        """
        table = self._table
        num_missing = self.num_missing(rows, num_computed)
        total, num_served = int(np.add.reduce(num_missing)), len(rows)
        if total > self.pool.num_free:
            ends = np.cumsum(num_missing)
            num_served = int(np.searchsorted(ends, self.pool.num_free, side="right"))
            total = int(ends[num_served - 1]) if num_served else 0
            rows, num_missing = rows[:num_served], num_missing[:num_served]
        block_ids = self.pool.allocate(total)
        before = table.num_blocks[rows]
        grown_rows = rows
        if total == num_served and not self.num_lookahead:  # one block for each row
            table.block_table[rows, before] = block_ids
        else:
            grown_rows, done = np.repeat(rows, num_missing), 0
            columns = zip(rows.tolist(), before.tolist(), num_missing.tolist(), strict=True)
            for row, start, count in columns:
                table.block_table[row, start : start + count] = block_ids[done : done + count]
                done += count
        num_blocks = before + num_missing
        table.num_blocks[rows] = num_blocks
        table.growth_event[rows] = self._growth_event(num_blocks)
        return grown_rows, block_ids, num_served

    def _growth_event(self, num_blocks: N) -> N:
        """Computed tokens from which that many blocks do not suffice."""
        return num_blocks * self.block_size + (1 - self.num_lookahead)

    def register(self, rows: IntpArray, num_known: Int32Array) -> None:
        """Register the blocks that known, computed tokens fill, under their digests.

        Args:
            rows: [num_rows] in running order.
            num_known: [num_rows] computed tokens, without drafts and tokens in flight.
        """
        if not self._is_caching:
            return
        table, size = self._table, self.block_size
        due = (num_known >= table.full_event[rows]).nonzero()[0]
        if len(due):
            rows, num_full = rows[due], num_known[due] // size
            self._register_blocks(rows, table.num_registered[rows], num_full)
            table.num_registered[rows] = num_full
            table.full_event[rows] = (num_full + 1) * size

    def _register_blocks(self, rows: IntpArray, firsts: Int32Array, ends: Int32Array) -> None:
        """Register each row's blocks from `first` up to `end`; nearly always that is one block."""
        if len(rows) == 1:
            self._register_row(rows.item(), firsts.item(), ends.item())
            return
        table = self._table
        # The first block's tokens of every row are read together.
        positions = (firsts * self.block_size)[:, None] + self._offsets
        data = table.token_ids[rows[:, None], positions].tobytes()
        hashes = [table.request(row).block_hashes for row in rows.tolist()]
        digests = block_digests(hashes, firsts.tolist(), data)
        block_ids = table.block_table[rows, firsts].tolist()
        done = 0
        # Of equal contents the block registered first is found, so rows keep their order.
        for index in (ends - firsts > 1).nonzero()[0].tolist():
            self.pool.register(block_ids[done:index], digests[done:index])
            self._register_row(rows.item(index), firsts.item(index), ends.item(index))
            done = index + 1
        self.pool.register(block_ids[done:], digests[done:])

    def _register_row(self, row: int, first: int, end: int) -> None:
        if first == end:
            return
        hashes = self._table.request(row).block_hashes
        hashes.extend(self._table.token_ids[row], end)
        block_ids = self._table.block_table[row, first:end].tolist()
        self.pool.register(block_ids, hashes.digests[first:end])

    def unwritten(self, row: int) -> list[int]:
        """Blocks of a row that are registered for tokens of the step that is being planned."""
        table = self._table
        first = table.num_computed.item(row) // self.block_size
        block_ids: list[int] = table.block_table[row, first : table.num_registered[row]].tolist()
        return block_ids

    def distrust(self, row: int) -> None:
        """Take the contents of a row out of the prefix cache, but for blocks that others hold."""
        num_refs, table = self.pool.num_refs, self._table
        block_ids = table.block_table[row, : table.num_registered[row]].tolist()
        self.pool.forget([block_id for block_id in block_ids if num_refs(block_id) == 1])

    def release(self, row: int) -> None:
        """Free every block of a row."""
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
