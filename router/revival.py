"""The completions of a request, new or taken up again.

A request that was lost, moved or left is taken up in one way, wherever its tokens come from: each
completion begins with a prefix of its tokens, and the rest is generated. Tokens depend on seed and
position alone, so any prefix gives the same output. The text is rebuilt by reading all tokens;
what belongs to tokens that the caller has is dropped, and the rest is what the undisturbed call
would have sent.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from headrace.service.errors import ServiceError
from headrace.vocabulary import FinishReason
from router.outputs import CompletionFinish
from router.request import ClientCompletion, ClientRequest, Int32Array, Owner, Spec
from router.text.completion import CompletionText
from router.text.stop_strings import StopScanner, StopStrings
from router.text.tokenizer import TextTokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """What is known of a completion that is taken up, under this epoch.

    logprobs are encoded, one for each token from position first_logprob on; those of the last
    tokens may be missing. num_settled: tokens whose log probabilities the store surely has; None:
    those that are known. finish is as the scheduler gave it, and with it token_ids are complete.
    """

    epoch: int = 1
    token_ids: Sequence[int] = ()
    logprobs: Sequence[bytes] = ()
    first_logprob: int = 0
    prompt_logprobs: Sequence[bytes] = ()
    num_settled: int | None = None
    finish: CompletionFinish | None = None
    owner: Owner | None = None
    num_cached_tokens: int = 0

    @property
    def end_logprob(self) -> int:
        """The position after the last log probability."""
        return self.first_logprob + len(self.logprobs)

    def serves(self, spec: Spec, index: int, first_token: int) -> bool:
        """Whether all is known that belongs to the tokens from first_token on."""
        if spec.wants_prompt_logprobs and not (index or first_token or self.prompt_logprobs):
            return False
        if spec.num_logprobs is None or first_token >= len(self.token_ids):
            return True
        return first_token >= self.first_logprob and self.end_logprob >= len(self.token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """A request as it was admitted, and what is known of each completion; error is its failure."""

    spec: Spec
    prompt_token_ids: Int32Array
    prompt_text: str
    max_tokens: int
    arrived_unix_s: float
    pasts: Sequence[Past] = ()
    error: ServiceError | None = None


# For each completion, the position of the first token that a caller wants; raises ServiceError.
FirstTokens = Callable[[Origin], Sequence[int]]


def from_the_beginning(origin: Origin) -> Sequence[int]:
    """A caller that has received nothing."""
    return [0] * origin.spec.n


def remembered(request: ClientRequest) -> Origin:
    """A request of this router, to be taken up under the next epochs."""
    return Origin(
        spec=request.spec,
        prompt_token_ids=request.prompt_token_ids,
        prompt_text=request.prompt_text,
        max_tokens=request.max_tokens,
        arrived_unix_s=request.arrived_unix_s,
        pasts=[_remembered(completion) for completion in request.completions],
        error=request.error,
    )


def _remembered(completion: ClientCompletion) -> Past:
    finish, owner = completion.finish, completion.owner
    if finish is not None and completion.token_ids:
        stop = completion.request.spec.stop_by_token_id.get(completion.token_ids[-1])
        if finish.stop == stop:
            finish = replace(finish, stop=None)
    if completion.link is not None:
        owner = Owner(completion.link.scheduler_id, completion.worker_id)
    return Past(
        epoch=completion.epoch + 1,
        token_ids=completion.token_ids,
        logprobs=completion.logprobs,
        first_logprob=completion.num_streamed,
        prompt_logprobs=completion.prompt_logprobs,
        num_settled=completion.num_settled,
        finish=finish,
        owner=owner,
        num_cached_tokens=completion.num_cached_tokens,
    )


def revived_completions(
    request: ClientRequest,
    keys: Sequence[int],
    tokenizer: TextTokenizer,
    pasts: Sequence[Past],
    first_tokens: Sequence[int],
) -> list[ClientCompletion]:
    """The completions of a request that is taken up; first_tokens are what the caller wants.

    Those that have a finish are not to be generated.
    """
    texts = _Texts(request, tokenizer)
    completions = []
    for index, (key, past, first_token) in enumerate(zip(keys, pasts, first_tokens, strict=True)):
        known = _intact(request.spec, index, past, first_token)
        completion = ClientCompletion(request, index, key, texts.make(first_token), first_token)
        completion.epoch = known.epoch
        completion.owner = known.owner
        completion.num_cached_tokens = known.num_cached_tokens
        completion.token_ids.extend(known.token_ids)
        completion.num_settled = len(known.token_ids)
        if known.finish is None:
            _read(completion, texts)
            completion.num_regenerated = len(past.token_ids) - len(completion.token_ids)
        else:
            completion.end(_read_to_end(completion, known.finish, texts))
        _keep_logprobs(completion, known)
        completions.append(completion)
    return completions


def _intact(spec: Spec, index: int, past: Past, first_token: int) -> Past:
    """The part of the past to begin with.

    The last token of a completion that has not ended is generated again: it may be what ended the
    completion, though no record says so.
    """
    if past.finish is not None and not past.finish.is_well:
        return _beginning(spec, past, first_token)
    num_tokens = len(past.token_ids)
    if not num_tokens and past.finish is None:
        return past
    if past.serves(spec, index, first_token):
        if past.finish is not None:
            return past
    elif index or first_token or past.prompt_logprobs or not spec.wants_prompt_logprobs:
        is_known = past.first_logprob <= first_token < past.end_logprob
        num_tokens = min(num_tokens, past.end_logprob if is_known else first_token)
    else:
        num_tokens = 0
    if spec.num_logprobs is not None:
        # The store keeps log probabilities without a gap, and only of tokens that are generated.
        num_settled = past.end_logprob if past.num_settled is None else past.num_settled
        num_tokens = min(num_tokens, num_settled)
    return replace(past, token_ids=past.token_ids[: max(0, num_tokens - 1)], finish=None)


def _beginning(spec: Spec, past: Past, first_token: int) -> Past:
    """What is known of a completion that was aborted, or ended otherwise before it was whole."""
    if spec.num_logprobs is None:
        return past
    is_known = past.first_logprob <= first_token < past.end_logprob
    return replace(past, token_ids=past.token_ids[: past.end_logprob if is_known else first_token])


def _read(completion: ClientCompletion, texts: "_Texts") -> None:
    """Look for stop strings in the tokens of a completion that has not ended.

    The token that completes a stop string is generated again, so that this end is found and
    recorded like any other.
    """
    if not completion.text.has_stops:
        return
    num_tokens, stop = completion.text.read(completion.token_ids)
    if stop is not None:
        del completion.token_ids[num_tokens - 1 :]
        completion.text = texts.make(completion.first_token)
        completion.text.read(completion.token_ids)


def _read_to_end(
    completion: ClientCompletion, finish: CompletionFinish, texts: "_Texts"
) -> CompletionFinish:
    """Read the tokens of a completion that has ended; returns how, as its text has it."""
    if not completion.text.has_stops:
        return finish
    spec, token_ids = completion.request.spec, completion.token_ids
    num_shown = len(token_ids) - (bool(token_ids) and spec.hides_last_token(finish))
    if finish.reason is FinishReason.STOP and finish.stop_token_id is None:
        # A scheduler calls both STOP: the end of the sequence, and the router's stop string.
        _, stop = texts.make(0).read(token_ids)
        num_shown = num_shown if stop is None else len(token_ids)
    num_tokens, stop = completion.text.read(token_ids[:num_shown])
    if stop is None:
        completion.text.skip(len(token_ids) - num_shown)
        return finish
    del token_ids[num_tokens:]
    return CompletionFinish(FinishReason.STOP, stop=stop)


def _keep_logprobs(completion: ClientCompletion, past: Past) -> None:
    """Keep what belongs to tokens that the caller wants."""
    begin, end = completion.first_token, len(completion.token_ids)
    completion.num_unwanted_logprobs = max(0, begin - end)
    if past.logprobs and begin < end:
        completion.logprobs.extend(
            past.logprobs[begin - past.first_logprob : end - past.first_logprob]
        )
    if not completion.index and not begin:
        completion.prompt_logprobs = past.prompt_logprobs


class _Texts:
    """Makes the texts of a request's completions."""

    def __init__(self, request: ClientRequest, tokenizer: TextTokenizer) -> None:
        self._spec = request.spec
        # Only the end of the prompt matters to the text that follows.
        self._prompt_end = request.prompt_token_ids[-64:].tolist()
        self._tokenizer = tokenizer
        self._stops = StopStrings(self._spec.stop) if self._spec.stop else None

    def make(self, num_unwanted: int) -> CompletionText:
        """A text that leaves out what belongs to the first num_unwanted tokens."""
        spec, scanner = self._spec, None
        if self._stops is not None:
            scanner = StopScanner(self._stops, includes_stop=spec.include_stop_str_in_output)
        return CompletionText(
            self._tokenizer.detokenizer(
                self._prompt_end, keep_special_tokens=spec.keep_special_tokens
            ),
            scanner,
            min_tokens=spec.min_tokens,
            has_offsets=spec.num_logprobs is not None,
            num_unwanted=num_unwanted,
        )
