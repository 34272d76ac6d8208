"""Who of a line goes now, and where to.

The line is gone through in its order. Whoever has to wait closes the workers that could hold it
to all behind it. So nobody takes what one ahead of it waits for: a huge request is overtaken only
at workers that are too small for it, and never for ever; a small one waits behind it only for
workers that serve both. Lines of other models are not held up at all. At most MAX_PASSED_OVER
requests are passed over at a time, so that a turn stays short: behind more of them than that,
who could go elsewhere waits too.
"""

from collections.abc import Callable, Iterator
from typing import TypeVar

from router.core.line import Line
from router.core.placement import Need, WorkerKey, WorkerPool

MAX_PASSED_OVER = 32

T = TypeVar("T")


def turns(
    line: Line[T], pool: WorkerPool, need_of: Callable[[T], Need], now: float
) -> Iterator[tuple[T, Need, WorkerKey | None]]:
    """Each that goes, what it needs and its worker; None: no ready worker could ever hold it.

    The caller takes it out of the line before it asks for the next. All of a line are for one
    model.
    """
    closed: set[WorkerKey] = set()
    num_passed_over = 0
    try:
        while (item := line.peek()) is not None:
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
            line.pass_over()
    finally:
        # Also when the caller's own work on a request raised: the queue must not lose the others.
        line.put_back()
