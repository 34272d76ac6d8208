"""What is to be told to a scheduler, in messages of a size that any service takes.

A scheduler reads a message's submissions before the rest. So what is about a submission is in its
message or a later one, and a submission whose id is used again is in a later message than the end
of the request that had the id before: that one would else still be there, and refuse it.
"""

from collections import deque
from dataclasses import dataclass, field

from headrace.v1 import scheduler_pb2

# Of prompts in one message; well below what any service takes, so that a burst of long ones does
# not become a message that is refused again and again.
_MAX_MESSAGE_BYTES = 2 * 1024 * 1024


@dataclass(slots=True)
class _Draft:
    message: scheduler_pb2.RouterMessage = field(default_factory=scheduler_pb2.RouterMessage)
    num_bytes: int = 0
    ended_ids: set[str] = field(default_factory=set)


class SchedulerOutbox:
    """Messages that wait to be written, the next first."""

    def __init__(self) -> None:
        self._drafts: deque[_Draft] = deque()

    def __len__(self) -> int:
        return len(self._drafts)

    def submit(self, submission: scheduler_pb2.Submission) -> None:
        """A request for a worker."""
        num_bytes = len(submission.prompt_token_ids) + len(submission.generated_token_ids)
        draft = self._last()
        is_full = draft.num_bytes > 0 and draft.num_bytes + num_bytes > _MAX_MESSAGE_BYTES
        if is_full or submission.request_id in draft.ended_ids:
            draft = _Draft()
            self._drafts.append(draft)
        draft.message.submissions.append(submission)
        draft.num_bytes += num_bytes

    def cancel(self, request_id: str, cancellation: scheduler_pb2.Cancellation) -> None:
        """The end of a request that was submitted."""
        draft = self._last()
        draft.message.cancellations.append(cancellation)
        draft.ended_ids.add(request_id)

    def pause(self, pause: scheduler_pb2.Pause) -> None:
        """A request that was submitted is set aside, or goes on."""
        self._last().message.pauses.append(pause)

    def take(self) -> scheduler_pb2.RouterMessage:
        """The next message; there must be one."""
        return self._drafts.popleft().message

    def clear(self) -> None:
        """Forget everything."""
        self._drafts.clear()

    def _last(self) -> _Draft:
        if not self._drafts:
            self._drafts.append(_Draft())
        return self._drafts[-1]
