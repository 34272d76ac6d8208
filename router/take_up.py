"""Requests that callers come back to: found here or in the store, claimed, and merged.

A request is claimed in the store by compare-and-set on its epoch before it is taken up, so of two
routers that want it at once, one comes first and the other takes the request over from it. Where
there is no store, or the store is away, a request is found in the router that has it. Nothing
awaits between the last look at the router and the return.
"""

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from headrace.service.errors import ServiceError
from headrace.status.records import Stored
from headrace.status.states import State
from headrace.status.store import StatusStore
from router import outcomes
from router.request import ClientRequest
from router.revival import FirstTokens, Origin, Past, from_the_beginning, remembered
from router.router import Router
from router.status_log import Identity
from router.text.tokenizer import ModelText, TextTokenizer

_MAX_TRIES = 8
_MAX_IN_DOUBT = 10_000
# A new call waits this long for the store to say whether it repeats an earlier call.
_REPEATED_TIMEOUT_S = 2.0
# The store learns the end of a request that ended here soon after the caller.
_END_TIMEOUT_S, _END_POLL_S = 2.0, 0.02


@dataclass(frozen=True, slots=True)
class _Found:
    """A request, and whether it was claimed for this router."""

    origin: Origin
    is_claimed: bool


class TakeUps:
    """Finds requests, and claims them for this router."""

    def __init__(
        self,
        router: Router,
        store: StatusStore,
        identity: Identity,
        models: Mapping[str, ModelText],
        *,
        decode: Callable[[Stored], Origin],
        body_of: Callable[[Stored], bytes],
    ) -> None:
        """decode raises the ServiceError that says why a stored request cannot be taken up."""
        self._models = models
        self._searches: set[asyncio.Task[_Found]] = set()
        self._router = router
        self._store = store
        self._identity = identity
        self.decode = decode
        self._body_of = body_of
        # Requests whose claim was not answered, with the epochs that it was to raise: the claim
        # may have come to the store, or may yet come.
        self.in_doubt: dict[str, tuple[int, ...]] = {}

    async def find(self, request_id: str, first_tokens: FirstTokens) -> Origin:
        """A request to take up at once, live or ended; raises NOT_FOUND for an unknown one."""
        search = asyncio.create_task(self._find(request_id, first_tokens))
        self._searches.add(search)
        search.add_done_callback(self._searches.discard)
        try:
            return (await asyncio.shield(search)).origin
        except asyncio.CancelledError:
            search.add_done_callback(self._abandon)
            raise

    def tokenizer(self, origin: Origin) -> TextTokenizer:
        """The tokenizer of a request's model."""
        return self._models[origin.spec.model].tokenizer

    def _abandon(self, search: "asyncio.Task[_Found]") -> None:
        """A caller that left while its request was claimed has left the request too."""
        if search.cancelled() or search.exception() is not None or not search.result().is_claimed:
            return
        origin = search.result().origin
        wanted, tokenizer = from_the_beginning(origin), self.tokenizer(origin)
        with (
            contextlib.suppress(asyncio.CancelledError, ServiceError),
            self._router.take_up(origin, wanted, tokenizer),
        ):
            raise asyncio.CancelledError

    async def _find(self, request_id: str, first_tokens: FirstTokens) -> "_Found":
        for _ in range(_MAX_TRIES):
            stored = await self._load(request_id, first_tokens)
            origin = None if stored is None else self._read(stored)
            if origin is None:
                origin = self._origin_here(request_id)
            if origin is None:
                raise self._unknown(request_id)
            first_tokens(origin)
            if self._here(request_id) is None:
                self._router.check_take_up(origin.spec.tenant)
            is_claimed = stored is not None and stored.is_live
            if stored is not None and is_claimed:
                stored = await self.claim(stored, State.QUEUED)
                if stored is None:
                    continue
            return _Found(self._merge(request_id, stored, first_tokens), is_claimed)
        raise outcomes.contested(request_id)

    async def find_repeated(
        self, request_id: str, body_sha256: bytes, first_tokens: FirstTokens
    ) -> Origin | None:
        """The request that a call repeats; None for a call with a new request.

        Raises ALREADY_EXISTS when another live request has the id.
        """
        stored = None
        if self._router.calls.get(request_id) is None:
            stored = await self._load_soon(request_id)
        if (reservation := self._router.calls.get(request_id)) is not None:
            if reservation.body_sha256 != body_sha256:
                if self._router.discard(reservation):
                    return None
                raise outcomes.duplicate(request_id)
            if reservation.request is None:
                raise outcomes.being_read(request_id)
            return await self.find(request_id, first_tokens)
        if stored is None:
            return None
        is_equal = bool(stored.spec) and self._body_of(stored) == body_sha256
        if stored.is_live and not is_equal:
            await self._wait_for_end(request_id)
            return None
        if not is_equal or not (stored.is_live or _has_ended_well(stored)):
            return None
        return await self._find_unless_lost(request_id, first_tokens)

    async def _wait_for_end(self, request_id: str) -> None:
        """Returns when the store knows that a request has ended; raises for one that goes on."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_END_TIMEOUT_S):
                while self._router.calls.has_ended(request_id):
                    await asyncio.sleep(_END_POLL_S)
                    stored = await self._load_soon(request_id)
                    if stored is None or not stored.is_live:
                        return
        raise outcomes.duplicate(request_id)

    async def _find_unless_lost(self, request_id: str, first_tokens: FirstTokens) -> Origin | None:
        """A request; None if the store lost output of it, which a repeated call generates again."""
        try:
            return await self.find(request_id, first_tokens)
        except ServiceError as error:
            if error.reason != outcomes.TOKENS_LOST:
                raise
            return None

    async def claim(
        self, stored: Stored, state: State, *, detail: str = "", is_recovery: bool = False
    ) -> Stored | None:
        """Claim a live request for this router; None: somebody else was faster."""
        try:
            return await self._store.claim(
                stored,
                state,
                router_id=self._identity.router_id,
                router_incarnation=self._identity.incarnation,
                detail=detail,
                is_recovery=is_recovery,
            )
        except ServiceError:
            if state is State.QUEUED and len(self.in_doubt) < _MAX_IN_DOUBT:
                self.in_doubt[stored.request_id] = stored.epochs
            raise

    def _unknown(self, request_id: str) -> ServiceError:
        """A request that neither this router nor the store knows, as far as can be told."""
        if self._store.is_configured and not self._store.is_durable:
            # Other routers may not have written their requests yet either.
            return outcomes.not_known_yet(request_id)
        return outcomes.unknown(request_id)

    def _here(self, request_id: str) -> ClientRequest | None:
        """The request, if it lives in this router."""
        reservation = self._router.calls.get(request_id)
        return None if reservation is None else reservation.request

    def _origin_here(self, request_id: str) -> Origin | None:
        request = self._here(request_id)
        return None if request is None else remembered(request)

    async def _load(self, request_id: str, first_tokens: FirstTokens) -> Stored | None:
        """What the store has, unless all that is needed is here and nobody can change it."""
        here = self._origin_here(request_id)
        if here is not None and (
            _is_served(here, first_tokens(here)) or not self._store.is_durable
        ):
            return None
        try:
            return await self._store.load(request_id)
        except ServiceError:
            if self._here(request_id) is None:
                raise
            return None

    async def _load_soon(self, request_id: str) -> Stored | None:
        """What the store has, if it answers; a new call does not depend on the store."""
        if not self._store.is_durable:
            return None
        try:
            async with asyncio.timeout(_REPEATED_TIMEOUT_S):
                return await self._store.load(request_id)
        except (ServiceError, TimeoutError):
            return None

    def _read(self, stored: Stored) -> Origin | None:
        """A stored request; None if it cannot be read, but lives here."""
        try:
            return self.decode(stored)
        except ServiceError:
            if self._here(stored.request_id) is None:
                raise
            return None

    def _merge(self, request_id: str, stored: Stored | None, first_tokens: FirstTokens) -> Origin:
        """What is known here and in the store, together."""
        here = self._origin_here(request_id)
        there = None if stored is None else self._read(stored)
        if here is None or there is None:
            origin = here or there
            if origin is None:
                raise outcomes.unknown(request_id)
            pasts = origin.pasts
        else:
            origin = here
            pairs = zip(here.pasts, there.pasts, first_tokens(here), strict=True)
            pasts = [
                _better(mine, theirs, origin, index, first_token)
                for index, (mine, theirs, first_token) in enumerate(pairs)
            ]
        if there is not None:
            _check_complete(there, pasts, first_tokens(origin))
        return replace(origin, pasts=pasts)


def _has_ended_well(stored: Stored) -> bool:
    well = {State.STOPPED, State.LENGTH_CAPPED, State.REPETITION}
    return all(completion.record.state in well for completion in stored.completions)


def _check_complete(there: Origin, pasts: Sequence[Past], first_tokens: Sequence[int]) -> None:
    """Raise if a completion has ended well, and not all of it is known."""
    for index, (ended, past, first_token) in enumerate(
        zip(there.pasts, pasts, first_tokens, strict=True)
    ):
        has_ended_well = ended.finish is not None and ended.finish.is_well
        if has_ended_well and not past.serves(there.spec, index, first_token):
            raise outcomes.tokens_lost(there.spec.request_id)


def _is_served(origin: Origin, first_tokens: Sequence[int]) -> bool:
    """Whether a request has ended, and all that the caller wants of it is known."""
    return all(
        past.finish is not None and past.serves(origin.spec, index, first_token)
        for index, (past, first_token) in enumerate(zip(origin.pasts, first_tokens, strict=True))
    )


def _better(mine: Past, theirs: Past, origin: Origin, index: int, first_token: int) -> Past:
    """What is known of a completion here and, once claimed, in the store."""
    mine_serves = mine.serves(origin.spec, index, first_token)
    if theirs.finish is not None:
        return mine if mine.finish is not None and mine_serves else theirs
    # The claim raised the epoch: a completion that has ended only here runs to its end again.
    mine = replace(mine, finish=None, epoch=max(mine.epoch, theirs.epoch))
    # A scheduler cannot add log probabilities to the store of tokens that it gets with a request.
    if mine_serves and origin.spec.num_logprobs is None and not origin.spec.wants_prompt_logprobs:
        return mine
    return replace(theirs, epoch=mine.epoch, owner=mine.owner)
