"""Clients that do not read: what the router does with their requests, by itself and in order."""

import sys

import numpy as np
import pytest

from headrace.service.columns import pack_int32, pack_uint32
from headrace.v1 import scheduler_pb2
from headrace.vocabulary import FinishReason, RefusalReason
from router.core.admission import Limits
from router.core.pauses import UnreadLimits
from router.outputs import Refusal
from router.rpc.scheduler_wire import to_step_outputs
from tests.router.bench import Bench, report

LIMITS = UnreadLimits(max_unread_tokens=10, max_pause_s=60.0)


def bench(**settings):
    return Bench(unread=settings.pop("unread", LIMITS), **settings)


def entered(bench, request_id="r", **fields):
    leave, request = bench.enter(request_id, **fields)
    return leave, request, request.completions[0]


def read(bench, completion, num_tokens):
    """As the stream does when its client takes something."""
    completion.num_streamed += num_tokens
    bench.router.live.on_read(completion)


def paused(bench, link="s"):
    return [bench.links[link].sent[handle] for handle in bench.links[link].paused]


def test_it_is_paused_with_too_much_unread_and_goes_on_when_half_is_read():
    slow = bench()
    leave, request, completion = entered(slow)
    slow.step(num_tokens=10)
    assert paused(slow) == []
    slow.step(num_tokens=1)
    assert paused(slow) == [completion]
    slow.time += 2.0
    read(slow, completion, 5)
    assert paused(slow) == [completion]
    read(slow, completion, 1)
    assert paused(slow) == []
    assert (request.paused_s, request.error) == (2.0, None)
    leave()
    slow.assert_empty()


def test_among_many_streams_it_is_paused_earlier():
    slow = bench(unread=UnreadLimits(max_unread_tokens=10, max_unread_tokens_in_all=20))
    leaves = [entered(slow, f"r{i}")[0] for i in range(4)]
    slow.step(num_tokens=5)
    assert paused(slow) == []
    slow.step(num_tokens=1)
    assert len(paused(slow)) == 4
    for leave in leaves:
        leave()
    slow.assert_empty()


def test_streams_that_have_ended_unread_count_among_the_many():
    slow = bench(unread=UnreadLimits(max_unread_tokens=10, max_unread_tokens_in_all=20))
    leaves = [entered(slow, f"r{i}")[0] for i in range(3)]
    slow.step(num_tokens=5, ends=list(slow.links["s"].sent))
    leave, _, completion = entered(slow, "new")
    slow.step(num_tokens=6)
    assert paused(slow) == [completion]
    for done in [*leaves, leave]:
        done()
    leave, _, completion = entered(slow, "alone")
    slow.step(num_tokens=10)
    assert paused(slow) == []
    leave()
    slow.assert_empty()


def step_with_logprobs(handles, num_alternatives):
    """A step's message, one token with its log probabilities for each handle, as it comes."""
    update = scheduler_pb2.StepUpdate(
        handles=pack_uint32(np.array(handles, np.uint32)),
        num_new_tokens=pack_int32(np.ones(len(handles), np.int32)),
        token_ids=pack_int32(np.full(len(handles), 65, np.int32)),
    )
    for handle in handles:
        update.logprobs.add(handle=handle).tokens.add(
            token_id=65,
            logprob=-1.5,
            rank=100_000,
            top_token_ids=range(2**31 - num_alternatives, 2**31),
            top_logprobs=[-2.5] * num_alternatives,
        )
    return to_step_outputs(scheduler_pb2.StepUpdate.FromString(update.SerializeToString()))


@pytest.mark.parametrize("num_logprobs", [0, 20])
def test_log_probabilities_that_wait_take_no_more_memory_than_tokens_may(num_logprobs):
    limits = UnreadLimits(max_unread_tokens=4000)
    slow = bench(unread=limits)
    leave, _, completion = entered(slow, num_logprobs=num_logprobs, max_tokens=5000)
    num_steps = 0
    while not completion.is_paused:
        slow.router.live.on_step(step_with_logprobs([completion.handle], num_logprobs))
        num_steps += 1
    # Nothing of a decoded message: it would keep all of its step, other requests' too.
    assert {type(entry) for entry in completion.logprobs} == {bytes}
    num_bytes = sum(map(sys.getsizeof, completion.logprobs)) + sys.getsizeof(completion.logprobs)
    assert 0.5 < num_bytes / (4 * limits.max_unread_tokens) < 1.5
    assert num_steps == len(completion.token_ids) > 50
    leave()
    slow.assert_empty()


def test_tokens_that_were_on_their_way_are_kept():
    slow = bench()
    leave, request, completion = entered(slow)
    slow.step(num_tokens=11)
    slow.step(num_tokens=3)
    assert (completion.num_unread, request.error) == (14, None)
    leave()
    slow.assert_empty()


def test_whoever_does_not_heed_the_pause_makes_it_end():
    slow = bench()
    leave, request, _ = entered(slow)
    slow.step(num_tokens=11)
    slow.step(num_tokens=2 * 10 + 1024 - 11)
    assert request.error is None
    slow.step()
    assert request.error.reason == "SLOW_CLIENT"
    assert slow.links["s"].cancelled
    leave()
    slow.assert_empty()


def test_it_is_cut_at_once_where_that_is_asked_for():
    slow = bench(unread=UnreadLimits(slow_client="cut", max_unread_tokens=10))
    leave, request, _ = entered(slow)
    slow.step(num_tokens=11)
    assert request.error.reason == "SLOW_CLIENT"
    assert "more than 10 of its tokens are unread" in request.error.message
    assert not slow.links["s"].paused
    leave()
    slow.assert_empty()


