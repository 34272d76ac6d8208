"""Keys, ids and routes of live requests."""

import numpy as np
import pytest

from scheduler.requests import LiveRequestTable, Submission


class Nowhere:
    def cancel(self, request, status):
        raise AssertionError("nobody cancels here")


def submission(number: int) -> Submission:
    return Submission(
        handle=number,
        request_id=f"r{number}",
        prompt_token_ids=np.array([1], dtype=np.int32),
        max_tokens=4,
        sampling=None,
    )


def test_routes_say_connection_and_handle_of_many_keys_at_once():
    table = LiveRequestTable(initial_capacity=2)
    keys = [table.add(i % 3, submission(i), Nowhere()).key for i in range(9)]
    connections, handles = table.routes(np.array(keys[::2], dtype=np.int64))
    assert connections.tolist() == [0, 2, 1, 0, 2]
    assert handles.tolist() == [0, 2, 4, 6, 8]


def test_a_key_is_never_given_twice_though_its_slot_is():
    table = LiveRequestTable(initial_capacity=1)
    first = table.add(0, submission(0), Nowhere())
    table.remove(first)
    second = table.add(0, submission(1), Nowhere())
    assert second.key != first.key
    assert table.get(first.key) is None
    assert table.get(second.key) is second


def test_generated_tokens_are_counted_from_what_an_earlier_epoch_gave():
    table = LiveRequestTable()
    one = table.add(0, submission(0), Nowhere())
    table.count_tokens(np.array([one.key], dtype=np.int64), np.array([3], dtype=np.int32))
    table.count_tokens(np.array([one.key], dtype=np.int64), np.array([2], dtype=np.int32))
    assert table.num_generated(one) == 5
    table.remove(one)
    again = table.add(0, submission(1), Nowhere())
    assert table.num_generated(again) == 0


def test_a_released_id_can_live_again_before_its_first_request_is_removed():
    table = LiveRequestTable()
    first = table.add(0, submission(0), Nowhere())
    table.release_id(first)
    second = table.add(0, submission(0), Nowhere())
    table.remove(first)
    assert table.find("r0") is second


def test_each_request_with_new_tokens_has_its_turn_in_the_journal():
    table = LiveRequestTable()
    requests = [table.add(0, submission(i), Nowhere()) for i in range(5)]
    keys = np.array([request.key for request in requests], dtype=np.int64)
    ones = np.ones(5, dtype=np.int32)
    taken, first = [], 0
    for _ in range(10):
        table.count_tokens(keys, ones)
        chosen, first = table.to_journal(first, 2)
        taken += [request.submission.handle for request in chosen]
        for request in chosen:
            table.note_journaled(request, table.num_generated(request))
    assert sorted(taken) == sorted([*range(5)] * 4)


def test_the_journal_takes_nothing_of_ended_requests_and_of_those_it_was_told_to_leave():
    table = LiveRequestTable()
    ended, left = (table.add(0, submission(i), Nowhere()) for i in range(2))
    table.count_tokens(np.array([ended.key, left.key]), np.array([3, 3], dtype=np.int32))
    table.remove(ended)
    table.note_journaled(left, None)
    assert table.to_journal(0, 9) == ([], 0)
    table.note_journaled(left, 1)
    assert table.to_journal(0, 9)[0] == [left]


def test_removing_twice_is_a_bug():
    table = LiveRequestTable()
    one = table.add(0, submission(0), Nowhere())
    table.remove(one)
    with pytest.raises(AssertionError, match="twice"):
        table.remove(one)
