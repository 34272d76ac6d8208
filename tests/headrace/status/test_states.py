"""The transition table."""

import itertools

import pytest

from headrace.status import states
from headrace.status.states import State, Writer

LIVE = {State.QUEUED, State.DISPATCHED, State.RUNNING, State.PREEMPTED, State.PAUSED}


def test_nothing_follows_a_final_state():
    for final in set(State) - LIVE:
        assert final.is_final
        assert not [s for s in State if states.can_become(final, s)]
        for target, writer in itertools.product(State, Writer):
            assert final not in states.sources(target, writer)
            assert final not in states.retake_sources(target, writer)


def test_every_live_state_can_still_end():
    for live in LIVE:
        assert not live.is_final
        assert states.can_become(live, State.ABORTED)
        assert states.can_become(live, State.ERROR)


@pytest.mark.parametrize("waiting", [State.PREEMPTED, State.PAUSED])
def test_whatever_ends_a_running_request_may_end_it_just_after_it_lost_its_blocks(waiting):
    for target in set(State) - LIVE:
        sources = states.sources(target, Writer.SCHEDULER)
        assert (State.RUNNING in sources) == (waiting in sources)


def test_each_transition_has_one_writer():
    for target in State:
        by_writer = [states.sources(target, writer) for writer in Writer]
        assert not frozenset.intersection(*by_writer)
        assert frozenset.union(*by_writer)


def test_the_router_admits_and_the_scheduler_runs():
    routers = {s for s in State if states.writes(s, Writer.ROUTER)}
    assert routers >= {State.QUEUED, State.REJECTED, State.EXPIRED, State.DISPATCHED}
    ends = {State.REJECTED, State.EXPIRED, State.ABORTED, State.ERROR, State.STOPPED}
    assert routers <= LIVE | ends
    before = {State.DISPATCHED, State.PREEMPTED, State.PAUSED}
    assert states.sources(State.RUNNING, Writer.SCHEDULER) == before
    assert not states.writes(State.RUNNING, Writer.ROUTER)
    assert not states.writes(State.EXPIRED, Writer.SCHEDULER)


@pytest.mark.parametrize("target", [State.QUEUED, State.DISPATCHED])
def test_only_the_router_takes_a_live_request_back(target):
    assert states.retake_sources(target, Writer.ROUTER) == LIVE
    assert not states.retake_sources(target, Writer.SCHEDULER)


def test_a_running_request_is_not_taken_back_within_its_epoch():
    assert State.RUNNING not in states.sources(State.DISPATCHED, Writer.ROUTER)
