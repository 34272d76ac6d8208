"""The requests that wait in the router, in order, and why each of them waits."""

import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from router.core.placement import Need, WorkerKey, WorkerPool
from router.core.turns import MAX_PASSED_OVER
from router.request import ClientCompletion

if TYPE_CHECKING:
    from router.router import Router

NO_WORKER = "no_worker"
NO_CREDIT = "no_credit"
BEHIND_HEAD = "behind_head"


def waiting(router: "Router", max_num: int) -> list[tuple[ClientCompletion, str]]:
    """At most max_num completions, with the reason; model after model, in order of the names."""
    found: list[tuple[ClientCompletion, str]] = []
    for model, queue in sorted(router.queue.by_model, key=lambda pair: pair[0]):
        completions = queue.in_order(max_num - len(found))
        reasons = _reasons(completions, model, router.pool, router.now())
        found.extend(zip(completions, reasons, strict=True))
    return found


def _reasons(
    completions: Sequence[ClientCompletion], model: str, pool: WorkerPool, now: float
) -> Iterator[str]:
    """As `turns` would find them: a request that has to wait reserves the workers it could use."""
    num_ready, closed = len(pool.ready(model, now)), set[WorkerKey]()
    for completion in completions[: MAX_PASSED_OVER + 1]:
        free = pool.holders(_need(completion), now) - closed
        closed |= free
        if not num_ready:
            yield NO_WORKER
        else:
            yield NO_CREDIT if free else BEHIND_HEAD
    rest = NO_WORKER if not num_ready else BEHIND_HEAD
    yield from itertools.repeat(rest, len(completions[MAX_PASSED_OVER + 1 :]))


def _need(completion: ClientCompletion) -> Need:
    request = completion.request
    max_tokens = request.max_tokens - len(completion.token_ids)
    return Need(request.spec.model, completion.num_tokens, max_tokens, request.prefix)
