"""The status of requests, in any server that speaks the Redis protocol (7.0 or newer).

Each request has one record, under a key that is hash-tagged by the request id. One script compares
and sets the record: it checks the state table and the epoch and sets the TTL in one step. An id
that is reused after its request has ended gets a new record. `states` decides which transition is
legal, and `write_behind` when an update is written.
"""

import logging
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from itertools import groupby
from operator import attrgetter
from typing import Any, Self, cast

import msgspec
import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import (
    AuthenticationError,
    AuthenticationWrongNumberOfArgsError,
    AuthorizationError,
    NoPermissionError,
    RedisError,
)

from headrace.service.errors import ServiceError, unavailable
from headrace.status import states
from headrace.status.records import Record, Update, Verdict, WriteOutcome
from headrace.status.states import State, Writer
from headrace.status.write_behind import Batch, WriteBehind

logger = logging.getLogger(__name__)

# Never retried: repeated attempts with a wrong password lock the account.
_CREDENTIAL_ERRORS = (
    AuthenticationError,
    AuthenticationWrongNumberOfArgsError,
    AuthorizationError,
    NoPermissionError,
)

# KEYS: the record. ARGV: its updates, in order, each as JSON: [state, epoch, create time or "",
# [field, value, ...]]. RULES is the state table in Lua. An update whose create time differs from
# the record's belongs to another request that reuses the id.
_SCRIPT = """
local BORN = 'create_time_unix_s'
local function judge(rule, target, new_epoch, new_born, state, epoch, born)
  if not state then return rule.creates and 'APPLIED' or 'EARLY' end
  if new_born and born and new_born ~= born then
    if new_born < born then return 'STALE' end
    if not rule.creates then return 'EARLY' end
    return (rule.takes_over or not LIVE[state]) and 'NEW' or 'ILLEGAL'
  end
  if new_epoch < epoch then return 'STALE' end
  if new_epoch > epoch then
    return rule.retakes[state] and 'APPLIED' or LIVE[state] and 'EARLY' or 'ILLEGAL'
  end
  if state == target then return 'REPEATED' end
  return rule.sources[state] and 'APPLIED' or rule.ahead[state] and 'EARLY' or 'ILLEGAL'
end
local key, answers = KEYS[1], {}
for i, update in ipairs(cjson.decode(ARGV[1])) do
  local target, new_epoch, new_born = update[1], update[2], tonumber(update[3])
  local state, epoch, born = unpack(redis.call('HMGET', key, 'state', 'epoch', BORN))
  epoch, born = tonumber(epoch or '0'), tonumber(born or '')
  local verdict = judge(RULES[target], target, new_epoch, new_born, state, epoch, born)
  if verdict == 'NEW' then
    redis.call('DEL', key)
    verdict = 'APPLIED'
  end
  if verdict == 'APPLIED' or (verdict == 'REPEATED' and LIVE[state]) then
    redis.call('HSET', key, 'state', target, 'epoch', new_epoch, unpack(update[4]))
    redis.call('PEXPIRE', key, RULES[target].ttl_ms)
  end
  answers[i] = verdict .. ' ' .. epoch .. ' ' .. (state or '')
end
return answers
"""

