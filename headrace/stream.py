"""One request's stream of deltas, over as many calls as it takes."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

from opentelemetry.trace import Span, SpanKind

from headrace import messages
from headrace.connections import RouterChannel, Routers
from headrace.resuming import Outage, Received, ResumePolicy
from headrace.service import telemetry
from headrace.service.errors import ServiceError
from headrace.types import Delta

Tell = Callable[[str], None]

SERVICE = "headrace.v1.Inference"
_ABORT_TIMEOUT_S = 2.0
_MAX_ABORTED = 1000


class Ending:
    """Ends requests whose consumers leave: the end of a call does not end a request to resume."""

    def __init__(self, abort: Callable[[Sequence[str]], Awaitable[object]]) -> None:
        """abort is `HeadraceClient.abort`."""
        self._abort = abort
        self._open: set[str] = set()

    def open(self, request_id: str) -> None:
        """A stream begins."""
        self._open.add(request_id)

    async def close(self, request_id: str, *, is_over: bool) -> None:
        """A stream ends, before its request or after it."""
        if request_id in self._open:
            self._open.remove(request_id)
            if not is_over:
                await self._end([request_id])

    async def close_all(self) -> None:
        """The client is closed."""
        ids = sorted(self._open)
        self._open.clear()
        for begin in range(0, len(ids), _MAX_ABORTED):
            await self._end(ids[begin : begin + _MAX_ABORTED])

    async def _end(self, request_ids: Sequence[str]) -> None:
        with contextlib.suppress(ServiceError, TimeoutError):
            async with asyncio.timeout(_ABORT_TIMEOUT_S):
                await self._abort(request_ids)


class RequestStream:
    """Calls Generate, or Resume from where the stream was, until the request has ended."""

    def __init__(
        self,
        routers: Routers,
        policy: ResumePolicy,
        tell: Tell,
        received: Received,
        *,
        request_id: str,
        generate: Any = None,
        ending: Ending | None = None,
    ) -> None:
        """
        Args:
            routers: where to call.
            policy: when to go on after a loss.
            tell: called with a line for a person at each loss and return.
            received: where to begin.
            request_id: the request.
            generate: the GenerateRequest; None reads a request that exists.
            ending: ends the request, when the consumer leaves before its end.
        """
        self._routers = routers
        self._tell = tell
        self._received = received
        self._request_id = request_id
        self._generate = generate
        self._ending = ending
        self._outage = Outage(
            policy,
            len(routers),
            is_sent=generate is None,
            is_repeatable=generate is not None and generate.sampling.HasField("seed"),
        )
        self._lost_at_s = 0.0
        self._num_resumes = 0
        self._first_traceparent = ""

    async def deltas(self) -> AsyncGenerator[Delta, None]:
        """What has not come before; ServiceError when the request failed or cannot go on."""
        is_over = has_all = False
        if self._ending is not None:
            self._ending.open(self._request_id)
        try:
            while not is_over:
                router, began_s = self._routers.current, time.monotonic()
                try:
                    async with contextlib.aclosing(self._call(router)) as deltas:
                        async for delta in deltas:
                            if (new := self._take(delta)) is not None:
                                has_all = new.usage is not None
                                yield new
                    is_over = True
                except ServiceError as error:
                    is_over = (wait_s := self._lost(error, router, began_s)) is None
                    if wait_s is None:
                        raise self._final(error) from error.__cause__
                    await asyncio.sleep(wait_s)
        finally:
            if self._ending is not None:
                # Not over: the consumer left, by `break`, by an exception, or cancelled.
                await self._ending.close(self._request_id, is_over=is_over or has_all)

    async def _call(self, router: RouterChannel) -> AsyncGenerator[Delta, None]:
        """One call, traced, with errors mapped; cancelled when the consumer stops."""
        method, request = self._next_request()
        # Not made current: a generator shares its consumer's context between two yields.
        span = self._begin_span(method)
        call = None
        try:
            await router.connect()
            async with router.errors():
                metadata = telemetry.outgoing_metadata(span)
                call = getattr(router.stub, method)(request, metadata=metadata)
                async for response in call:
                    for delta in messages.to_deltas(response):
                        yield delta
        except BaseException as error:
            telemetry.note_error(span, error)
            raise
        finally:
            if call is not None:
                # Leaving `async for` does not end the call, not even when it is garbage.
                call.cancel()
            span.end()

    def _begin_span(self, method: str) -> Span:
        """The span of a call; that of a later call is linked to the first one's, in its trace."""
        first, parent = self._first_traceparent, None
        if first and not telemetry.current_traceparent():
            parent = first
        links = [first] if first else []
        span = telemetry.begin_span(
            f"{SERVICE}/{method}", parent, kind=SpanKind.CLIENT, links=links
        )
        self._first_traceparent = first or telemetry.traceparent_of(span)
        return span

    def _next_request(self) -> tuple[str, Any]:
        """The method to call, and with what."""
        # Generate with an id that lives attaches to the request, so it cannot begin twice.
        received = self._received
        if self._generate is not None and (self._outage.is_forgotten or not received.has_any):
            self._generate.from_token_by_index[:] = received.positions()
            return "Generate", self._generate
        return "Resume", messages.resume_request(
            self._request_id, received.from_token, received.positions()
        )

    def _take(self, delta: Delta) -> Delta | None:
        new = self._received.take(delta)
        if new is None:
            return None
        if self._outage.num_failures:
            self._outage.end()
            self._num_resumes += 1
            self._tell(f"resumed after {time.monotonic() - self._lost_at_s:.1f} s")
        return replace(new, num_resumes=self._num_resumes) if self._num_resumes else new

    def _lost(self, error: ServiceError, router: RouterChannel, began_s: float) -> float | None:
        """For how long to wait before the next call; None: the error is final."""
        if self._routers.is_closed:
            return None
        now_s = time.monotonic()
        wait_s = self._outage.wait_s(error, now_s - began_s)
        if wait_s is None:
            return None
        if self._outage.num_failures == 1:
            self._lost_at_s = now_s
            what = "lost the connection" if self._received.has_any else "no connection"
            self._tell(f"{what} to {router.address} ({error.reason}), resuming")
        self._routers.leave(router)
        self._received.rewind()
        return wait_s

    def _final(self, error: ServiceError) -> ServiceError:
        """The error for the caller, who may have seen a part of the answer."""
        if self._outage.num_failures == 0:
            return error
        return ServiceError(
            error.code,
            error.reason,
            f"the connection was lost after {self._received.num_tokens} tokens, and the request "
            f"did not go on: {error.message}",
            field=error.field,
            retry_after_s=error.retry_after_s,
        )
