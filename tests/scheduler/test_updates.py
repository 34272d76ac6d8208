"""Updates of several steps, merged into one."""

import numpy as np

from headrace.vocabulary import RefusalReason
from scheduler.core.plan import RequestStatus
from scheduler.intake import unscheduled_end
from scheduler.requests import FirstAdmission, LiveRequest, LiveRequestTable, Submission
from scheduler.updates import (
    NewAdmission,
    NewLogprobs,
    NotTaken,
    RequestEnd,
    RouterUpdate,
    merge,
)


def update(tokens_by_handle: dict[int, list[int]], **fields) -> RouterUpdate:
    counts = [len(tokens) for tokens in tokens_by_handle.values()]
    flat = [token for tokens in tokens_by_handle.values() for token in tokens]
    return RouterUpdate(
        handles=np.array(list(tokens_by_handle), dtype=np.uint32),
        num_new_tokens=np.array(counts, dtype=np.int32),
        token_ids=np.array(flat, dtype=np.int32),
        **fields,
    )


def tokens_by_handle(item: RouterUpdate) -> dict[int, list[int]]:
    ends = np.cumsum(item.num_new_tokens)
    return {
        handle: item.token_ids[end - count : end].tolist()
        for handle, count, end in zip(
            item.handles.tolist(), item.num_new_tokens.tolist(), ends.tolist(), strict=True
        )
    }


def test_merging_keeps_each_request_s_tokens_in_the_order_of_the_steps():
    merged = merge(
        [update({7: [1], 3: [2, 3]}), update({3: [4], 9: [5]}), update({}), update({7: [6, 7]})]
    )
    assert tokens_by_handle(merged) == {3: [2, 3, 4], 7: [1, 6, 7], 9: [5]}
    assert merged.num_new_tokens.dtype == np.int32


def test_merging_adds_up_drafts_of_steps_that_had_any():
    drafted = np.array([[3, 1], [2, 2]], dtype=np.int32)
    later = np.array([[3, 3]], dtype=np.int32)
    merged = merge(
        [
            update({7: [1, 2], 3: [4, 5, 6]}, draft_counts=drafted),
            update({3: [8]}),
            update({7: [9]}, draft_counts=later),
        ]
    )
    assert merged.handles.tolist() == [3, 7]
    assert merged.draft_counts.tolist() == [[2, 2], [6, 4]]
    assert not len(merge([update({7: [1]}), update({7: [2]})]).draft_counts)


def test_merging_random_steps_gives_what_reading_them_one_by_one_gives():
    rng = np.random.default_rng(3)
    steps = [
        update({int(h): rng.integers(0, 99, rng.integers(0, 4)).tolist() for h in chosen})
        for chosen in (rng.permutation(6)[: rng.integers(0, 7)] for _ in range(40))
    ]
    expected: dict[int, list[int]] = {}
    for step in steps:
        for handle, tokens in tokens_by_handle(step).items():
            expected.setdefault(handle, []).extend(tokens)
    assert tokens_by_handle(merge(steps)) == dict(sorted(expected.items()))


def test_merging_keeps_everything_else_in_order() -> None:
    one, other = (live_request(handle) for handle in (1, 2))
    first = update(
        {1: [5]},
        admissions=(NewAdmission(1, FirstAdmission(0, 1.0, "w")),),
        logprobs=(NewLogprobs(one, ["a"], ["p", "q"]),),
    )
    second = update(
        {1: [6]},
        ends=(RequestEnd(one, unscheduled_end(one, RequestStatus.STOPPED)),),
        logprobs=(NewLogprobs(one, ["b"], []), NewLogprobs(other, ["c"], [])),
        refusals=(NotTaken(4, RefusalReason.NO_WORKER, "none"),),
        moved=(3,),
        aborts=("r9",),
    )
    merged = merge([first, second])
    assert [new.handle for new in merged.admissions] == [1]
    assert [e.request for e in merged.ends] == [one]
    assert merged.logprobs == (*first.logprobs, *second.logprobs)
    assert merged.refusals == second.refusals
    assert (merged.moved, merged.aborts) == ((3,), ("r9",))


def live_request(handle: int) -> LiveRequest:
    submission = Submission(
        handle=handle,
        request_id=f"r{handle}",
        prompt_token_ids=np.array([1], dtype=np.int32),
        max_tokens=9,
        sampling=None,
    )
    return LiveRequestTable().add(1, submission, None)