_UPDATE_FIELDS = tuple(
    f.name for f in fields(Update) if f.name not in {"request_id", "state", "epoch", "time_unix_s"}
)
# A request of several completions has a record for each: "id#0", "id#1", ...
_VALID_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}(#[0-9]{1,2})?")


class StatusStore:
    """One writer's access to the store. Owns its connections; `aclose` closes them.

    `record` is for the token path: the call returns at once and a task (`run`) writes in batches.
    `apply` and `get` wait for the store's answer. With an empty URL there is no store: nothing is
    kept and nothing fails.
    """

    def __init__(
        self,
        url: str,
        writer: Writer,
        *,
        live_ttl_s: float = 24 * 3600.0,
        finished_ttl_s: float = 3600.0,
        timeout_s: float = 2.0,
        max_pending_requests: int = 100_000,
        prefix: str = "headrace",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Connects at first use; raises ValueError for an unknown URL scheme.

        Args:
            url: redis://, rediss:// (TLS) or unix:// with password, user and db as redis-py
                takes them; "" is no store.
            writer: whose transitions may be written.
            live_ttl_s: a record's TTL after its last change while the request is live.
            finished_ttl_s: the record's TTL after the request's end.
            timeout_s: how long a connection or an answer may take.
            max_pending_requests: requests queued while the store is unreachable; more are dropped.
            prefix: first part of every key, so that several pools can share a server.
            clock: monotonic seconds.
        """
        self._writer = writer
        self._writable = frozenset(s for s in State if states.writes(s, writer))
        self._prefix = prefix
        self._client = _client(url, timeout_s) if url else None
        if self._client is not None:
            self._script = self._client.register_script(
                _script(
                    writer, lambda s: int((finished_ttl_s if s.is_final else live_ttl_s) * 1000)
                )
            )
        self._behind = WriteBehind(
            self._write_batch, max_requests=max_pending_requests, clock=clock
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    @property
    def is_configured(self) -> bool:
        """Whether a store is configured."""
        return self._client is not None

    @property
    def is_durable(self) -> bool:
        """Whether recent updates have reached the store."""
        return self._client is not None and self._behind.is_healthy

    @property
    def num_refused(self) -> int:
        """Updates that the store refused, or that were dropped while the store was unreachable."""
        return self._behind.num_refused

    def record(self, update: Update) -> None:
        """Queues an update and returns at once; `run` writes the updates in order per request.

        Raises ValueError when this writer may never write the state, or the id is invalid.
        """
        self._check(update)
        if self._client is not None:
            self._behind.put(update)

    async def run(self) -> None:
        """Writes queued updates until cancelled. Never raises because of the store."""
        if self._client is not None:
            await self._behind.run()

    async def flush(self, timeout_s: float) -> bool:
        """Waits until all queued updates are written or refused; False after the timeout."""
        return self._client is None or await self._behind.flush(timeout_s)

    async def ping(self) -> None:
        """Raises ServiceError when the store is unusable; the error says whether to fix or wait."""
        if self._client is not None:
            try:
                await cast("Any", self._client.ping())
            except (RedisError, OSError) as error:
                raise _as_service_error(error) from error

    async def apply(self, update: Update) -> WriteOutcome:
        """Compare-and-set now; APPLIED without a store. ServiceError: the store is unreachable."""
        self._check(update)
        if self._client is None:
            return WriteOutcome(Verdict.APPLIED, None, 0)
        try:
            (outcome,) = await self._evaluate([update])
        except (RedisError, OSError) as error:
            raise _as_service_error(error) from error
        return outcome

    async def get(self, request_id: str) -> Record | None:
        """The record; None if absent or expired. ServiceError: the store is unreachable."""
        if self._client is None or not _VALID_ID.fullmatch(request_id):
            return None
        try:
            values = await cast("Any", self._client.hgetall(self.key(request_id)))
        except (RedisError, OSError) as error:
            raise _as_service_error(error) from error
        return _record(request_id, values) if values else None

    def key(self, request_id: str) -> str:
        """The record's key; the braces keep all keys of a request on one cluster node."""
        return f"{self._prefix}:{{{request_id}}}:status"

    async def aclose(self) -> None:
        """Closes the connections. Updates not written yet are lost: call `flush` first."""
        if self._client is not None:
            await self._client.aclose()

    def _check(self, update: Update) -> None:
        if not _VALID_ID.fullmatch(update.request_id):
            raise ValueError(f"{update.request_id!r} is not a request id")
        if update.state not in self._writable:
            raise ValueError(f"{update.state} is never written by the {self._writer}")

    async def _write_batch(self, updates: Sequence[Update]) -> Batch:
        """For `WriteBehind`: which updates are done, which are early, or why the batch failed."""
        try:
            outcomes = await self._evaluate(updates)
        # OSError: redis-py lets a dying connection's error through unwrapped.
        except (RedisError, OSError) as error:
            if not _refuses_us(error):
                return Batch(failure=f"{type(error).__name__}: {error}")
            logger.error("status store refused us, records are not kept: %s", error)
            return Batch(is_fatal=True)
        refused = {Verdict.STALE, Verdict.ILLEGAL}
        for update, outcome in zip(updates, outcomes, strict=True):
            if outcome.verdict in refused:
                logger.debug("status of %s: %s %s", update.request_id, update.state, outcome)
        return Batch(
            early=[o.verdict is Verdict.EARLY for o in outcomes],
            num_refused=sum(o.verdict in refused for o in outcomes),
        )

    async def _evaluate(self, updates: Sequence[Update]) -> list[WriteOutcome]:
        """Run the script once per request, in a pipeline; ping the store when there is no update.

        Updates of one request are adjacent. Each request has its own call, because all keys of a
        call must be on one node of a cluster.
        """
        client = self._client
        assert client is not None, "only called with a store"
        if not updates:
            await cast("Any", client.ping())
            return []
        async with client.pipeline(transaction=False) as pipe:
            for request_id, chain in groupby(updates, key=attrgetter("request_id")):
                argument = msgspec.json.encode([_argument(update) for update in chain])
                await self._script([self.key(request_id)], [argument], pipe)
            answers = await cast("Any", pipe.execute())
        return [_outcome(answer) for chain_answers in answers for answer in chain_answers]


def _argument(update: Update) -> tuple[str, int, str, list[str]]:
    """An update as the script's argument; numbers are formatted as the record stores them."""
    values = ["update_time_unix_s", str(update.time_unix_s)]
    for name in _UPDATE_FIELDS:
        if (value := getattr(update, name)) is not None:
            values += [name, str(value)]
    born = update.create_time_unix_s
    return update.state, update.epoch, "" if born is None else str(born), values


def _outcome(answer: str) -> WriteOutcome:
    verdict, epoch, state = answer.split(" ")
    return WriteOutcome(Verdict(verdict), State(state) if state else None, int(epoch))


def _script(writer: Writer, ttl_ms: Callable[[State], int]) -> str:
    """The script of one writer, generated from the transition table in `states`."""
    rules = []
    for target in State:
        sources = states.sources(target, writer)
        rules.append(
            f"{target} = {{creates = {str(None in sources).lower()}, ttl_ms = {ttl_ms(target)},"
            f" takes_over = {str(target is State.QUEUED).lower()},"
            f" sources = {_lua_set(s for s in sources if s is not None)},"
            f" retakes = {_lua_set(states.retake_sources(target, writer))},"
            f" ahead = {_lua_set(s for s in State if states.can_become(s, target))}}}"
        )
    live = _lua_set(s for s in State if not s.is_final)
    return f"local LIVE = {live}\nlocal RULES = {{{', '.join(rules)}}}\n{_SCRIPT}"


def _lua_set(names: Iterable[State]) -> str:
    return f"{{{', '.join(f'{name} = true' for name in sorted(names))}}}"


def _client(url: str, timeout_s: float) -> redis.asyncio.Redis:
    # No retries inside the client: under Sentinel a retried command can stay with a dead master
    # and be written there later. `WriteBehind` retries with a fresh connection.
    return redis.asyncio.Redis.from_url(
        url,
        decode_responses=True,
        socket_timeout=timeout_s,
        socket_connect_timeout=timeout_s,
        retry=Retry(NoBackoff(), 0),
    )


def _refuses_us(error: Exception) -> bool:
    """Whether credentials caused an error; redis-py wraps errors of new unix connections."""
    return isinstance(error, _CREDENTIAL_ERRORS) or isinstance(error.__cause__, _CREDENTIAL_ERRORS)


def _as_service_error(error: Exception) -> ServiceError:
    if _refuses_us(error):
        text = f"the status store refuses our credentials ({error}); correct the store URL"
        return unavailable("STORE_REFUSED", text)
    text = f"the status store cannot be reached ({error}); try again when it is back"
    return unavailable("STORE_UNAVAILABLE", text, retry_after_s=1.0)


def _record(request_id: str, values: dict[str, str]) -> Record:
    """Parses a record's hash; fields added by later versions are ignored."""
    update_time = float(values["update_time_unix_s"])
    return Record(
        request_id=request_id,
        state=State(values["state"]),
        epoch=int(values["epoch"]),
        create_time_unix_s=float(values.get("create_time_unix_s", update_time)),
        update_time_unix_s=update_time,
        tenant=values.get("tenant", ""),
        model=values.get("model", ""),
        prompt_tokens=int(values.get("prompt_tokens", 0)),
        completion_tokens=int(values.get("completion_tokens", 0)),
        detail=values.get("detail", ""),
        router_id=values.get("router_id", ""),
        scheduler_id=values.get("scheduler_id", ""),
        worker_id=values.get("worker_id", ""),
    )
