"""What waits for one router: merged, bounded, in order."""

import asyncio

import numpy as np
import pytest

from headrace.vocabulary import RefusalReason
from scheduler.core.plan import RequestStatus
from scheduler.outbox import (
    Ending,
    FirstAdmission,
    HandleLogprobs,
    News,
    NotTaken,
    Outbox,
    OutboxClosedError,
    merge,
)


def news(tokens_by_handle: dict[int, list[int]], **fields) -> News:
    counts = [len(tokens) for tokens in tokens_by_handle.values()]
    flat = [token for tokens in tokens_by_handle.values() for token in tokens]
    return News(
        handles=np.array(list(tokens_by_handle), dtype=np.uint32),
        num_new_tokens=np.array(counts, dtype=np.int32),
        token_ids=np.array(flat, dtype=np.int32),
        **fields,
    )


def tokens_by_handle(item: News) -> dict[int, list[int]]:
    ends = np.cumsum(item.num_new_tokens)
    return {
        handle: item.token_ids[end - count : end].tolist()
        for handle, count, end in zip(
            item.handles.tolist(), item.num_new_tokens.tolist(), ends.tolist(), strict=True
        )
    }


def test_merging_keeps_each_request_s_tokens_in_the_order_of_the_steps():
    merged = merge([news({7: [1], 3: [2, 3]}), news({3: [4], 9: [5]}), news({}), news({7: [6, 7]})])
    assert tokens_by_handle(merged) == {3: [2, 3, 4], 7: [1, 6, 7], 9: [5]}
    assert merged.num_new_tokens.dtype == np.int32


def test_merging_adds_up_drafts_of_steps_that_had_any():
    drafted = np.array([[3, 1], [2, 2]], dtype=np.int32)
    later = np.array([[3, 3]], dtype=np.int32)
    merged = merge(
        [
            news({7: [1, 2], 3: [4, 5, 6]}, draft_counts=drafted),
            news({3: [8]}),
            news({7: [9]}, draft_counts=later),
        ]
    )
    assert merged.handles.tolist() == [3, 7]
    assert merged.draft_counts.tolist() == [[2, 2], [6, 4]]
    assert not len(merge([news({7: [1]}), news({7: [2]})]).draft_counts)


def test_merging_random_steps_gives_what_reading_them_one_by_one_gives():
    rng = np.random.default_rng(3)
    steps = [
        news({int(h): rng.integers(0, 99, rng.integers(0, 4)).tolist() for h in chosen})
        for chosen in (rng.permutation(6)[: rng.integers(0, 7)] for _ in range(40))
    ]
    expected: dict[int, list[int]] = {}
    for step in steps:
        for handle, tokens in tokens_by_handle(step).items():
            expected.setdefault(handle, []).extend(tokens)
    assert tokens_by_handle(merge(steps)) == dict(sorted(expected.items()))


def test_merging_keeps_admissions_ends_and_log_probabilities():
    first = news(
        {1: [5]},
        admitted=(FirstAdmission(1, 0, 1.0, "w"),),
        logprobs=(HandleLogprobs(1, ["a"], ["p", "q"]),),
    )
    second = news(
        {1: [6]},
        finished=(Ending(handle=1, status=RequestStatus.STOPPED),),
        logprobs=(HandleLogprobs(1, ["b"], []), HandleLogprobs(2, ["c"], [])),
    )
    merged = merge([first, second])
    assert [a.handle for a in merged.admitted] == [1]
    assert [e.handle for e in merged.finished] == [1]
    assert [(e.handle, list(e.tokens), list(e.prompt_tokens)) for e in merged.logprobs] == [
        (1, ["a", "b"], ["p", "q"]),
        (2, ["c"], []),
    ]


async def test_what_was_pushed_while_nobody_took_comes_in_one_parcel():
    outbox = Outbox(100)
    outbox.push(news({1: [5]}))
    outbox.push(news({1: [6]}))
    outbox.refuse(NotTaken(4, RefusalReason.NO_WORKER, "none"))
    parcel = await outbox.take()
    assert tokens_by_handle(parcel.news) == {1: [5, 6]}
    assert [refusal.handle for refusal in parcel.refusals] == [4]
    outbox.push(news({2: [7]}))
    assert tokens_by_handle((await outbox.take()).news) == {2: [7]}


async def test_taking_waits_for_something():
    outbox = Outbox(100)
    taking = asyncio.create_task(outbox.take())
    await asyncio.sleep(0)
    assert not taking.done()
    outbox.push(news({1: [5]}))
    assert (await taking).news is not None


async def test_a_router_that_lets_too_much_wait_is_given_up():
    outbox = Outbox(max_waiting_tokens=10)
    outbox.push(news({1: [0] * 10}))
    await outbox.take()
    assert not outbox._overflowed.is_set()
    outbox.push(news({1: [0] * 6}))
    outbox.push(news({1: [0] * 5}))
    outbox.push(news({1: [0] * 5}))
    await outbox.overflowed()
    assert not outbox._news


async def test_a_closed_outbox_gives_what_it_has_and_then_says_so():
    outbox = Outbox(100)
    outbox.push(news({1: [5]}))
    outbox.close()
    assert tokens_by_handle((await outbox.take()).news) == {1: [5]}
    with pytest.raises(OutboxClosedError):
        await outbox.take()
