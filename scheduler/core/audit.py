"""Walks the book of one worker's KV blocks: every block has exactly one owner.

The owner of a block is one of four:

* requests: the block is in the block tables of running requests. A shared prefix block is in
  several tables; then all of these requests own it together. Its reference count is the number of
  its holders, the prefix cache knows it, and it is at the same place in each table, once.
* a lease: the block is being transferred from or to another worker. A lease holds its blocks like
  a request; blocks that requests hold too count as theirs.
* the prefix cache: no request or lease holds the block, and it is found by its digest until the
  block is allocated again.
* the free list: no request or lease holds the block, and no digest leads to it.

Blocks of the prefix cache and of the free list stand in one list, in the order of allocation. The
null block has no owner. A request without a row (waiting, preempted, paused) holds no block.

The audit changes nothing, and a fault is a value: tests assert that there is none, and an operator
reads them.
"""

from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from scheduler.core.block_pool import BlockPool
from scheduler.core.plan import BoolArray, Int32Array
from scheduler.core.request_table import RequestTable
from scheduler.core.state import SchedulerState

NULL_BLOCK = 0
# One bug can spoil every block; the first faults say which.
MAX_FAULTS = 20


@dataclass(frozen=True, slots=True)
class BookAudit:
    """Blocks by owner, and what is wrong, one sentence each.

    num_free_blocks are those of the free list, without the prefix cache's. num_requests counts the
    requests that hold blocks. num_leased_blocks are those that only leases hold.
    """

    num_free_blocks: int
    num_cached_blocks: int
    num_owned_blocks: int
    num_leased_blocks: int
    num_requests: int
    faults: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RowTables:
    """Block tables of rows, as copies.

    Args:
        rows: [num_rows] ascending.
        num_blocks: [num_rows].
        block_ids: [sum(num_blocks)] row after row.
    """

    rows: Int32Array
    num_blocks: Int32Array
    block_ids: Int32Array


def audit(state: SchedulerState, live_keys: Container[int] | None = None) -> BookAudit:
    """Walk the whole book; the cost grows with the number of blocks.

    live_keys are the requests that the caller still knows, if it keeps count.
    """
    pool, tables = state.kv.pool, row_tables(state.table)
    is_block = (tables.block_ids > NULL_BLOCK) & (tables.block_ids <= pool.num_usable)
    holders = np.bincount(tables.block_ids[is_block], minlength=pool.num_usable + 1)
    leased = np.zeros_like(holders)
    for lease in state.leases:
        leased[list(lease.block_ids)] += 1
    is_cached = _is_cached(pool)
    is_unheld = _is_free(pool)
    num_cached = int((is_unheld & is_cached).sum())
    faults = [
        *_request_faults(state, live_keys),
        *_row_faults(state),
        *_table_faults(state, tables, is_block),
        *pool_faults(pool, holders + leased),
        *_content_faults(state, tables),
        *_lease_faults(state),
    ]
    return BookAudit(
        num_free_blocks=int(is_unheld.sum()) - num_cached,
        num_cached_blocks=num_cached,
        num_owned_blocks=int((holders > 0).sum()),
        num_leased_blocks=int(((leased > 0) & (holders == 0)).sum()),
        num_requests=int((tables.num_blocks > 0).sum()),
        faults=limited(faults),
    )


def row_tables(table: RequestTable) -> RowTables:
    """The block tables of all running rows."""
    rows = np.sort(table.running_rows)
    num_blocks = table.num_blocks[rows]
    columns = np.arange(int(num_blocks.max(initial=0)))
    is_used = columns < num_blocks[:, None]
    block_ids = table.block_table[rows[:, None], columns][is_used]
    return RowTables(rows.astype(np.int32), num_blocks, block_ids)


def limited(faults: list[str]) -> tuple[str, ...]:
    """The first MAX_FAULTS, and how many there are more."""
    if len(faults) <= MAX_FAULTS:
        return tuple(faults)
    return (*faults[:MAX_FAULTS], f"there are {len(faults) - MAX_FAULTS} faults more")


