"""The router's state machine by itself: a fake link, a clock that the test moves, no sockets."""

import contextlib
import dataclasses
from array import array

import numpy as np
import pytest

from headrace.service.errors import ServiceError
from headrace.vocabulary import FinishReason
from router.core.admission import Limits, TenantLimits
from router.outputs import CompletionFinish, StepOutputs
from router.request import Spec
from tests.router.bench import TOKENIZER, Bench, Link, report


def test_four_completions_aborted_a_thousand_times_leave_nothing():
    bench = Bench()
    for number in range(1000):
        leave, request = bench.enter(f"r-{number}", n=4)
        if number % 2:
            bench.step()
        if number % 3:
            assert bench.router.abort(f"r-{number}") is True
        leave()
        assert request.is_finished
    bench.assert_empty()


def test_an_id_reused_at_once_is_not_touched_by_news_of_the_one_before():
    bench = Bench()
    leave, _ = bench.enter("same")
    [old] = bench.links["s"].sent
    assert bench.router.abort("same")
    leave()
    leave, request = bench.enter("same")
    bench.router.live.on_step(
        StepOutputs(
            handles=[old],
            num_new_tokens=[1],
            token_ids=array("i", [65]),
            finish_by_handle={old: CompletionFinish(FinishReason.ABORTED)},
        )
    )
    assert not request.is_finished
    assert request.num_completion_tokens == 0
    leave()
    bench.assert_empty()


def test_ttft_is_taken_from_the_first_token_only():
    bench = Bench()
    leave, request = bench.enter("r")
    for _ in range(3):
        bench.time += 1.0
        bench.step()
    assert request.timeline.first_token == 1001.0
    assert request.timeline.admitted == 1001.0
    leave()


def test_a_cut_off_link_gives_its_requests_to_another_with_their_tokens():
    bench = Bench()
    leave, request = bench.enter("r", max_tokens=50)
    bench.step(num_tokens=3)
    other = bench.add("t")
    lost = bench.links.pop("s")
    bench.router.live.on_lost(lost)
    [completion] = other.sent.values()
    assert completion is request.completions[0]
    assert (completion.epoch, list(completion.token_ids)) == (2, [65] * 3)
    bench.step("t", ends=list(other.sent))
    assert request.num_completion_tokens == 4
    leave()
    bench.assert_empty()


def test_what_a_scheduler_still_runs_goes_back_to_it_without_credit():
    bench = Bench(max_num_seqs=4, waiting_allowance=2)
    leaves = [bench.enter(f"r-{number}")[0] for number in range(8)]
    bench.step(num_tokens=3)
    lost = bench.links.pop("s")
    bench.router.live.on_lost(lost)
    link = bench.links["s"] = Link("s")
    bench.router.live.on_connected(link)
    there = report("s", 4, num_running=4, num_waiting=2)
    bench.router.live.on_report("s", [there], is_draining=False)
    assert [c.request_id for c in link.sent.values()] == [f"r-{number}" for number in range(6)]
    assert all((c.epoch, len(c.token_ids)) == (2, 3) for c in link.sent.values())
    for leave in leaves:
        leave()
    bench.assert_empty()


def test_a_scheduler_that_was_started_again_gets_no_more_than_it_has_credit_for():
    bench = Bench(max_num_seqs=4, waiting_allowance=0)
    leaves = [bench.enter(f"r-{number}")[0] for number in range(4)]
    bench.router.live.on_lost(bench.links.pop("s"))
    assert len(bench.add("s", max_num_seqs=1).sent) == 1
    for leave in leaves:
        leave()
    bench.assert_empty()


def test_deadlines_end_what_waits_and_what_runs_and_tell_when_the_next_is():
    bench = Bench(waiting_allowance=0, max_num_seqs=1)
    leaves = [bench.enter(f"r-{i}", deadline_unix_s=1010.0 + i)[0] for i in range(3)]
    assert bench.router.expire() == 10.0
    bench.time = 1011.5
    assert bench.router.expire() == 0.5
    assert bench.router.num_in_flight == 1
    for leave in leaves:
        leave()
    bench.assert_empty()
    assert bench.router.expire() is None


def test_a_caller_that_leaves_late_counts_as_late():
    bench = Bench()
    leave, request = bench.enter("r", deadline_unix_s=1005.0)
    bench.time = 1005.0
    leave()
    assert request.completions[0].finish.reason is FinishReason.DEADLINE


def test_what_is_lost_and_sent_again_is_not_charged_again():
    bench = Bench()
    leave, request = bench.enter("r", 100, tenant="a")
    assert request.account.virtual_tokens == 100
    bench.add("t")
    bench.router.live.on_lost(bench.links.pop("s"))
    assert bench.links["t"].sent
    assert request.account.virtual_tokens == 100
    leave()


def test_a_refused_prompt_gives_its_permit_back():
    bench = Bench(limits=Limits(max_live_requests=1))
    with pytest.raises(ServiceError, match="max_model_len"):
        bench.enter("long", 100_000)
    leave, _ = bench.enter("short")
    leave()
    bench.assert_empty()


def test_prompts_being_read_hold_places_of_all_and_of_their_tenant():
    tenant_limits = TenantLimits(max_queued_requests=2)
    bench = Bench(
        max_num_seqs=0,
        waiting_allowance=0,
        limits=Limits(max_queued_requests=3),
        tenant_limits=tenant_limits,
    )
    a, b = (Spec(request_id="r", model="m", sampling=None, tenant=t) for t in "ab")
    with contextlib.ExitStack() as stays:
        for number in range(2):
            stays.enter_context(bench.router.reserve(f"a-{number}", "a"))
        bench.router.check(a, 0)
        full = pytest.raises(ServiceError, match="2 requests of this tenant wait")
        with bench.router.reserve("a-2", "a"), full:
            bench.router.check(a, 0)
        with bench.router.reserve("b-0", "b"):
            bench.router.check(b, 0)
        leave, _ = bench.enter("b-1", tenant="b")
        full = pytest.raises(ServiceError, match="3 requests wait")
        with bench.router.reserve("b-2", "b"), full:
            bench.router.check(b, 0)
    leave()
    bench.assert_empty()


def test_a_request_has_arrived_when_its_caller_came_not_when_its_prompt_was_read():
    bench = Bench()
    with bench.router.reserve("r", "") as reservation:
        bench.time += 5.0
        spec = Spec(request_id="r", model="m", sampling=None)
        request = bench.router.submit(reservation, spec, np.ones(9, np.int32), "", TOKENIZER)
        assert (request.timeline.arrived, request.arrived_unix_s) == (1000.0, 1000.0)
    bench.assert_empty()


def test_what_fits_no_worker_any_more_fails_and_holds_up_nobody():
    bench = Bench(waiting_allowance=0, max_num_seqs=0)
    leave_large, large = bench.enter("large", max_tokens=90_000)
    leave_small, small = bench.enter("small", max_tokens=10)
    assert bench.router.num_queued == 2
    smaller = dataclasses.replace(report("s", 4), max_model_len=1000)
    bench.router.live.on_report("s", [smaller], is_draining=False)
    assert large.error.reason == "NO_LARGE_WORKER"
    assert [c.request for c in bench.links["s"].sent.values()] == [small]
    leave_large()
    leave_small()
    bench.assert_empty()


def test_without_any_worker_requests_wait():
    bench = Bench(waiting_allowance=0, max_num_seqs=0)
    leave, request = bench.enter("r", max_tokens=90_000)
    bench.router.live.on_report("s", [], is_draining=False)
    assert request.error is None
    assert bench.router.num_queued == 1
    leave()
