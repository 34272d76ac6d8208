"""The requests that wait in a scheduler, and why, for people who look at the queue."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from scheduler.core.plan import StepFacts, WaitReason
from scheduler.core.scheduler import SchedulerCore
from scheduler.requests import LiveRequest

NEXT_STEP = "next_step"
NO_WORKER = "no_worker"


class Waiting(NamedTuple):
    """A request without a row.

    reason is a lower-case WaitReason, "next_step" (no step was planned since the request came), or
    "no_worker".

    num_tokens are the prompt's and those generated before. The blocks are 0 unless the reason is
    about blocks.
    """

    request: LiveRequest
    reason: str
    num_tokens: int
    worker_id: str = ""
    num_needed_blocks: int = 0
    num_free_blocks: int = 0


def waiting(
    core: SchedulerCore, requests: Mapping[int, LiveRequest], facts: StepFacts, worker_id: str
) -> Iterator[Waiting]:
    """The requests of a worker that hold no row, in order; those not in the core yet are last.

    Args:
        core: the worker's.
        requests: the worker's, by key.
        facts: of the last plan. Requests that it says nothing of are behind the head, if it left
            one waiting.
        worker_id: the worker's.
    """
    state, queues = core.state, core.state.queues
    behind = _word(WaitReason.BEHIND_HEAD) if facts.passed_over else NEXT_STEP
    fact_by_key = {fact.key: fact for fact in facts.passed_over}
    for waiting_request in (*queues, *queues.paused.values()):
        if (request := requests.get(waiting_request.key)) is None:
            continue  # the end is being published
        num_tokens, fact = len(waiting_request.token_ids), fact_by_key.get(request.key)
        if request.is_paused:
            yield Waiting(request, _word(WaitReason.CLIENT), num_tokens, worker_id)
        elif fact is None:
            yield Waiting(request, behind, num_tokens, worker_id)
        else:
            blocks = (fact.num_needed_blocks, fact.num_free_blocks)
            yield Waiting(request, _word(fact.reason), num_tokens, worker_id, *blocks)
    for key, request in requests.items():
        if key not in state.requests:
            reason = _word(WaitReason.CLIENT) if request.is_paused else NEXT_STEP
            yield Waiting(request, reason, request.num_tokens, worker_id)


def _word(reason: WaitReason) -> str:
    return reason.name.lower()