def pool_faults(pool: BlockPool, holders: NDArray[np.intp]) -> list[str]:
    """Blocks that have no owner or two, and contents that lead to wrong blocks.

    Args:
        holders: [num_blocks] how many block tables have each block.
    """
    num_refs, digests = np.array(pool.ref_counts), pool.digests
    is_free, is_cached = _is_free(pool), _is_cached(pool)
    is_usable = np.arange(len(num_refs)) != NULL_BLOCK
    faults: list[str] = []

    def note(is_faulty: BoolArray, sentence: Callable[[int], str]) -> None:
        faults.extend(map(sentence, is_faulty.nonzero()[0].tolist()))

    if is_free[NULL_BLOCK] or num_refs[NULL_BLOCK] or is_cached[NULL_BLOCK]:
        faults.append("the null block has an owner")
    note(
        is_usable & (num_refs != holders),
        lambda b: f"block {b} has {num_refs[b]} references and {holders[b]} holders",
    )
    note(
        is_usable & is_free & (holders > 0),
        lambda b: f"block {b} has two owners: it is in the free list and {holders[b]} hold it",
    )
    note(is_usable & ~is_free & (holders == 0), lambda b: f"block {b} has no owner")
    note(
        is_usable & (holders > 1) & ~is_cached,
        lambda b: f"{holders[b]} requests hold block {b}, which the prefix cache does not know",
    )
    found = [(digest, b) for digest, block_ids in pool.cached_blocks() for b in block_ids]
    faults += [
        f"a digest leads to block {block_id}, which has other contents"
        for digest, block_id in found
        if digests[block_id] != digest
    ]
    if len(found) != (num_cached := np.count_nonzero(is_cached)):
        faults.append(f"{num_cached} blocks have a digest and {len(found)} are found by it")
    if pool.num_free_cached != (num_both := np.count_nonzero(is_free & is_cached)):
        faults.append(f"{num_both} free blocks are cached, and {pool.num_free_cached} are counted")
    return faults


def _is_free(pool: BlockPool) -> BoolArray:
    """[num_blocks] whether each is in the list of blocks that no request holds."""
    is_free = np.zeros(pool.num_usable + 1, dtype=np.bool_)
    is_free[np.fromiter(pool.free_blocks, dtype=np.intp, count=pool.num_free)] = True
    return is_free


def _is_cached(pool: BlockPool) -> BoolArray:
    """[num_blocks] whether each has a digest."""
    return np.array([digest is not None for digest in pool.digests], dtype=np.bool_)


def _request_faults(state: SchedulerState, live_keys: Container[int] | None) -> Iterator[str]:
    """Every live request is in one place: a row, a queue, or with the paused ones."""
    table, queues = state.table, state.queues
    num_places = dict.fromkeys(state.requests, 0)
    in_rows = [placed for placed in table.requests if placed is not None]
    for request in chain(in_rows, queues, queues.paused.values()):
        if state.requests.get(request.key) is request:
            num_places[request.key] += 1
        else:
            yield f"{request.request_id} has ended and is not forgotten"
    for key, count in num_places.items():
        if count != 1:
            yield f"{state.requests[key].request_id} is in {count} places"
    for key, live in state.requests.items():
        if live_keys is not None and key not in live_keys:
            yield f"{live.request_id} lives on, and the caller has forgotten it"
        if live.is_paused != (key in queues.paused):
            yield f"{live.request_id} is half paused"
    for awaited in state.stale.values():
        if state.requests.get(awaited.key) is not awaited:
            yield f"output of {awaited.request_id} is awaited, which has ended"


