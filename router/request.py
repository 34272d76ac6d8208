"""A live request and its completions: the parameters, the tokens so far, the end.

The Router owns a request and alone changes it; the stream that answers the client reads and removes
what has arrived. Sampling parameters and log probabilities are in the form of the wire, and pass
through unread.
"""

import asyncio
import hashlib
import struct
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from headrace.service.errors import ServiceError
from headrace.vocabulary import FinishReason
from router.core.fairness import Account
from router.core.placement import Sent
from router.core.prefix_index import Prefix
from router.metrics import Traffic
from router.outputs import CompletionFinish
from router.passage import Passage
from router.text.completion import CompletionText
from router.waker import Waker

Int32Array = NDArray[np.int32]
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """The validated parameters of a request.

    sampling is the message of the wire; other fields repeat the parts that the router looks at.
    prompt_field names the field that held the prompt, for errors. max_tokens None:
    default_max_tokens, or as many as fit where these are fewer or None. stop_by_token_id has the
    stop strings that are exactly a control token. num_logprobs None: no log probabilities;
    otherwise those of each token and of that many alternatives. is_calls_deadline: the deadline is
    the first gRPC call's own, so that caller expects its status. body_sha256 tells a repeated call;
    empty where the caller chose no id. goes_on: the request outlives its call; recovers_at_once:
    the request is finished whether or not somebody reads it.
    """

    request_id: str
    model: str
    sampling: object
    n: int = 1
    seed: int = 0
    prompt_field: str = "text"
    max_tokens: int | None = None
    default_max_tokens: int | None = None
    min_tokens: int = 0
    stop: Sequence[str] = ()
    stop_by_token_id: Mapping[int, str] = field(default_factory=dict)
    num_logprobs: int | None = None
    include_stop_str_in_output: bool = False
    echo: bool = False
    keep_special_tokens: bool = False
    priority: int = 0
    tenant: str = ""
    cache_salt: str = ""
    deadline_unix_s: float | None = None
    is_calls_deadline: bool = False
    traceparent: str = ""
    wants_prompt_logprobs: bool = False
    body_sha256: bytes = b""
    goes_on: bool = False
    recovers_at_once: bool = False

    def hides_last_token(self, finish: CompletionFinish) -> bool:
        """Whether the text leaves out the last token, because it is what stopped a completion."""
        if finish.reason is not FinishReason.STOP or finish.stop is not None:
            return False
        if finish.stop_token_id is None:
            return not self.keep_special_tokens
        return not self.include_stop_str_in_output


@dataclass(frozen=True, slots=True)
class Owner:
    """A worker of a scheduler, by the names that these give themselves."""

    scheduler_id: str
    worker_id: str


# Tokens are in the store after so many seconds, or the store is away.
_SETTLE_S = 5.0


