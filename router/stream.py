"""The messages to a client: deltas of text and tokens, built when the client can read.

The reader of a scheduler's stream only appends token ids. The task that writes to the client turns
them into text, all that arrived since its last message at once: a client that reads slowly gets
fewer and larger messages, and delays no other client. Only the text of requests with stop strings
is made as tokens arrive (see `text.completion`).
"""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

from headrace.vocabulary import FinishReason
from router import outcomes
from router.outputs import CompletionFinish
from router.request import ClientCompletion, ClientRequest
from router.router import Router

# Tokens of one message, over all completions: gRPC clients take 4 MiB unless told otherwise.
_MAX_TOKENS = 32_768
_MAX_TOKENS_WITH_LOGPROBS = 4_096


@dataclass(frozen=True, slots=True)
class CompletionDelta:
    """New output of one completion; logprobs are encoded, one for each token or none at all."""

    index: int
    text: str
    token_ids: Sequence[int]
    first_token_position: int
    finish: CompletionFinish | None
    logprobs: Sequence[bytes]
    text_offsets: Sequence[int]


@dataclass(frozen=True, slots=True)
class UsageCounts:
    """Counts of a finished request."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    draft_tokens: int
    accepted_draft_tokens: int


@dataclass(frozen=True, slots=True)
class Reply:
    """One message to the client; usage is in the last."""

    deltas: Sequence[CompletionDelta]
    usage: UsageCounts | None
    prompt_logprobs: Sequence[bytes]


@dataclass(frozen=True, slots=True)
class RequestCost:
    """What a request cost, for its trailing metadata; times in seconds."""

    queue_s: float
    prefill_s: float
    decode_s: float
    paused_s: float
    cached_tokens: int
    num_preemptions: int
    is_durable: bool


async def replies(request: ClientRequest, router: Router) -> AsyncGenerator[Reply]:
    """Every message of a request, the last with usage; raises the request's error."""
    open_completions = list(request.completions)
    echo = request.prompt_text if request.spec.echo else ""
    first = request.completions[0]
    while open_completions:
        await request.news()
        if request.is_released:
            break
        deltas = []
        for completion in tuple(open_completions):
            delta = _take(completion, router, echo)
            if delta is not None:
                deltas.append(delta)
                if delta.finish is not None:
                    open_completions.remove(completion)
        if not deltas:
            continue
        if not open_completions and not request.num_completion_tokens:
            _raise_if_nothing_came(request)
        prompt_logprobs, first.prompt_logprobs = first.prompt_logprobs, ()
        usage = None if open_completions else _usage(request)
        yield Reply(deltas, usage, prompt_logprobs)
    if request.error is not None:
        raise request.error
    if request.spec.is_calls_deadline and not request.is_taken_up and _is_late(request):
        # The caller's own timer is about to report the same.
        raise outcomes.late(request.spec)


def cost_of(request: ClientRequest, router: Router) -> RequestCost:
    """Where a request's time went; a stage that was not reached took 0 s."""
    timeline = request.timeline
    ended = timeline.ended or router.now()
    admitted = timeline.admitted or ended
    first_token = timeline.first_token or ended
    return RequestCost(
        queue_s=max(0.0, admitted - timeline.arrived),
        prefill_s=max(0.0, first_token - admitted),
        decode_s=max(0.0, ended - first_token),
        paused_s=request.paused_s,
        cached_tokens=_cached_tokens(request),
        num_preemptions=request.num_preemptions,
        is_durable=router.is_durable and request.is_kept,
    )


def _take(completion: ClientCompletion, router: Router, echo: str) -> CompletionDelta | None:
    """A completion's output since the last call; None if there is none."""
    begin, finish = completion.num_streamed, completion.finish
    spec = completion.request.spec
    most = _MAX_TOKENS if spec.num_logprobs is None else _MAX_TOKENS_WITH_LOGPROBS
    if not completion.text.has_stops:
        if (timed := completion.request.detokenizing) is None:
            _read(completion, most // spec.n)
        else:
            timed.timed(lambda: _read(completion, most // spec.n))
    piece = completion.text.take(most // spec.n)
    end = begin + piece.num_tokens
    if end < len(completion.token_ids):
        # The remaining tokens, and the end, go into the next message.
        finish = None
        completion.request.wake()
    if begin == end and finish is None:
        return None
    logprobs = completion.logprobs[: piece.num_tokens]
    del completion.logprobs[: piece.num_tokens]
    completion.num_streamed = end
    if completion.is_paused:
        router.live.on_read(completion)
    text, text_offsets = piece.text, piece.text_offsets
    if echo:
        text = text if completion.has_echoed else echo + text
        completion.has_echoed = True
        text_offsets = [offset + len(echo) for offset in text_offsets]
    token_ids = completion.token_ids[begin:end]
    return CompletionDelta(completion.index, text, token_ids, begin, finish, logprobs, text_offsets)


def _read(completion: ClientCompletion, num_tokens: int) -> None:
    """Turn more of a completion's tokens into text; with stop strings that was done on arrival."""
    finish, begin = completion.finish, completion.text.num_read
    end = max(begin, completion.num_streamed) + num_tokens
    token_ids = completion.token_ids[begin:end]
    if finish is None or end < len(completion.token_ids):
        completion.text.read(token_ids)
        return
    is_hidden = bool(token_ids) and completion.request.spec.hides_last_token(finish)
    num_shown = len(token_ids) - is_hidden
    completion.text.read(token_ids[:num_shown])
    completion.text.skip(len(token_ids) - num_shown)
    completion.text.close()


def _raise_if_nothing_came(request: ClientRequest) -> None:
    """Raise for a request that failed or was late before its first token: it has no output."""
    if request.error is not None:
        raise request.error
    if _is_late(request):
        raise outcomes.late(request.spec)


def _is_late(request: ClientRequest) -> bool:
    return all(
        completion.finish is not None and completion.finish.reason is FinishReason.DEADLINE
        for completion in request.completions
    )


def _usage(request: ClientRequest) -> UsageCounts:
    return UsageCounts(
        len(request.prompt_token_ids),
        request.num_completion_tokens,
        _cached_tokens(request),
        request.num_draft_tokens,
        request.num_accepted_draft_tokens,
    )


def _cached_tokens(request: ClientRequest) -> int:
    return max(completion.num_cached_tokens for completion in request.completions)