def _row_faults(state: SchedulerState) -> Iterator[str]:
    """Rows in use have a request that knows its row; free rows hold nothing."""
    table = state.table
    is_running = np.zeros(len(table.requests), dtype=np.bool_)
    is_running[table.running_rows] = True
    if int(is_running.sum()) != table.num_running:
        yield "a row runs twice"
    rows_in_use = is_running.nonzero()[0].tolist()
    if sorted([*table.free_rows, *rows_in_use]) != list(range(len(is_running))):
        yield "a row is lost, or free and running"
    for row, (request, runs) in enumerate(zip(table.requests, is_running.tolist(), strict=True)):
        if runs != (request is not None):
            yield f"row {row} {'runs without a request' if runs else 'does not run its request'}"
        elif request is not None and request.row != row:
            yield f"{request.request_id} is in row {row} and knows row {request.row}"
    for row in (~is_running & (table.num_blocks > 0)).nonzero()[0].tolist():
        yield f"row {row} is free and holds {table.num_blocks[row]} blocks"


def _table_faults(state: SchedulerState, tables: RowTables, is_block: BoolArray) -> Iterator[str]:
    """Each table has as many blocks as its computed tokens need, each of them once.

    is_block is [len(tables.block_ids)]: whether each is a block of the pool.
    """
    config, rows = state.config, tables.rows
    row_of_block = np.repeat(rows, tables.num_blocks)
    for row, block in zip(row_of_block[~is_block], tables.block_ids[~is_block], strict=True):
        yield f"{_name(state, row)} holds block {block}, which is none"
    placed, counts = np.unique(
        row_of_block.astype(np.int64) * (state.kv.pool.num_usable + 1) + tables.block_ids,
        return_counts=True,
    )
    for place in placed[counts > 1].tolist():
        row, block = divmod(place, state.kv.pool.num_usable + 1)
        yield f"{_name(state, row)} holds block {block} twice"
    num_computed = state.table.num_computed[rows]
    least = -(-np.minimum(num_computed, config.max_model_len) // config.block_size)
    # A block allocated for drafts stays when they are rejected.
    num_beyond = config.num_lookahead_tokens + config.num_spec_tokens * config.pipeline_depth
    most = -(-(num_computed + num_beyond) // config.block_size)
    is_wrong = (tables.num_blocks < least) | (tables.num_blocks > most)
    for index in is_wrong.nonzero()[0].tolist():
        yield (
            f"{_name(state, rows[index])} has {num_computed[index]} computed tokens and "
            f"{tables.num_blocks[index]} blocks of {config.block_size}"
        )


def _content_faults(state: SchedulerState, tables: RowTables) -> Iterator[str]:
    """Blocks that a row has registered have the digests of its tokens, its other blocks have none.

    So a shared block is at the same place in each of its tables: a digest covers the whole prefix.
    """
    digests, table = state.kv.pool.digests, state.table
    ends = np.cumsum(tables.num_blocks)
    columns = zip(tables.rows.tolist(), ends.tolist(), tables.num_blocks.tolist(), strict=True)
    for row, end, num_blocks in columns:
        block_ids = tables.block_ids[end - num_blocks : end].tolist()
        request, num_registered = table.requests[row], table.num_registered.item(row)
        if request is None or max(block_ids, default=0) >= len(digests):
            continue
        known: list[bytes | None] = [*request.block_hashes.digests[:num_registered]]
        if [digests[b] for b in block_ids] != known + [None] * (num_blocks - num_registered):
            yield f"{_name(state, row)} has blocks with the contents of other tokens"


def _lease_faults(state: SchedulerState) -> Iterator[str]:
    """An import has a live request; blocks have their digests once their contents are here."""
    digests, leases = state.kv.pool.digests, state.leases
    for lease in leases:
        if lease.is_import and lease.key not in state.requests:
            yield f"lease {lease.lease_id} is of a request that has ended"
        if len(set(lease.block_ids)) != len(lease.block_ids):
            yield f"lease {lease.lease_id} holds a block twice"
        num_here = len(lease.block_ids) if leases.is_committed(lease) else lease.num_present
        known = [*lease.digests[:num_here], *[None] * (len(lease.block_ids) - num_here)]
        if [digests[block_id] for block_id in lease.block_ids] != known:
            yield f"lease {lease.lease_id} has blocks with other contents"


def _name(state: SchedulerState, row: int) -> str:
    """A row's request for a sentence."""
    request = state.table.requests[row]
    return f"row {row}" if request is None else f"{request.request_id} in row {row}"
