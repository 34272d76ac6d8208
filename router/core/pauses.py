"""When a completion whose client does not read is paused, continued or ended.

A completion is paused when more than max_unread_tokens wait for its client, and continues when half
of them are read. In between nothing changes, so that a completion does not alternate with every
message. Tokens that were on their way when the pause began still come, which is a few steps' worth.
Many more mean that the scheduler ignores the pause; then the completion is ended, as it is after
max_pause_s of one pause. So at most a little more than twice the limit waits for one client.

Tokens are counted for their memory: a token takes 4 bytes, and about 250 bytes with the log
probabilities of twenty alternatives, so with log probabilities the limit is lower. Among many
streams, too: a limit is divided by the crowd, which is 1 until all streams together could hold more
than max_unread_tokens_in_all. The crowd decides when a completion is paused, not when it is ended:
no completion is ended because others arrived.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Generic, Literal, TypeVar

SlowClient = Literal["pause", "cut"]
T = TypeVar("T")

_TOKEN_BYTES = 4
# An encoded log probability of a waiting token, and each alternative in the encoding.
_LOGPROB_BYTES = 60
_ALTERNATIVE_BYTES = 9
# Tokens that a few steps, drafts included, may still bring after a pause began.
_MAX_TOKENS_ON_THEIR_WAY = 1024


class PauseVerdict(Enum):
    """What happens to a completion with unread tokens."""

    GO_ON = "GO_ON"
    PAUSE = "PAUSE"
    GIVE_UP = "GIVE_UP"


@dataclass(frozen=True, slots=True, kw_only=True)
class UnreadLimits:
    """How much may wait for clients; slow_client "cut" gives up where "pause" pauses.

    `limit` and `crowd` of the methods are the results of `of` and `crowd`.
    """

    slow_client: SlowClient = "pause"
    max_unread_tokens: int = 65_536
    max_unread_tokens_in_all: int = 4_194_304
    max_pause_s: float = 60.0

    def crowd(self, num_streams: int) -> int:
        """The divisor of limits while so many completions may have unread tokens."""
        return max(1, -(-num_streams * self.max_unread_tokens // self.max_unread_tokens_in_all))

    def of(self, num_logprobs: int | None) -> int:
        """Tokens of a completion that may wait for its client.

        num_logprobs: alternatives that come with each token; None: no log probabilities at all.
        """
        if num_logprobs is None:
            return self.max_unread_tokens
        token_bytes = _TOKEN_BYTES + _LOGPROB_BYTES + _ALTERNATIVE_BYTES * num_logprobs
        return max(1, self.max_unread_tokens * _TOKEN_BYTES // token_bytes)

    def verdict(
        self, num_unread: int, limit: int, *, is_paused: bool, crowd: int = 1
    ) -> PauseVerdict:
        """Whether to pause or end a completion with so many unread tokens."""
        if num_unread <= limit // crowd:
            return PauseVerdict.GO_ON
        if self.slow_client == "cut":
            return PauseVerdict.GIVE_UP
        if not is_paused:
            return PauseVerdict.PAUSE
        is_heeded = num_unread <= 2 * limit + _MAX_TOKENS_ON_THEIR_WAY
        return PauseVerdict.GO_ON if is_heeded else PauseVerdict.GIVE_UP

    @staticmethod
    def may_go_on(num_unread: int, limit: int, crowd: int = 1) -> bool:
        """Whether the client of a paused completion has read enough."""
        return num_unread <= limit // crowd // 2


class Pauses(Generic[T]):
    """Paused completions by key, and since when; the caller is the only writer."""

    def __init__(self, max_pause_s: float) -> None:
        self._max_pause_s = max_pause_s
        # All pauses may last equally long, so they are overdue in the order in which they began.
        self._began_by_key: dict[int, tuple[float, T]] = {}

    def __len__(self) -> int:
        return len(self._began_by_key)

    def begin(self, key: int, item: T, now: float) -> None:
        """Begin a pause; the key must not be paused. Times only grow."""
        assert key not in self._began_by_key, f"{key} is paused already"
        self._began_by_key[key] = (now, item)

    def end(self, key: int, now: float) -> float:
        """End a pause; returns its duration in seconds, 0 if the key was not paused."""
        entry = self._began_by_key.pop(key, None)
        return 0.0 if entry is None else now - entry[0]

    def due(self, now: float) -> list[T]:
        """The items paused for too long; they stay paused until `end`."""
        found = []
        for began, item in self._began_by_key.values():
            if began + self._max_pause_s > now:
                break
            found.append(item)
        return found

    def next(self) -> float | None:
        """When the next item will have been paused for too long."""
        for began, _ in self._began_by_key.values():
            return began + self._max_pause_s
        return None
