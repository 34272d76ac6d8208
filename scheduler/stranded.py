"""Requests whose worker is lost, until another worker takes them or their time is up."""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from headrace.vocabulary import RefusalReason
from scheduler import takeover
from scheduler.core.explain import RequestExplanation
from scheduler.core.plan import Int32Array, RequestStatus
from scheduler.engine import WorkerEngine
from scheduler.intake import unscheduled_end
from scheduler.past import nothing
from scheduler.requests import NO_ROUTER, LiveRequest
from scheduler.switchboard import Switchboard
from scheduler.updates import NotTaken, RequestEnd
from scheduler.waiting import NO_WORKER, Waiting

_CHECK_S = 0.1


@dataclass(frozen=True, slots=True)
class _Stranded:
    """A request whose worker was lost at since_s on the loop's clock."""

    request: LiveRequest
    since_s: float


class StrandedRequests:
    """Owns the requests that no worker has."""

    def __init__(
        self,
        find_engine: Callable[[LiveRequest], WorkerEngine | None],
        switchboard: Switchboard,
        *,
        timeout_s: float,
        clock: Callable[[], float],
    ) -> None:
        """find_engine: the engine to take a request, if any can; clock: seconds since the epoch."""
        self._find_engine = find_engine
        self._switchboard = switchboard
        self._timeout_s = timeout_s
        self._clock = clock
        self._requests: dict[int, _Stranded] = {}
        self._is_any = asyncio.Event()

    def __len__(self) -> int:
        return len(self._requests)

    def waiting(self) -> Iterator[Waiting]:
        """The requests, oldest first."""
        for stranded in self._requests.values():
            yield Waiting(stranded.request, NO_WORKER, stranded.request.num_tokens)

    def add(self, request: LiveRequest) -> None:
        """Own a request until `reassign` finds an engine."""
        request.owner = self
        since_s = asyncio.get_running_loop().time()
        self._requests[request.key] = _Stranded(request, since_s)
        self._is_any.set()

    def reassign(self) -> None:
        """Submit requests to engines that can serve them, oldest first."""
        for key, stranded in list(self._requests.items()):
            if (engine := self._find_engine(stranded.request)) is not None:
                del self._requests[key]
                engine.submit(stranded.request)

    def give_back(self, model: str) -> None:
        """Return requests of a model to their routers, unless an engine can serve them.

        A request without a router stays: nobody else would end it.
        """
        for stranded in list(self._requests.values()):
            request, submission = stranded.request, stranded.request.submission
            if request.connection == NO_ROUTER or submission.model not in {"", model}:
                continue
            if self._find_engine(request) is None:
                message = f"another scheduler drives the workers of model {model!r} now"
                refusal = NotTaken(submission.handle, RefusalReason.WORKER_LOST, message)
                takeover.give_back(self._switchboard, request, refusal)

    def cancel(self, request: LiveRequest, status: RequestStatus) -> None:
        """End a request."""
        if self._requests.pop(request.key, None) is not None:
            self.end(request, status)

    def end(self, request: LiveRequest, status: RequestStatus, message: str = "") -> None:
        """Publish the end of a request that no engine has."""
        facts = unscheduled_end(request, status)
        self._switchboard.publish(ends=[RequestEnd(request, facts, message)])

    def output_token_ids(self, request: LiveRequest, start: int = 0) -> Int32Array:
        """[num_tokens] of a request."""
        return request.generated_token_ids[start:]

    def explain(self, request: LiveRequest) -> RequestExplanation:
        """Nothing, until now: nothing is done with a request before a worker has it."""
        now = self._clock()
        return replace(nothing(request.submission.request_id), began=now, until=now)

    def set_paused(self, request: LiveRequest, *, is_paused: bool) -> None:
        """Pause or continue a request; the next worker's engine applies the state."""
        request.is_paused = is_paused

    async def run(self) -> None:
        """End requests whose deadline has passed, or for which no worker came in time."""
        while True:
            await self._is_any.wait()
            now, now_s = self._clock(), asyncio.get_running_loop().time()
            for key, stranded in list(self._requests.items()):
                deadline = stranded.request.submission.deadline
                if deadline is not None and deadline <= now:
                    self.cancel(stranded.request, RequestStatus.DEADLINE)
                elif now_s - stranded.since_s > self._timeout_s:
                    del self._requests[key]
                    message = "its worker is lost, no other came"
                    self.end(stranded.request, RequestStatus.ERROR, message)
            if self._requests:
                await asyncio.sleep(_CHECK_S)
            else:
                self._is_any.clear()
