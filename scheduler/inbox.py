"""Messages to an engine, applied to its core between two steps, in order of arrival.

A long prompt is hashed first, a slice at a time between steps, so that no step waits for the hash.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from scheduler import intake
from scheduler.core.plan import FinishedRequest, NewRequest, RequestStatus
from scheduler.core.scheduler import SchedulerCore
from scheduler.requests import LiveRequest
from scheduler.switchboard import Switchboard
from scheduler.worker import WorkerSpec


@dataclass(frozen=True, slots=True)
class Cancel:
    """End a request; no effect on a request that has ended."""

    request: LiveRequest
    status: RequestStatus


@dataclass(frozen=True, slots=True)
class Pausing:
    """Pause or continue a request, as request.is_paused says when the message is applied."""

    request: LiveRequest


Message = LiveRequest | Cancel | Pausing


class Inbox:
    """Messages not applied yet, and long prompts not hashed yet.

    Owned by the loop of one engine.
    """

    def __init__(
        self,
        core: SchedulerCore,
        info: WorkerSpec,
        switchboard: Switchboard,
        *,
        clock: Callable[[], float],
        hashes_ahead: bool,
    ) -> None:
        """All arguments are the engine's."""
        self._core = core
        self._info = info
        self._switchboard = switchboard
        self._log = switchboard.log
        self._clock = clock
        self._hashes_ahead = hashes_ahead
        self._messages: deque[Message] = deque()
        # Oldest first.
        self._unhashed: dict[int, tuple[LiveRequest, NewRequest]] = {}

    @property
    def is_hashing(self) -> bool:
        """Whether prompts are left to hash."""
        return bool(self._unhashed)

    def tell(self, message: Message) -> None:
        """Queue a message; a LiveRequest is a new request."""
        self._messages.append(message)

    def read(self) -> list[FinishedRequest] | None:
        """Apply every message to the core; the requests that ended by that. None: no message."""
        if not self._messages:
            return None
        ended = []
        while self._messages:
            facts = None
            match self._messages.popleft():
                case Cancel(request, status):
                    facts = self._abort(request, status)
                case Pausing(request):
                    self._pause_or_continue(request)
                case request:
                    facts = self._add(request)
            if facts is not None:
                ended.append(facts)
        return ended

    def hash_slice(self) -> bool:
        """Hash a slice of the oldest long prompt; True once the core has the request."""
        key, (request, new_request) = next(iter(self._unhashed.items()))
        assert new_request.block_hashes is not None, "only such requests wait for it"
        if not new_request.block_hashes.advance(new_request.prompt_token_ids):
            return False
        del self._unhashed[key]
        self._give_to_core(request, new_request)
        return True

    def give_up(self) -> tuple[set[int], list[FinishedRequest]]:
        """Drop all messages; the keys that the core never had, and the cancelled requests."""
        not_in_core = set(self._unhashed)
        ended: dict[int, FinishedRequest] = {}
        for message in self._messages:
            match message:
                case Cancel(request, status):
                    # The first cancellation says how the request ended.
                    ended.setdefault(request.key, intake.unscheduled_end(request, status))
                case LiveRequest(key=key):
                    not_in_core.add(key)
        self._messages.clear()
        return not_in_core, list(ended.values())

    def _abort(self, request: LiveRequest, status: RequestStatus) -> FinishedRequest | None:
        """End a request now; None if the request had ended before."""
        if self._unhashed.pop(request.key, None) is not None:
            return intake.unscheduled_end(request, status)
        return self._core.abort(request.key, status)

    def _add(self, request: LiveRequest) -> FinishedRequest | None:
        """Give a request to the core, or return its end if no token is left to generate."""
        generated = request.generated_token_ids
        end = intake.end_reached(request.submission, generated, self._info, self._core.config)
        if end is not None:
            self._log.admitted(request, 0, self._info, 0)
            return intake.unscheduled_end(request, end)
        new_request = intake.new_request(request, self._info, hashes_ahead=self._hashes_ahead)
        if new_request.block_hashes is None:
            self._give_to_core(request, new_request)
        else:
            self._unhashed[request.key] = (request, new_request)
        return None

    def _give_to_core(self, request: LiveRequest, new_request: NewRequest) -> None:
        self._core.add_request(new_request, self._clock())
        if request.is_paused:
            self._pause_or_continue(request)

    def _pause_or_continue(self, request: LiveRequest) -> None:
        """Set the request's pause state in the core, which ignores requests it does not have."""
        if not request.is_paused:
            self._core.continue_request(request.key)
        elif (num_lost := self._core.pause_request(request.key)) is not None:
            self._log.paused(request, num_lost)
            # Its blocks are free; routers learn that even if nothing else runs.
            self._switchboard.changes.notify()
