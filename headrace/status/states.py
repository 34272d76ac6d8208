"""The states of a request, and which service may write which transition.

Pure: `store` applies the table by compare-and-set.

An epoch counts how often a request was taken up. A transition keeps the epoch, with one exception:
a router that takes up or ends a live request (its scheduler is lost, or its router, or both) raises
the epoch. Later writes of the old scheduler are then refused. A later request that reuses the id
starts with no record and epoch 1; see `store`.
"""

from enum import StrEnum


class State(StrEnum):
    """The state of a request, as the client sees it."""

    QUEUED = "QUEUED"
    REJECTED = "REJECTED"
    EXPIRED = "EXPIRED"
    DISPATCHED = "DISPATCHED"
    RUNNING = "RUNNING"
    PREEMPTED = "PREEMPTED"
    PAUSED = "PAUSED"  # the client is not reading, or has read and the request waits to run
    STOPPED = "STOPPED"
    LENGTH_CAPPED = "LENGTH_CAPPED"
    REPETITION = "REPETITION"
    ABORTED = "ABORTED"
    ERROR = "ERROR"
    DEADLINE = "DEADLINE"

    @property
    def is_final(self) -> bool:
        """Whether the state is final."""
        return self not in _LIVE


class Writer(StrEnum):
    """The service that may write a transition."""

    ROUTER = "router"
    SCHEDULER = "scheduler"


_LIVE = frozenset({State.QUEUED, State.DISPATCHED, State.RUNNING, State.PREEMPTED, State.PAUSED})

# (from, to) -> the only writer of the transition within an epoch. from None: no record yet.
_TRANSITIONS: dict[tuple[State | None, State], Writer] = {
    (None, State.QUEUED): Writer.ROUTER,
    (None, State.REJECTED): Writer.ROUTER,
    (State.QUEUED, State.DISPATCHED): Writer.ROUTER,
    (State.QUEUED, State.EXPIRED): Writer.ROUTER,
    (State.QUEUED, State.ABORTED): Writer.ROUTER,
    (State.QUEUED, State.ERROR): Writer.ROUTER,
    # The router finds stop strings, and its scheduler may be lost before it has recorded one.
    (State.QUEUED, State.STOPPED): Writer.ROUTER,
    (State.DISPATCHED, State.RUNNING): Writer.SCHEDULER,
    # The router may find a stop string in tokens generated before the re-dispatch.
    (State.DISPATCHED, State.STOPPED): Writer.SCHEDULER,
    # A scheduler that has the request already goes on with it under the new epoch.
    (State.DISPATCHED, State.PREEMPTED): Writer.SCHEDULER,
    (State.DISPATCHED, State.PAUSED): Writer.SCHEDULER,
    (State.DISPATCHED, State.LENGTH_CAPPED): Writer.SCHEDULER,
    (State.DISPATCHED, State.REPETITION): Writer.SCHEDULER,
    (State.DISPATCHED, State.ABORTED): Writer.SCHEDULER,
    (State.DISPATCHED, State.ERROR): Writer.SCHEDULER,
    (State.DISPATCHED, State.DEADLINE): Writer.SCHEDULER,
    (State.RUNNING, State.PREEMPTED): Writer.SCHEDULER,
    (State.RUNNING, State.PAUSED): Writer.SCHEDULER,
    (State.RUNNING, State.STOPPED): Writer.SCHEDULER,
    (State.RUNNING, State.LENGTH_CAPPED): Writer.SCHEDULER,
    (State.RUNNING, State.REPETITION): Writer.SCHEDULER,
    (State.RUNNING, State.ABORTED): Writer.SCHEDULER,
    (State.RUNNING, State.ERROR): Writer.SCHEDULER,
    (State.RUNNING, State.DEADLINE): Writer.SCHEDULER,
    (State.PREEMPTED, State.RUNNING): Writer.SCHEDULER,
    # A token in flight at the preemption may end the request, and the router may find a stop
    # string in the tokens that came just before.
    (State.PREEMPTED, State.STOPPED): Writer.SCHEDULER,
    (State.PREEMPTED, State.LENGTH_CAPPED): Writer.SCHEDULER,
    (State.PREEMPTED, State.REPETITION): Writer.SCHEDULER,
    (State.PREEMPTED, State.ABORTED): Writer.SCHEDULER,
    (State.PREEMPTED, State.ERROR): Writer.SCHEDULER,
    (State.PREEMPTED, State.DEADLINE): Writer.SCHEDULER,
    (State.PAUSED, State.RUNNING): Writer.SCHEDULER,
    (State.PAUSED, State.STOPPED): Writer.SCHEDULER,
    (State.PAUSED, State.LENGTH_CAPPED): Writer.SCHEDULER,
    (State.PAUSED, State.REPETITION): Writer.SCHEDULER,
    (State.PAUSED, State.ABORTED): Writer.SCHEDULER,
    (State.PAUSED, State.ERROR): Writer.SCHEDULER,
    (State.PAUSED, State.DEADLINE): Writer.SCHEDULER,
}

# Transitions from any live state with a greater epoch, written only by the router: by the
# request's own router behind a lost scheduler, or by any router that claims the request.
_RETAKEN = frozenset({State.QUEUED, State.DISPATCHED, State.ABORTED, State.ERROR})
# What a router claims a request for: to take it up, or to end it.
CLAIMS = frozenset({State.QUEUED, State.ABORTED, State.ERROR})


def sources(target: State, writer: Writer) -> frozenset[State | None]:
    """States from which `writer` may change to `target` in the same epoch; None: no record."""
    return frozenset(
        source for (source, to), who in _TRANSITIONS.items() if to is target and who is writer
    )


def retake_sources(target: State, writer: Writer) -> frozenset[State]:
    """States from which `writer` may change to `target` by raising the epoch."""
    return _LIVE if writer is Writer.ROUTER and target in _RETAKEN else frozenset()


def writes(target: State, writer: Writer) -> bool:
    """Whether this writer may write `target` in any transition."""
    return bool(sources(target, writer))


def can_become(state: State, target: State) -> bool:
    """Whether `target` is reachable from `state` by transitions of any writers.

    Router and scheduler write on their own connections, so the scheduler's RUNNING can arrive
    before the router's DISPATCHED; such an update is early, not illegal.
    """
    return target in _FOLLOWERS[state]


def _followers(state: State) -> frozenset[State]:
    found: set[State] = set()
    frontier = {state}
    while frontier:
        frontier = {to for (source, to) in _TRANSITIONS if source in frontier} - found
        found |= frontier
    return frozenset(found)


_FOLLOWERS = {state: _followers(state) for state in State}
