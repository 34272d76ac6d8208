"""Which waiting requests are dispatched now, and to which worker.

The queue is walked in its order. A request that has to wait reserves the workers that could hold it
against all requests behind it. So no request takes the credit that an earlier request waits for: a
huge request is overtaken only at workers that are too small for it, and never starves; a small
request waits behind a huge request only for workers that can serve both. Queues of other models are
not affected. At most MAX_PASSED_OVER requests are skipped in a round, so that a round stays short:
behind more skipped requests than that, a request waits even if another worker could take it.
"""

from collections.abc import Callable, Iterator
from typing import TypeVar

from router.core.model_queue import ModelQueue
from router.core.placement import Need, WorkerKey, WorkerPool

MAX_PASSED_OVER = 32

T = TypeVar("T")


def turns(
    queue: ModelQueue[T], pool: WorkerPool, need_of: Callable[[T], Need], now: float
) -> Iterator[tuple[T, Need, WorkerKey | None]]:
    """The requests to dispatch, with their need and worker; None: no ready worker can hold it.

    The caller removes each request from the queue before it asks for the next one.
    """
    closed: set[WorkerKey] = set()
    num_passed_over = 0
    try:
        while queue and (item := queue.peek()) is not None:
            need = need_of(item)
            worker = pool.choose(need, now, closed)
            if worker is not None:
                yield item, need, worker
                continue
            holders = pool.holders(need, now)
            num_ready = len(pool.ready(need.model, now))
            if num_ready and not holders:
                yield item, need, None
                continue
            closed |= holders
            num_passed_over += 1
            if len(closed) == num_ready or num_passed_over > MAX_PASSED_OVER:
                break
            queue.pass_over()
    finally:
        if num_passed_over:
            # Also when the caller raised an exception: the queue must not lose these requests.
            queue.put_back()