class ClientCompletion:
    """One of a request's n completions.

    key stays the same for the completion's life. handle is new with each dispatch, so that updates
    for an older dispatch are recognized and skipped.
    """

    __slots__ = (
        "epoch", "finish", "first_token", "handle", "has_echoed", "index", "is_admitted",
        "is_paused", "key", "link", "logprobs", "losses", "max_unread_tokens", "num_cached_tokens",
        "num_dispatches", "num_regenerated", "num_repeated", "num_sent_tokens", "num_settled",
        "num_streamed", "num_unwanted_logprobs", "owner", "passage", "priority",
        "prompt_logprobs", "request", "request_id", "sent", "settling", "text", "token_ids",
    )  # fmt: skip

    def __init__(
        self,
        request: "ClientRequest",
        index: int,
        key: int,
        text: CompletionText,
        first_token: int = 0,
    ) -> None:
        """first_token is the position of the first generated token that the caller wants."""
        spec = request.spec
        self.request = request
        self.index = index
        self.key = key
        self.handle = 0
        self.priority = spec.priority  # as sent to the scheduler, aged
        self.request_id = spec.request_id if spec.n == 1 else f"{spec.request_id}#{index}"
        self.text = text
        self.epoch = 1
        self.owner: Owner | None = None  # where the request may still live
        self.link: SchedulerLink | None = None
        self.sent: Sent | None = None
        self.is_admitted = False
        self.is_paused = False  # until its client has read
        self.num_dispatches = 0
        self.losses: list[tuple[float, str]] = []  # when, and which scheduler was lost with it
        self.num_sent_tokens = 0  # how many of token_ids its scheduler got with it
        self.num_cached_tokens = 0
        self.token_ids = array("i")  # everything generated, over all epochs
        self.max_unread_tokens = 0  # set by the dispatcher
        self.first_token = first_token
        self.num_streamed = first_token  # how many of token_ids the caller or the stream has
        self.has_echoed = first_token > 0
        self.logprobs: list[bytes] = []  # encoded, one for each token not yet taken by the stream
        self.num_unwanted_logprobs = 0  # of tokens before first_token that are generated again
        self.prompt_logprobs: Sequence[bytes] = ()
        # With log probabilities: tokens that the store surely has, and (time, tokens) of the next.
        self.num_settled = 0
        self.settling = (0.0, 0)
        self.num_repeated = 0  # of token_ids that are generated again
        self.num_regenerated = 0  # left out of token_ids to be generated again, and counted before
        self.finish: CompletionFinish | None = None
        self.passage = Passage(request.timeline.arrived, is_taken_up=request.is_taken_up)

    @property
    def arrived_unix_s(self) -> float:
        """When the completion arrived; also what tells it from others that used its id before.

        Completions of one request must not tie: two completions of equal priority and arrival
        would preempt each other again and again.
        """
        return self.request.arrived_unix_s + self.index * 1e-6

    def settle(self, now: float) -> None:
        """Note at which time a completion with log probabilities had its tokens."""
        since, num_tokens = self.settling
        if now - since >= _SETTLE_S:
            self.num_settled, self.settling = num_tokens, (now, len(self.token_ids))

    def lose(self, scheduler_id: str, now: float) -> None:
        """Note that the completion's scheduler was lost, at a time on the router's clock."""
        request = self.request
        time_unix_s = request.arrived_unix_s + now - request.timeline.arrived
        self.losses.append((time_unix_s, scheduler_id))
        timeline = request.timeline
        admitted = timeline.admitted if self.is_admitted else None
        self.passage.lose(admitted, timeline.first_token if self.token_ids else None, now)
        if request.spec.num_logprobs is not None:
            self._rewind()

    def _rewind(self) -> None:
        """Let the last tokens, and their log probabilities, be generated again.

        The store may lack those of tokens that a lost scheduler gave last, and the next scheduler
        cannot give log probabilities of tokens that it does not generate.
        """
        num_tokens = len(self.token_ids)
        self.num_repeated = num_tokens - min(self.num_settled, num_tokens)
        self.num_unwanted_logprobs = max(0, self.first_token - num_tokens) + self.num_repeated

    @property
    def known_token_ids(self) -> "array[int]":
        """The tokens that a scheduler begins with."""
        return self.token_ids[: len(self.token_ids) - self.num_repeated]

    def end(self, finish: CompletionFinish) -> None:
        """Set how the completion ended, as its text has it.

        A stop string may be the token that ended the completion, or be completed by the end of
        the text.
        """
        spec, suffix = self.request.spec, ""
        if finish.reason is FinishReason.STOP and finish.stop is None and self.token_ids:
            stop = spec.stop_by_token_id.get(self.token_ids[-1])
            finish = replace(finish, stop=stop)
            if stop is not None and spec.include_stop_str_in_output:
                suffix = stop
        # Without stop strings the stream reads the tokens, and closes the text, when it sends it.
        if self.text.has_stops and (found := self.text.close(suffix)) is not None:
            finish = CompletionFinish(FinishReason.STOP, stop=found)
        self.finish = finish

    @property
    def seed(self) -> int:
        """The request's seed for the first completion; a hash of seed and index for the others."""
        seed = self.request.spec.seed
        if not self.index:
            return seed
        # Sums of the two would give requests with seeds side by side the same completions.
        digest = hashlib.blake2b(struct.pack("<QI", seed, self.index), digest_size=8).digest()
        return int.from_bytes(digest, "little")

    @property
    def flight(self) -> tuple["SchedulerLink", Sent]:
        """The link and the credit of a completion in flight."""
        assert self.link is not None, "what is in flight has a link"
        assert self.sent is not None, "what is in flight was sent"
        return self.link, self.sent

    @property
    def worker_id(self) -> str:
        """The worker that the completion was last sent to; "" before its first dispatch."""
        return self.sent.worker.worker_id if self.sent else ""

    @property
    def num_tokens(self) -> int:
        """Prompt and generated tokens."""
        return len(self.request.prompt_token_ids) + len(self.token_ids)

    @property
    def num_unread(self) -> int:
        """Tokens that were not sent to the client yet."""
        return len(self.token_ids) - self.num_streamed


