"""How a stream goes on after a lost connection: when to try again, and what has come so far."""

import random
from dataclasses import dataclass, field, replace

import grpc

from headrace.connections import CANCELLED, UNREACHABLE, UnreachableError
from headrace.service.errors import ServiceError
from headrace.types import Delta

# The connection or the router is gone, or the router does not have the request any more; the
# request may go on.
_LOST = frozenset({UNREACHABLE, CANCELLED, "DRAINING", "CONTESTED"})
# What a router says that has just started, or that misses its store or scheduler for a moment.
_NOT_YET = frozenset({"STORE_UNAVAILABLE", "NO_READY_WORKER", "NOT_ADMITTED_YET"})
# The store may not know the last of a request yet, or another router may know more.
_UNKNOWN = frozenset({"UNKNOWN_REQUEST", "TOKENS_LOST"})
_UNKNOWN_FOR_S = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumePolicy:
    """When a stream whose connection is lost goes on, on the same router or another one.

    A stream is given up when it has been without a connection for timeout_s since the last token;
    0 never resumes. Between two tries the client waits for about first_backoff_s, then twice as
    long each time, up to max_backoff_s.
    """

    timeout_s: float = 60.0
    first_backoff_s: float = 0.1
    max_backoff_s: float = 2.0


class Outage:
    """Decides after each failed call of one stream whether and when there is another one."""

    def __init__(
        self, policy: ResumePolicy, num_routers: int, *, is_sent: bool, is_repeatable: bool = False
    ) -> None:
        """is_sent: a router may have the request already; is_repeatable: it can be sent again."""
        self._policy = policy
        self._is_repeatable = is_repeatable
        self._num_routers = num_routers
        self._is_sent = is_sent
        self._num_unsent = 0
        # No router knows the request any more: it is sent again.
        self.is_forgotten = False
        # Since the last news: failures in a row, the time without a connection, how many failures
        # said that nothing is known, and when the first of them did.
        self.num_failures = 0
        self._spent_s = 0.0
        self._num_unknown = 0
        self._unknown_at_s = 0.0

    def end(self) -> None:
        """There is news from the request."""
        self.num_failures = self._num_unknown = 0
        self._spent_s = 0.0

    def wait_s(self, error: ServiceError, lasted_s: float) -> float | None:
        """The time until the next call, on the next router; None: the error is final.

        lasted_s is how long the failed call lasted.
        """
        has_connected = not isinstance(error, UnreachableError) or error.has_connected
        if not self._is_sent and not has_connected:
            # No router has the request: each address is tried once, at once.
            self._num_unsent += 1
            return 0.0 if self._num_unsent < self._num_routers else None
        self._is_sent = True
        if not self._policy.timeout_s or not self._may_go_on(error):
            return None
        is_within = self.num_failures > 0
        if is_within and (lasted_s < self._policy.max_backoff_s or not has_connected):
            # A longer call was no outage: the request may have waited there for its turn.
            self._spent_s += lasted_s
        self.num_failures += 1
        wait_s = self._backoff_s(error)
        self._spent_s += wait_s
        return wait_s if self._spent_s <= self._policy.timeout_s else None

    def _may_go_on(self, error: ServiceError) -> bool:
        """Whether the request may still live behind this error."""
        if self.num_failures == 0:
            return error.reason in _LOST
        if error.reason in _UNKNOWN:
            if not self._num_unknown:
                self._unknown_at_s = self._spent_s
            self._num_unknown += 1
            has_asked_all = self._num_unknown > self._num_routers
            if has_asked_all and self._spent_s - self._unknown_at_s >= _UNKNOWN_FOR_S:
                self.is_forgotten = self._is_repeatable
                return self.is_forgotten
            return True
        is_busy = error.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        return (is_busy and error.retry_after_s is not None) or error.reason in _LOST | _NOT_YET

    def _backoff_s(self, error: ServiceError) -> float:
        policy = self._policy
        # Below the exponent 32 nothing overflows, and every policy has reached its maximum.
        longest = policy.first_backoff_s * 2.0 ** min(self.num_failures - 1, 32)
        # Jitter: the clients of a router that died come back one by one.
        wait_s = min(longest, policy.max_backoff_s) * random.uniform(0.5, 1.0)  # noqa: S311
        if self.num_failures < self._num_routers:
            # There is a router that has not failed; what this one asks for is not waited.
            return wait_s
        return max(wait_s, error.retry_after_s or 0.0)


@dataclass(slots=True)
class _Completion:
    """What has come of one completion."""

    num_tokens: int
    # Text of deltas without tokens since the last token: a resumed stream brings it again.
    text_since_token: str = ""
    repeated: str = ""
    is_finished: bool = False


@dataclass(slots=True)
class Received:
    """What has come of one request, and what of a resumed stream is new."""

    from_token: int = 0
    has_any: bool = False
    _by_index: dict[int, _Completion] = field(default_factory=dict)
    _has_prompt_logprobs: bool = False

    @property
    def num_tokens(self) -> int:
        """Tokens received, over all completions."""
        return sum(c.num_tokens - self.from_token for c in self._by_index.values())

    def positions(self) -> list[int]:
        """The next token wanted of each completion; of those after the last one, from_token."""
        num = max(self._by_index, default=-1) + 1
        return [self._completion(index).num_tokens for index in range(num)]

    def rewind(self) -> None:
        """The next delta is the first of a resumed stream."""
        for completion in self._by_index.values():
            completion.repeated = completion.text_since_token

    def take(self, delta: Delta) -> Delta | None:
        """The delta without what has come before; None when nothing is left.

        Raises:
            ServiceError: the tokens do not follow those that have come; STREAM_BROKEN.
        """
        self.has_any = True
        if delta.prompt_logprobs:
            if self._has_prompt_logprobs:
                delta = replace(delta, prompt_logprobs=())
            self._has_prompt_logprobs = True
        completion = self._completion(delta.index)
        if completion.is_finished:
            return _without_output(delta)
        if completion.repeated:
            delta = _without_repeated_text(delta, completion)
        if delta.token_ids:
            if delta.first_token_position != completion.num_tokens:
                raise _broken(delta, completion.num_tokens)
            completion.num_tokens += len(delta.token_ids)
            completion.text_since_token = ""
        else:
            completion.text_since_token += delta.text
        completion.is_finished = delta.finish_reason is not None
        return delta

    def _completion(self, index: int) -> _Completion:
        return self._by_index.setdefault(index, _Completion(self.from_token))


def _without_output(delta: Delta) -> Delta | None:
    """What a delta says of the whole request, if anything."""
    if delta.usage is None and not delta.prompt_logprobs:
        return None
    return Delta(
        request_id=delta.request_id,
        index=delta.index,
        first_token_position=delta.first_token_position,
        usage=delta.usage,
        prompt_logprobs=delta.prompt_logprobs,
    )


def _without_repeated_text(delta: Delta, completion: _Completion) -> Delta:
    repeated = completion.repeated
    num = min(len(repeated), len(delta.text))
    if delta.text[:num] != repeated[:num]:
        raise _broken(delta, completion.num_tokens)
    completion.repeated = repeated[num:]
    return replace(delta, text=delta.text[num:])


def _broken(delta: Delta, num_tokens: int) -> ServiceError:
    return ServiceError(
        grpc.StatusCode.DATA_LOSS,
        "STREAM_BROKEN",
        f"the stream of {delta.request_id} does not go on where it was: completion {delta.index} "
        f"has {num_tokens} tokens, and next came token {delta.first_token_position}; "
        "read the request from its beginning (`headrace resume`)",
    )
