"""The journal: what the store is to keep of each request's tokens, in pieces and in order.

Nothing is collected on the token path. The store's writer asks for what is new; a column says which
requests have new tokens, and whoever has a request has its tokens. Only the tokens of a request
that ends are copied, at its end.
"""

import logging
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, cast

from headrace.service.columns import pack_int32
from headrace.status.records import Tokens, Update
from scheduler.core.plan import Int32Array
from scheduler.requests import LiveRequest, LiveRequestTable
from scheduler.updates import NewLogprobs

logger = logging.getLogger(__name__)

# One call of `take` blocks the event loop for less than a millisecond.
_MAX_TAKEN = 128
# Ended requests that wait for the store, and ended requests that the store may ask for again.
_MAX_ENDED = 20_000
_MAX_KEPT = 1_000
_MAX_ENDED_TOKENS = 16_000_000
_MAX_KEPT_TOKENS = 2_000_000
# Log probabilities that wait for the store; beyond that they are not kept.
_MAX_LOGPROBS = 100_000


class _Message(Protocol):
    """The wire's message of log probabilities."""

    def SerializeToString(self) -> bytes: ...  # noqa: N802 protobuf names it so


@dataclass(slots=True)
class _Logprobs:
    """Log probabilities of one request that were not taken; is_lost: they have a gap for good."""

    tokens: list[object] = field(default_factory=list)
    prompt_tokens: list[object] = field(default_factory=list)
    is_lost: bool = False


@dataclass(frozen=True, slots=True)
class _Ended:
    """An ended request: its final update, all its tokens, and how many of them were taken."""

    update: Update
    token_ids: Int32Array
    num_taken: int
    logprobs: _Logprobs | None


