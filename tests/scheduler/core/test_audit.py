"""What the audit of the KV blocks' book counts, and that it notices each way to spoil the book."""

from collections.abc import Callable

import pytest

from scheduler.core.audit import MAX_FAULTS
from scheduler.core.scheduler import SchedulerCore
from tests.scheduler.core.building import Driver, new_request, scheduler_config

Spoil = Callable[[SchedulerCore], None]


def running_core() -> SchedulerCore:
    """Two requests of 40 tokens that share two full blocks, a third, and one that has ended."""
    core = SchedulerCore(scheduler_config())
    driver = Driver(core)
    driver.add(new_request(9, 20, max_tokens=1))
    driver.run()
    prompt = new_request(1, 40).prompt_token_ids
    driver.add(new_request(1, prompt_token_ids=prompt))
    driver.step()
    driver.add(new_request(2, prompt_token_ids=prompt.copy()), new_request(3, 10))
    driver.step()
    return core


def row_of(core: SchedulerCore, key: int) -> int:
    return core.state.requests[key].row


def test_counts_the_blocks_of_each_owner() -> None:
    audit = running_core().audit()
    assert audit.faults == ()
    # 40 tokens and one more need 3 blocks, of which 2 are shared; 20 tokens fill one block.
    assert audit.num_owned_blocks == 2 + 1 + 1 + 1
    assert audit.num_cached_blocks == 1
    assert audit.num_free_blocks == 100 - 5 - 1
    assert audit.num_requests == 3


def test_an_empty_book_is_sound() -> None:
    audit = SchedulerCore(scheduler_config()).audit()
    assert (audit.num_free_blocks, audit.num_requests, audit.faults) == (100, 0, ())


def leak_a_block(core: SchedulerCore) -> None:
    core.state.kv.pool.allocate(1)


def lose_a_free_block(core: SchedulerCore) -> None:
    core.state.kv.pool._free.popitem()


def free_a_held_block(core: SchedulerCore) -> None:
    core.state.kv.pool._free[core.state.table.block_table.item(row_of(core, 3), 0)] = None


def give_out_the_null_block(core: SchedulerCore) -> None:
    core.state.kv.pool._free[0] = None


def hold_the_null_block(core: SchedulerCore) -> None:
    core.state.table.block_table[row_of(core, 3), 0] = 0


def own_a_block_twice(core: SchedulerCore) -> None:
    table = core.state.table
    table.block_table[row_of(core, 3), 0] = table.block_table[row_of(core, 1), 2]


def share_an_unknown_block(core: SchedulerCore) -> None:
    table, pool = core.state.table, core.state.kv.pool
    taken = table.block_table.item(row_of(core, 1), 2)
    pool.release([table.block_table.item(row_of(core, 3), 0)])
    pool.touch([taken])
    table.block_table[row_of(core, 3), 0] = taken


def hold_a_block_twice(core: SchedulerCore) -> None:
    line = core.state.table.block_table[row_of(core, 1)]
    core.state.kv.pool.release([line.item(1)])
    core.state.kv.pool.touch([line.item(0)])
    line[1] = line[0]


def swap_two_blocks(core: SchedulerCore) -> None:
    line = core.state.table.block_table[row_of(core, 1)]
    line[[0, 1]] = line[[1, 0]]


def forget_a_block_of_a_row(core: SchedulerCore) -> None:
    core.state.table.num_blocks[row_of(core, 1)] -= 1


def keep_a_row_too_many_blocks(core: SchedulerCore) -> None:
    table = core.state.table
    row, column = row_of(core, 3), 1
    table.block_table[row, column : column + 2] = core.state.kv.pool.allocate(2)
    table.num_blocks[row] += 2


def keep_blocks_of_an_ended_request(core: SchedulerCore) -> None:
    row = row_of(core, 3)
    core.abort(3)
    core.state.table.block_table[row, :1] = core.state.kv.pool.allocate(1)
    core.state.table.num_blocks[row] = 1


def end_a_request_that_still_runs(core: SchedulerCore) -> None:
    del core.state.requests[3]


def queue_a_running_request(core: SchedulerCore) -> None:
    core.state.queues.waiting.add(core.state.requests[3])


def lose_a_request(core: SchedulerCore) -> None:
    core.pause_request(3)
    del core.state.queues.paused[3]


def lose_a_row(core: SchedulerCore) -> None:
    core.state.table._free_rows.pop()


def reference_a_block_once_more(core: SchedulerCore) -> None:
    core.state.kv.pool.touch([core.state.table.block_table.item(row_of(core, 3), 0)])


def forget_a_digest(core: SchedulerCore) -> None:
    digests = core.state.kv.pool._digest_by_block
    digests[next(b for b, digest in enumerate(digests) if digest is not None)] = None


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (leak_a_block, "has 1 references and 0 holders"),
        (lose_a_free_block, "has no owner"),
        (free_a_held_block, "has two owners"),
        (give_out_the_null_block, "the null block has an owner"),
        (hold_the_null_block, "r3 in row 2 holds block 0, which is none"),
        (own_a_block_twice, "has 1 references and 2 holders"),
        (share_an_unknown_block, "which the prefix cache does not know"),
        (hold_a_block_twice, "holds block 2 twice"),
        (swap_two_blocks, "r1 in row 0 has blocks with the contents of other tokens"),
        (forget_a_block_of_a_row, "has 41 computed tokens and 2 blocks of 16"),
        (keep_a_row_too_many_blocks, "has 10 computed tokens and 3 blocks of 16"),
        (keep_blocks_of_an_ended_request, "is free and holds 1 blocks"),
        (end_a_request_that_still_runs, "r3 has ended and is not forgotten"),
        (queue_a_running_request, "r3 is in 2 places"),
        (lose_a_request, "r3 is in 0 places"),
        (lose_a_row, "a row is lost"),
        (reference_a_block_once_more, "has 2 references and 1 holders"),
        (forget_a_digest, "are found by it"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_notices(spoil: Spoil, sentence: str) -> None:
    core = running_core()
    spoil(core)
    assert sentence in "; ".join(core.audit().faults)


def test_says_the_first_of_many_faults_and_how_many_there_are() -> None:
    core = running_core()
    core.state.kv.pool._free.clear()
    faults = core.audit().faults
    assert len(faults) == MAX_FAULTS + 1
    assert "faults more" in faults[-1]
