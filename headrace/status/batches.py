"""Writes a batch of items to the store, with the changes of the sets of live requests."""

from collections.abc import Sequence
from typing import Any

from headrace.service.errors import ServiceError
from headrace.status.chains import Item
from headrace.status.connect import Command, Connection
from headrace.status.keys import Keys
from headrace.status.live import LiveIndex, member_of
from headrace.status.records import Update, WriteOutcome, parse_name
from headrace.status.states import Writer
from headrace.status.wire import decode_outcome, encode_writes
from headrace.status.write_behind import Batch


class BatchWriter:
    """One writer's batches."""

    def __init__(
        self, connection: Connection, keys: Keys, live: LiveIndex, writer: Writer, source: str
    ) -> None:
        """source is the write script. `owner`: name and incarnation of the process, once known."""
        self._connection = connection
        self._keys = keys
        self._live = live
        self._writer = writer
        self._script = connection.add_script(source)
        self._ended: list[tuple[str, str, str]] = []
        self.owner = ("", "")

    async def write(self, chains: Sequence[Sequence[Item]]) -> Batch:
        """Writes items by completion; the outcome says which to retry. Raises nothing."""
        try:
            return Batch(outcomes=await self.evaluate(chains))
        except ServiceError as error:
            return Batch(failure=error.message, is_fatal=error.reason == "STORE_REFUSED")

    async def evaluate(self, chains: Sequence[Sequence[Item]]) -> dict[int, WriteOutcome]:
        """Outcomes of items that were not simply applied, by position. ServiceError: not written.

        Without items, the store is pinged.
        """
        ended, self._ended = self._ended, []
        updates = [item for chain in chains for item in chain if isinstance(item, Update)]
        before = [*self._live.removals(ended), *self._live.additions(updates)]
        calls = self._calls(chains)
        try:
            answers = await self._connection.call(*before, *(calls or [("PING",)]))
        except ServiceError:
            self._ended = ended
            raise
        return self._read(chains, answers[len(before) :]) if calls else {}

    def forget(self, router_id: str, incarnation: str, member: str) -> None:
        """Removes a request from a router's set of live requests with the next batch."""
        self._ended.append((router_id, incarnation, member))

    def _calls(self, chains: Sequence[Sequence[Item]]) -> list[Command]:
        if not chains:
            return []
        keys = [self._keys.spec(parse_name(chain[0].request_id)[0]) for chain in chains]
        if not self._connection.is_cluster:
            return [self._script.call(keys, *encode_writes(chains, self._writer, self.owner))]
        # All keys of a call must be in one slot.
        return [
            self._script.call([key], *encode_writes([chain], self._writer, self.owner))
            for key, chain in zip(keys, chains, strict=True)
        ]

    def _read(
        self, chains: Sequence[Sequence[Item]], answers: Sequence[Sequence[Sequence[Any]]]
    ) -> dict[int, WriteOutcome]:
        outcomes: dict[int, WriteOutcome] = {}
        items = [item for chain in chains for item in chain]
        begin = 0
        for answer, chain in zip(answers, chains, strict=False):
            for position, *note in answer:
                if note[0] == b"ENDED":
                    self._forget(items[begin + position].request_id, note[1:])
                else:
                    outcomes[begin + position] = decode_outcome(note)
            begin += len(chain)
        return outcomes

    def _forget(self, name: str, owner: Sequence[bytes]) -> None:
        """Notes that a request has ended, to be removed from its router's set."""
        router_id, incarnation, create_time = (part.decode() for part in owner)
        self.forget(router_id, incarnation, member_of(parse_name(name)[0], create_time))