def test_a_pause_that_is_too_long_is_the_end_and_short_ones_do_not_add_up():
    slow = bench()
    leave, request, completion = entered(slow, max_tokens=1000)
    for _ in range(4):
        slow.step(num_tokens=11)
        assert slow.router.expire() == 60.0
        slow.time += 59.0
        assert slow.router.expire() == 1.0
        read(slow, completion, 11)
        assert slow.router.expire() is None
    slow.step(num_tokens=11)
    slow.time += 60.0
    assert slow.router.expire() is None
    assert request.error.reason == "SLOW_CLIENT"
    assert "paused for 60 s in one go" in request.error.message
    assert request.paused_s == 4 * 59.0 + 60.0
    leave()
    slow.assert_empty()


def test_one_completion_that_is_given_up_takes_its_paused_siblings_along():
    slow = bench()
    leave, request, _ = entered(slow, n=3)
    slow.step(num_tokens=11)
    assert len(paused(slow)) == 3
    slow.time += 60.0
    assert slow.router.expire() is None
    assert [c.finish.reason for c in request.completions] == [FinishReason.ERROR] * 3
    leave()
    slow.assert_empty()


def test_a_paused_request_leaves_its_slot_to_others_but_keeps_its_permit():
    slow = bench(max_num_seqs=1, waiting_allowance=0, limits=Limits(max_live_requests=2))
    leave, _, completion = entered(slow)
    leave_other, _, _ = entered(slow, "other")
    assert slow.router.num_queued == 1
    slow.step(num_tokens=11)
    assert slow.router.num_queued == 0
    assert slow.router.num_live == 2
    read(slow, completion, 11)
    assert slow.router.pool.num_in_flight() == 2
    leave()
    leave_other()
    slow.assert_empty()


def test_a_report_without_it_counts_nobody_else_in_its_place():
    slow = bench(max_num_seqs=1, waiting_allowance=0)
    leave, _, _ = entered(slow)
    slow.step(num_tokens=11)
    slow.router.live.on_report("s", [report("s", 1)], is_draining=False)
    leave_other, _, other = entered(slow, "other")
    assert other in slow.links["s"].sent.values()
    leave()
    leave_other()
    slow.assert_empty()


@pytest.mark.parametrize("ending", ["abort", "leave", "deadline", "scheduler", "stop string"])
def test_however_it_ends_in_a_pause_nothing_is_left(ending):
    slow = bench()
    leave, request, completion = entered(slow, deadline_unix_s=1030.0, stop=(12 * "b",))
    slow.step(num_tokens=11)
    slow.time += 3.0
    match ending:
        case "abort":
            slow.router.abort("r")
        case "leave":
            leave()
        case "deadline":
            slow.time = 1030.0
            slow.router.expire()
        case "scheduler":
            slow.links["s"].paused.clear()
            slow.step(ends=list(slow.links["s"].sent))
        case "stop string":
            slow.step(num_tokens=1)
            assert completion.finish.stop == 12 * "b"
    assert request.is_finished
    assert not completion.is_paused
    assert slow.router.expire() is None
    if ending != "leave":
        leave()
    slow.assert_empty()


def test_when_its_scheduler_is_lost_it_is_sent_again_only_when_it_is_read():
    slow = bench()
    leave, request, completion = entered(slow)
    slow.step(num_tokens=11)
    slow.add("t")
    slow.router.live.on_lost(slow.links.pop("s"))
    assert (slow.router.num_queued, slow.router.num_in_flight) == (0, 0)
    assert slow.links["t"].sent == {}
    read(slow, completion, 6)
    assert list(slow.links["t"].sent.values()) == [completion]
    assert (completion.epoch, len(completion.token_ids)) == (2, 11)
    slow.step("t", ends=list(slow.links["t"].sent))
    assert request.num_completion_tokens == 12
    leave()
    slow.assert_empty()


def test_a_refused_one_waits_for_its_client_too():
    slow = bench()
    leave, _, completion = entered(slow)
    slow.step(num_tokens=11)
    link = slow.links["s"]
    handle = completion.handle
    del link.sent[handle]
    link.paused.clear()
    slow.router.live.on_refusal(Refusal(handle, RefusalReason.WORKER_LOST, ""))
    assert slow.router.num_queued == 0
    slow.router.live.on_report("s", [report("s", 4)], is_draining=False)
    assert link.sent == {}
    read(slow, completion, 11)
    assert list(link.sent.values()) == [completion]
    leave()
    slow.assert_empty()


@pytest.mark.parametrize("ending", ["abort", "leave", "deadline", "pause"])
def test_one_that_waits_for_its_client_alone_ends_as_any_other(ending):
    slow = bench()
    leave, request, _ = entered(slow, deadline_unix_s=1090.0)
    slow.step(num_tokens=11)
    slow.add("t")
    slow.router.live.on_lost(slow.links.pop("s"))
    match ending:
        case "abort":
            slow.router.abort("r")
        case "leave":
            leave()
        case "deadline":
            slow.time = 1090.0
            slow.router.expire()
        case "pause":
            slow.time = 1060.0
            slow.router.expire()
            assert request.error.reason == "SLOW_CLIENT"
    assert request.is_finished
    assert slow.router.expire() is None
    if ending != "leave":
        leave()
    slow.assert_empty()
