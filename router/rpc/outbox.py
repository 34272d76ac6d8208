"""Messages for a scheduler, of a size that any service takes.

A scheduler reads the submissions of a message before the rest of the message. So a cancellation or
pause is in the message of its submission or a later message. A submission that uses an id again is
in a later message than the cancellation of the earlier request; otherwise the scheduler would still
have that request, and refuse the new one as a duplicate.
"""

from collections import deque
from dataclasses import dataclass, field

from headrace.v1 import scheduler_pb2

# Of prompts in one message; well below what any service takes, so that a burst of long prompts does
# not become a message that is refused again and again.
_MAX_MESSAGE_BYTES = 2 * 1024 * 1024


@dataclass(slots=True)
class _Draft:
    message: scheduler_pb2.RouterMessage = field(default_factory=scheduler_pb2.RouterMessage)
    num_bytes: int = 0
    ended_ids: set[str] = field(default_factory=set)


class SchedulerOutbox:
    """Messages that wait to be written, in order."""

    def __init__(self) -> None:
        self._drafts: deque[_Draft] = deque()

    def __len__(self) -> int:
        return len(self._drafts)

    def submit(self, submission: scheduler_pb2.Submission) -> None:
        """Add a submission."""
        num_bytes = len(submission.prompt_token_ids) + len(submission.generated_token_ids)
        draft = self._last()
        is_full = draft.num_bytes > 0 and draft.num_bytes + num_bytes > _MAX_MESSAGE_BYTES
        if is_full or submission.request_id in draft.ended_ids:
            draft = _Draft()
            self._drafts.append(draft)
        draft.message.submissions.append(submission)
        draft.num_bytes += num_bytes

    def cancel(self, request_id: str, cancellation: scheduler_pb2.Cancellation) -> None:
        """Add the cancellation of a submitted request."""
        draft = self._last()
        draft.message.cancellations.append(cancellation)
        draft.ended_ids.add(request_id)

    def pause(self, pause: scheduler_pb2.Pause) -> None:
        """Add the pause of a submitted request, or its end."""
        self._last().message.pauses.append(pause)

    def release(self, handle: int) -> None:
        """Add that a submitted request goes on elsewhere."""
        self._last().message.released.append(handle)

    def take(self) -> scheduler_pb2.RouterMessage:
        """Remove and return the next message; there must be one."""
        return self._drafts.popleft().message

    def clear(self) -> None:
        """Forget everything."""
        self._drafts.clear()

    def _last(self) -> _Draft:
        if not self._drafts:
            self._drafts.append(_Draft())
        return self._drafts[-1]
