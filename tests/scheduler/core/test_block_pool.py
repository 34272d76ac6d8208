import numpy as np

from scheduler.core.audit import pool_faults
from scheduler.core.block_pool import BlockPool


def make_pool(num_blocks: int = 7, *, enable_prefix_caching: bool = True) -> BlockPool:
    return BlockPool(num_blocks, enable_prefix_caching=enable_prefix_caching)


def free(pool: BlockPool) -> list[int]:
    return list(pool.free_blocks)


def check(pool: BlockPool, *held: int) -> None:
    """Every block has one owner, when requests hold these; one held twice is given twice."""
    holders = np.bincount(np.array(held, dtype=np.intp), minlength=pool.num_usable + 1)
    assert pool_faults(pool, holders) == []


def test_gives_blocks_out_from_the_head_and_never_block_0() -> None:
    pool = make_pool()
    assert pool.allocate(2) == [1, 2]
    assert free(pool) == [3, 4, 5, 6]
    check(pool, 1, 2)


def test_useless_blocks_come_back_to_the_head_the_very_last_first() -> None:
    pool = make_pool()
    pool.release(pool.allocate(3))
    assert free(pool) == [3, 2, 1, 4, 5, 6]


def test_cached_blocks_come_back_to_the_tail_the_prefix_last() -> None:
    pool = make_pool()
    blocks = pool.allocate(3)
    pool.register(blocks[:2], [b"a", b"b"])
    pool.release(blocks)
    assert free(pool) == [3, 4, 5, 6, 2, 1]


def test_without_caching_everything_comes_back_to_the_tail() -> None:
    pool = make_pool(enable_prefix_caching=False)
    pool.release(pool.allocate(2))
    assert free(pool) == [3, 4, 5, 6, 2, 1]


def test_a_shared_block_stays_until_its_last_holder_goes() -> None:
    pool = make_pool()
    blocks = pool.allocate(1)
    pool.register(blocks, [b"a"])
    pool.touch(pool.find_prefix([b"a"], 9))
    pool.release(blocks)
    check(pool, 1)
    pool.release(blocks)
    check(pool)
    assert free(pool) == [2, 3, 4, 5, 6, 1]


def test_touching_a_free_block_takes_it_from_the_middle_of_the_free_list() -> None:
    pool = make_pool()
    pool.register(pool.allocate(1), [b"a"])
    pool.release([1])
    pool.allocate(2)
    pool.release([2, 3])
    pool.touch([1])
    assert free(pool) == [3, 2, 4, 5, 6]


def test_a_block_forgets_its_contents_only_when_it_is_given_out_again() -> None:
    pool = make_pool(3)
    pool.register(pool.allocate(1), [b"a"])
    pool.release([1])
    assert pool.find_prefix([b"a"], 9) == [1]
    assert pool.allocate(2) == [2, 1]
    assert pool.find_prefix([b"a"], 9) == []


def test_of_equal_contents_the_block_registered_first_is_found() -> None:
    pool = make_pool()
    blocks = pool.allocate(3)
    pool.register(blocks, [b"a", b"a", b"a"])
    assert pool.find_prefix([b"a"], 9) == [1]
    pool.release([1])
    pool.allocate(4)
    assert pool.find_prefix([b"a"], 9) == [2]


def test_registering_a_block_twice_changes_nothing() -> None:
    pool = make_pool()
    pool.register(pool.allocate(1), [b"a"])
    pool.register([1], [b"a"])
    check(pool, 1)


def test_a_prefix_ends_at_the_first_digest_that_is_not_cached() -> None:
    pool = make_pool()
    pool.register(pool.allocate(3), [b"a", b"b", b"d"])
    assert pool.find_prefix([b"a", b"b", b"c", b"d"], 9) == [1, 2]
    assert pool.find_prefix([b"a", b"b", b"c", b"d"], 1) == [1]


def test_forgetting_everything_keeps_the_order_of_the_free_list() -> None:
    pool = make_pool()
    blocks = pool.allocate(2)
    pool.register(blocks, [b"a", b"b"])
    pool.release(blocks)
    before = free(pool)
    pool.forget_all()
    assert free(pool) == before
    assert pool.find_prefix([b"a"], 9) == []
    assert pool.num_cached == 0
