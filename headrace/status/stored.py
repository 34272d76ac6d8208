"""Reads what is stored of a request, and claims requests for a router."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from headrace.status.batches import BatchWriter
from headrace.status.connect import Connection
from headrace.status.keys import Keys
from headrace.status.live import LiveIndex, member_of
from headrace.status.records import Record, Stored, parse_name
from headrace.status.scripts import claim_script, read_script
from headrace.status.states import CLAIMS, State
from headrace.status.wire import decode_record, decode_records, decode_stored, encode_claim


class StoredRequests:
    """Requests in the store. Calls raise ServiceError while the store is away."""

    def __init__(
        self,
        connection: Connection,
        keys: Keys,
        live: LiveIndex,
        batches: BatchWriter,
        *,
        ttls_ms: Mapping[str, int],
        wall_clock: Callable[[], float],
    ) -> None:
        """wall_clock is seconds since the epoch."""
        self._call = connection.call
        self._keys = keys
        self._live = live
        self._batches = batches
        self._wall_clock = wall_clock
        self._claim = connection.add_script(claim_script(**ttls_ms))
        self._read = connection.add_script(read_script())

    async def get(self, name: str) -> Record | None:
        """A completion's record."""
        try:
            request_id, index = parse_name(name)
        except ValueError:
            return None
        (found,) = await self._call(("HGETALL", self._keys.status(request_id, index)))
        return decode_record(name, found)

    async def records(self, request_id: str) -> list[Record]:
        """The records of all completions."""
        if not _is_request_id(request_id):
            return []
        (answer,) = await self._call(self._read.call([self._keys.spec(request_id)], ""))
        return decode_records(request_id, answer)

    async def load(self, request_id: str) -> Stored | None:
        """All that is kept of a request, at one moment."""
        if not _is_request_id(request_id):
            return None
        (answer,) = await self._call(self._read.call([self._keys.spec(request_id)], "1"))
        return decode_stored(request_id, answer)

    async def claim(
        self,
        stored: Stored,
        state: State,
        *,
        owner: tuple[str, str],
        detail: str,
        is_recovery: bool,
    ) -> Stored | None:
        """See `StatusStore.claim`; owner is the router and its incarnation."""
        if state not in CLAIMS:
            raise ValueError(f"a claim does not write {state}")
        living = [c.record for c in stored.completions if not c.record.state.is_final]
        if not living:
            return stored
        before = living[0].router_id, living[0].router_incarnation
        first = stored.completions[0].record
        member = member_of(stored.request_id, str(first.create_time_unix_s))
        now = self._wall_clock()
        # Entered first: a request is in the set of its owner whenever the router dies.
        if not state.is_final:
            await self._live.enter(owner, member)
        argument = encode_claim(
            stored,
            state,
            {
                "update_time_unix_s": now,
                "router_id": owner[0],
                "router_incarnation": owner[1],
                "detail": detail,
            },
            is_recovery=is_recovery,
        )
        (is_claimed,) = await self._call(
            self._claim.call([self._keys.spec(stored.request_id)], argument)
        )
        if not is_claimed:
            return None
        if state.is_final or before != owner:
            self._batches.forget(*before, member)

        def claimed(record: Record) -> Record:
            return replace(
                record,
                state=state,
                epoch=record.epoch + 1,
                update_time_unix_s=now,
                num_completions=len(stored.completions),
                router_id=owner[0],
                router_incarnation=owner[1],
                detail=detail,
                num_recoveries=record.num_recoveries + is_recovery,
            )

        completions = [
            c if c.record.state.is_final else replace(c, record=claimed(c.record))
            for c in stored.completions
        ]
        return replace(stored, completions=completions)


def _is_request_id(request_id: str) -> bool:
    """Whether a text is a request's id, and not a completion's name."""
    try:
        return parse_name(request_id)[0] == request_id
    except ValueError:
        return False
