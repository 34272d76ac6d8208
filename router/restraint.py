"""Which completions are paused because too much of them is unread.

`core.pauses` has the rules. Nothing of a completion is paused or ended here: the dispatcher does
that.
"""

from collections.abc import Callable

from router.core.pauses import Pauses, PauseVerdict, UnreadLimits
from router.request import ClientCompletion, ClientRequest


class Restraint:
    """Counts the streams, and owns the pauses; the dispatcher is the only writer."""

    def __init__(self, limits: UnreadLimits, clock: Callable[[], float]) -> None:
        """clock is monotonic, in seconds."""
        self._limits = limits
        self._clock = clock
        self._pauses: Pauses[ClientCompletion] = Pauses(limits.max_pause_s)
        self.num_streams = 0  # completions that were dispatched and are not closed

    @property
    def num_paused(self) -> int:
        return len(self._pauses)

    @property
    def crowd(self) -> int:
        """What limits are divided by."""
        return self._limits.crowd(self.num_streams)

    def open(self, completion: ClientCompletion) -> None:
        """The completion is dispatched for the first time."""
        self.num_streams += 1
        completion.max_unread_tokens = self._limits.of(completion.request.spec.num_logprobs)

    def close(self, request: ClientRequest) -> None:
        """Nothing of the request waits for its client any more."""
        self.num_streams -= sum(c.num_dispatches > 0 for c in request.completions)

    def verdict(self, completion: ClientCompletion) -> PauseVerdict:
        """What to do with a completion that got tokens.

        A request without a reader is never ended here: how long it waits is another limit.
        """
        request, limit = completion.request, completion.max_unread_tokens
        if request.runs_on and not request.has_reader:
            return PauseVerdict.GO_ON
        is_paused, num_unread = completion.is_paused, completion.num_unread
        verdict = self._limits.verdict(num_unread, limit, is_paused=is_paused, crowd=self.crowd)
        if verdict is PauseVerdict.GIVE_UP and not request.has_reader:
            return PauseVerdict.GO_ON if is_paused else PauseVerdict.PAUSE
        return verdict

    def may_go_on(self, completion: ClientCompletion) -> bool:
        """Whether enough of a paused completion was read."""
        limit = completion.max_unread_tokens
        return self._limits.may_go_on(completion.num_unread, limit, self.crowd)

    def begin_pause(self, completion: ClientCompletion) -> None:
        """The completion is paused from now on."""
        completion.is_paused = True
        self._pauses.begin(completion.key, completion, self._clock())

    def end_pause(self, completion: ClientCompletion) -> None:
        """The completion is not paused any more, if it was."""
        completion.request.paused_s += self._pauses.end(completion.key, self._clock())
        completion.is_paused = False

    def overdue(self) -> list[ClientCompletion]:
        """The completions whose clients have let them be paused for too long."""
        due = self._pauses.due(self._clock())
        for completion in due:
            if not completion.request.has_reader:
                self.end_pause(completion)
                self.begin_pause(completion)
        return [completion for completion in due if completion.request.has_reader]

    def next_overdue(self) -> float | None:
        """When the next completion will have been paused for too long."""
        return self._pauses.next()

    def too_much(self, completion: ClientCompletion) -> str:
        """Why a completion is ended of which too much is unread."""
        limit = completion.max_unread_tokens // self.crowd
        return f"more than {limit} of its tokens are unread"

    @property
    def too_long(self) -> str:
        """Why a completion is ended that was paused for too long."""
        return f"paused for {self._limits.max_pause_s:g} s in one go"