class TokenJournal:
    """A JournalSource over the live requests and those that ended lately."""

    def __init__(self, requests: LiveRequestTable) -> None:
        self._requests = requests
        self._logprobs: dict[int, _Logprobs] = {}
        self._num_logprobs = 0
        self._ended: OrderedDict[int, _Ended] = OrderedDict()
        self._num_ended_tokens = 0
        self._kept: OrderedDict[str, _Ended] = OrderedDict()
        self._num_kept_tokens = 0
        # The slot from which `take` looks for new tokens, so that every request has its turn.
        self._next_slot = 0

    def note_logprobs(self, logprobs: Sequence[NewLogprobs]) -> None:
        """Note log probabilities of tokens that were published."""
        for new in logprobs:
            waiting = self._logprobs.setdefault(new.request.key, _Logprobs())
            if waiting.is_lost:
                continue
            waiting.tokens.extend(new.tokens)
            waiting.prompt_tokens.extend(new.prompt_tokens)
            self._num_logprobs += len(new.tokens) + len(new.prompt_tokens)
            if self._num_logprobs > _MAX_LOGPROBS:
                self._lose(waiting)

    def ended(self, request: LiveRequest, update: Update, token_ids: Int32Array) -> None:
        """Note a request's end; token_ids is [num_tokens], all that the request generated."""
        num_generated = self._requests.num_generated(request)
        num_taken = min(self._requests.num_journaled(request), num_generated)
        if num_taken and not request.submission.wants_logprobs:
            # At least one token is written before the end: the store then asks for what it lacks.
            num_taken = min(num_taken, num_generated - 1)
        ended = _Ended(
            update,
            token_ids[:num_generated].copy(),
            num_taken,
            self._logprobs.pop(request.key, None),
        )
        self._ended[request.key] = ended
        self._num_ended_tokens += len(ended.token_ids)
        while len(self._ended) > _MAX_ENDED or self._num_ended_tokens > _MAX_ENDED_TOKENS:
            _, oldest = self._ended.popitem(last=False)
            self._num_ended_tokens -= len(oldest.token_ids)
            name = oldest.update.request_id
            text = "journal of %s: the store is away too long"
            logger.warning(text, name, extra={"request_id": name})

    def forget(self, request: LiveRequest) -> None:
        """Keep nothing of a request that ends here and goes on elsewhere."""
        if (waiting := self._logprobs.pop(request.key, None)) is not None:
            self._lose(waiting)

    def take(self) -> Sequence[Tokens | Update]:
        """See JournalSource; a bounded part of what is new."""
        items: list[Tokens | Update] = []
        while self._ended and len(items) < _MAX_TAKEN:
            _, ended = self._ended.popitem(last=False)
            self._num_ended_tokens -= len(ended.token_ids)
            items += self._last_items(ended)
        if len(items) < _MAX_TAKEN:
            items += self._new_pieces(_MAX_TAKEN - len(items))
        return items

    def again(self, request_id: str, epoch: int, position: int) -> Tokens | None:
        """See JournalSource; without log probabilities, which are not kept."""
        request = self._requests.find(request_id)
        if request is not None and request.submission.epoch == epoch:
            self._lose(self._logprobs.setdefault(request.key, _Logprobs()))
            return self._piece(request, position)
        kept = self._kept.get(request_id)
        if kept is None or kept.update.epoch != epoch or position >= len(kept.token_ids):
            return None
        return _last_piece(kept.update, position, kept.token_ids[position:])

    def _new_pieces(self, max_num: int) -> list[Tokens]:
        requests, self._next_slot = self._requests.to_journal(self._next_slot, max_num)
        pieces = [self._piece(r, self._requests.num_journaled(r)) for r in requests]
        return [piece for piece in pieces if piece is not None]

    def _piece(self, request: LiveRequest, position: int) -> Tokens | None:
        """A live request's tokens from a position on; they are taken with that."""
        num_generated = self._requests.num_generated(request)
        token_ids = request.owner.output_token_ids(request, position)
        if token_ids is None:
            return None
        self._requests.note_journaled(request, num_generated)
        submission = request.submission
        logprobs, prompt_logprobs = self._take_logprobs(self._logprobs.get(request.key))
        return Tokens(
            request_id=submission.request_id,
            epoch=submission.epoch,
            create_time_unix_s=submission.arrival_time or None,
            position=position,
            token_ids=pack_int32(token_ids),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )

    def _last_items(self, ended: _Ended) -> list[Tokens | Update]:
        """The last tokens and the final update of a request that ended."""
        self._keep(ended)
        logprobs, prompt_logprobs = self._take_logprobs(ended.logprobs)
        token_ids = ended.token_ids[ended.num_taken :]
        if not len(token_ids):
            return [ended.update]
        piece = _last_piece(ended.update, ended.num_taken, token_ids, logprobs, prompt_logprobs)
        return [piece, ended.update]

    def _keep(self, ended: _Ended) -> None:
        request_id = ended.update.request_id
        older = self._kept.pop(request_id, None)
        self._num_kept_tokens -= 0 if older is None else len(older.token_ids)
        self._kept[request_id] = ended
        self._num_kept_tokens += len(ended.token_ids)
        while len(self._kept) > _MAX_KEPT or self._num_kept_tokens > _MAX_KEPT_TOKENS:
            _, oldest = self._kept.popitem(last=False)
            self._num_kept_tokens -= len(oldest.token_ids)

    def _take_logprobs(self, waiting: _Logprobs | None) -> tuple[Sequence[bytes], Sequence[bytes]]:
        if waiting is None or waiting.is_lost:
            return (), ()
        taken = _encoded(waiting.tokens), _encoded(waiting.prompt_tokens)
        self._drop(waiting)
        return taken

    def _lose(self, waiting: _Logprobs) -> None:
        """Keep no more log probabilities of a request: the store can only take all of them."""
        waiting.is_lost = True
        self._drop(waiting)

    def _drop(self, waiting: _Logprobs) -> None:
        self._num_logprobs -= len(waiting.tokens) + len(waiting.prompt_tokens)
        waiting.tokens, waiting.prompt_tokens = [], []


def _last_piece(
    update: Update,
    position: int,
    token_ids: Int32Array,
    logprobs: Sequence[bytes] = (),
    prompt_logprobs: Sequence[bytes] = (),
) -> Tokens:
    return Tokens(
        request_id=update.request_id,
        epoch=update.epoch,
        create_time_unix_s=update.create_time_unix_s,
        position=position,
        token_ids=pack_int32(token_ids),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )


def _encoded(messages: Sequence[object]) -> Sequence[bytes]:
    return [cast("_Message", message).SerializeToString() for message in messages]