@dataclass(slots=True)
class Timeline:
    """Times of a request's events, on the router's monotonic clock."""

    arrived: float
    queued: float = 0.0
    admitted: float | None = None
    first_token: float | None = None
    ended: float | None = None


@dataclass(slots=True)
class Detokenizing:
    """When the text of a traced request was made, in pieces, on the router's monotonic clock."""

    clock: Callable[[], float]
    began: float = 0.0
    ended: float = 0.0
    busy_s: float = 0.0
    num_times: int = 0

    def timed(self, work: Callable[[], T]) -> T:
        """Do a piece of the work."""
        began = self.clock()
        if not self.num_times:
            self.began = began
        done = work()
        self.ended = self.clock()
        self.busy_s += self.ended - began
        self.num_times += 1
        return done


@dataclass(slots=True, eq=False)
class ClientRequest:
    """A live request; error is set when the whole request failed. deadline is monotonic.

    is_taken_up: the request had begun before, in this router or another one. is_released: the
    request goes on elsewhere, and nothing more comes here. Without a reader, a request is paused
    when much of it is unread, unless runs_on is set. detokenizing: only of a traced request.
    """

    spec: Spec
    prompt_token_ids: Int32Array
    prompt_text: str
    max_tokens: int
    arrived_unix_s: float
    timeline: Timeline
    number: int
    account: Account
    waker: Waker
    traffic: Traffic = field(default_factory=Traffic)
    cache_salt: str = ""  # of its prefixes; see prefix_index.shared_salt
    prefix: Prefix = ()
    deadline: float | None = None
    completions: list[ClientCompletion] = field(default_factory=list)
    error: ServiceError | None = None
    is_kept: bool = True  # by a store that keeps requests at all
    is_taken_up: bool = False
    num_tokens_before: int = 0  # generated before the request was taken up here
    is_released: bool = False
    has_reader: bool = True
    runs_on: bool = False
    num_preemptions: int = 0
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    detokenizing: Detokenizing | None = None
    paused_s: float = 0.0  # of pauses that are over, summed up over all completions
    last_round: int = -1
    _waiter: "asyncio.Future[None] | None" = None
    _has_news: bool = False
    _is_due: bool = False

    @property
    def is_finished(self) -> bool:
        return all(completion.finish is not None for completion in self.completions)

    @property
    def num_recoveries(self) -> int:
        """How often the request was taken up again."""
        return max(completion.epoch for completion in self.completions) - 1

    @property
    def num_completion_tokens(self) -> int:
        return sum(len(completion.token_ids) for completion in self.completions)

    def wake(self) -> None:
        """Tell the stream that tokens or an end have arrived."""
        self._has_news = True
        if self._waiter is not None and not self._is_due:
            self._is_due = True
            self.waker.add(self)

    def deliver(self) -> None:
        """Let the stream continue; only the waker calls this."""
        self._is_due = False
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def news(self) -> None:
        """Wait until tokens or an end have arrived since the last call; one waiter at a time."""
        self._waiter = asyncio.get_running_loop().create_future()
        if self._has_news:
            # The stream takes its turn all the same, so that a busy stream does not starve others.
            self.wake()
        try:
            await self._waiter
        finally:
            self._waiter = None
        self._has_news = False


class SchedulerLink(Protocol):
    """The connection to a scheduler. Calls return at once, and messages keep their order."""

    @property
    def name(self) -> str:
        """The scheduler's address; stable."""
        ...

    @property
    def scheduler_id(self) -> str:
        """The name that the scheduler gives itself; "" until it has reported."""
        ...

    def submit(self, completion: ClientCompletion) -> None:
        """Send a completion to its worker, under the completion's handle and epoch."""
        ...

    def cancel(self, completion: ClientCompletion, finish: CompletionFinish) -> None:
        """Cancel a submitted completion, which ends like this."""
        ...

    def set_paused(self, handle: int, *, is_paused: bool) -> None:
        """Pause the completion that was sent under the handle, or let it continue."""
        ...

    def release(self, handle: int) -> None:
        """Say that the completion that was sent under the handle goes on elsewhere."""
        ...
