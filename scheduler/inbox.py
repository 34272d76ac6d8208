"""What others tell an engine, brought to its core between two steps, in the order of its coming.

A long prompt is hashed here first, a slice at a time, so that no step waits for it.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from scheduler import intake
from scheduler.core.plan import FinishedRequest, NewRequest, RequestStatus
from scheduler.core.scheduler import SchedulerCore
from scheduler.requests import LiveRequest
from scheduler.switchboard import Switchboard
from scheduler.worker import WorkerInfo


@dataclass(frozen=True, slots=True)
class Cancel:
    """End a request; nothing happens if it has ended."""

    request: LiveRequest
    status: RequestStatus


@dataclass(frozen=True, slots=True)
class Pausing:
    """Set a request aside or go on with it, as its is_paused says when this is read."""

    request: LiveRequest


Message = LiveRequest | Cancel | Pausing


class Inbox:
    """Messages that were not read yet, and long prompts that were not hashed yet.

    Owned by the loop of one engine.
    """

    def __init__(
        self,
        core: SchedulerCore,
        info: WorkerInfo,
        switchboard: Switchboard,
        *,
        clock: Callable[[], float],
        hashes_ahead: bool,
    ) -> None:
        """All arguments are the engine's."""
        self._core = core
        self._info = info
        self._switchboard = switchboard
        self._journal = switchboard.journal
        self._clock = clock
        self._hashes_ahead = hashes_ahead
        self._messages: deque[Message] = deque()
        # Oldest first.
        self._unhashed: dict[int, tuple[LiveRequest, NewRequest]] = {}

    @property
    def is_hashing(self) -> bool:
        """Whether a prompt is left to hash."""
        return bool(self._unhashed)

    def tell(self, message: Message) -> None:
        """A LiveRequest is one that is new here."""
        self._messages.append(message)

    def read(self) -> list[FinishedRequest] | None:
        """Bring every message to the core; who ended by that. None: there was no message."""
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
        """Hash a little of the oldest long prompt; True once the core has it."""
        key, (request, new_request) = next(iter(self._unhashed.items()))
        assert new_request.block_hashes is not None, "only such requests wait for it"
        if not new_request.block_hashes.advance(new_request.prompt_token_ids):
            return False
        del self._unhashed[key]
        self._give_to_core(request, new_request)
        return True

    def give_up(self) -> tuple[set[int], list[FinishedRequest]]:
        """Nothing is read any more: the keys that the core never had, and who was cancelled."""
        not_in_core = set(self._unhashed)
        ended: dict[int, FinishedRequest] = {}
        for message in self._messages:
            match message:
                case Cancel(request, status):
                    # The first to cancel it says how it ended.
                    ended.setdefault(request.key, intake.unscheduled_end(request, status))
                case LiveRequest(key=key):
                    not_in_core.add(key)
        self._messages.clear()
        return not_in_core, list(ended.values())

    def _abort(self, request: LiveRequest, status: RequestStatus) -> FinishedRequest | None:
        """How it ended just now; None if it had ended."""
        if self._unhashed.pop(request.key, None) is not None:
            return intake.unscheduled_end(request, status)
        return self._core.abort(request.key, status)

    def _add(self, request: LiveRequest) -> FinishedRequest | None:
        """Give it to the core; how it ended if there is nothing left to do."""
        generated = request.generated_token_ids
        end = intake.end_reached(
            request.submission, generated, self._info, self._core.config.max_num_tokens
        )
        if end is not None:
            self._journal.admitted(request, 0, self._info.worker_id)
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
        """Bring the core to what is wanted; it knows no request that has ended or is not hashed."""
        if not request.is_paused:
            self._core.continue_request(request.key)
        elif self._core.pause_request(request.key):
            self._journal.paused(request)
            # What it held is free, whether or not there is anything else to run.
            self._switchboard.bell.ring()
