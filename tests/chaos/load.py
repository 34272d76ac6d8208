"""The load: clients that each send one request after another, and each do what a request asks."""

import asyncio
import time
from collections.abc import Callable, Mapping
from random import Random
from typing import Any

import grpc
import grpc.aio

from headrace.client import ResumePolicy
from headrace.service.errors import ServiceError, already_exists, from_rpc_error
from headrace.v1 import inference_pb2, inference_pb2_grpc
from tests.chaos import library
from tests.chaos.reader import SEND_AGAIN, FailedError, Reader, Stubs, abort
from tests.chaos.received import Received
from tests.chaos.tally import Tally
from tests.chaos.wanted import Wanted

# In which a client has read what was sent to it before.
_BUFFERED_S = 2.0
_LOOK_S = 5.0
_CLASH_S, _CLASHED = 20.0, "CLASHED"
_ENDED_BY_ABORT = {grpc.StatusCode.ABORTED, grpc.StatusCode.NOT_FOUND}
_OUTCOMES = inference_pb2.AbortOutcome
# Small windows, so that a client that does not read is felt by the router.
_CHANNEL = (
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 16_384),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 500),
)


class Client:
    """One client: its connections to all routers, and its requests one by one."""

    def __init__(
        self,
        name: str,
        addresses: Mapping[str, str],
        rng: Random,
        tally: Tally,
        finish_by_name: dict[str, Received],
        *,
        request_s: float = 400.0,
    ) -> None:
        """finish_by_name gets what each ended request received, by its id.

        request_s: how long a request may be without news.
        """
        self._request_s = request_s
        self._name = name
        self._rng = rng
        self._tally = tally
        self._ended = finish_by_name
        self._addresses = addresses
        self.comes_back: asyncio.Event | None = None  # if not soon
        self.is_away = False
        self._channels = {
            router: grpc.aio.insecure_channel(address, options=_CHANNEL)
            for router, address in addresses.items()
        }
        self._stubs: Stubs = {
            router: inference_pb2_grpc.InferenceStub(channel)
            for router, channel in self._channels.items()
        }

    async def run(self, draw: Callable[[Random, str], Wanted], is_over: Callable[[], bool]) -> None:
        """Sends requests until told that it is over; the last one is read to its end."""
        number = 0
        try:
            while not is_over():
                number += 1
                await self.serve(draw(self._rng, f"{self._name}.{number}"))
        finally:
            for channel in self._channels.values():
                await channel.close()

    async def serve(self, wanted: Wanted) -> None:
        """One request, from its first call to its end; counts what it broke."""
        request_id = wanted.request.request_id
        received = Received(wanted)
        self._tally.requests[wanted.does] += 1
        reading = asyncio.create_task(getattr(self, f"_{wanted.does}")(self._reader(received)))
        try:
            whole = await self._while_it_goes_on(reading, received)
        except TimeoutError:
            self._violation(wanted, f"stuck at {received.positions}")
        except FailedError as failure:
            self._failed(received, failure.error)
        else:
            self._ended[request_id] = whole or received
        finally:
            reading.cancel()
            self._tally.ended(request_id)
            self._tally.progress_s.pop(request_id, None)
        for fault in received.faults:
            self._violation(wanted, fault)

    async def _while_it_goes_on(
        self, reading: asyncio.Task[Received | None], received: Received
    ) -> Received | None:
        """What a reading gives; TimeoutError when nothing has come for too long."""
        request_id = received.wanted.request.request_id
        while not reading.done():
            await asyncio.wait([reading], timeout=_LOOK_S)
            since_s = self._tally.progress_s.get(request_id, received.began_s)
            if not reading.done() and time.monotonic() - since_s > self._request_s:
                raise TimeoutError
        return reading.result()

    def _failed(self, received: Received, error: ServiceError) -> None:
        wanted = received.wanted
        if error.code is grpc.StatusCode.DEADLINE_EXCEEDED and wanted.request.HasField("deadline"):
            self._tally.events["late"] += 1
        elif received.was_aborted and error.code in _ENDED_BY_ABORT:
            self._tally.events["aborted before its first token"] += 1
        elif error.reason == _CLASHED:
            self._tally.events["clash: accepted without a store"] += 1
        elif error.reason in SEND_AGAIN and self._tally.may_be_lost(
            error.reason, received.began_s, received.first_s
        ):
            self._tally.events["lost, admitted without a store"] += 1
        elif error.reason == "SCHEDULERS_LOST" and self._tally.may_be_blamed(received.began_s):
            # Blamed for the kills, as a request that kills schedulers is.
            self._tally.events["blamed"] += 1
            received.faults.clear()
        else:
            self._violation(wanted, f"failed at {received.positions}: {error!r}")

    def _violation(self, wanted: Wanted, what: str) -> None:
        self._tally.violation(f"{wanted.request.request_id} ({wanted.does}): {what}")

    def _reader(self, received: Received, **options: Any) -> Reader:
        options.setdefault("router", self._rng.choice(list(self._stubs)))
        return Reader(received, self._stubs, self._rng, self._tally, **options)

    def _other(self, router: str) -> str:
        return self._rng.choice([name for name in self._stubs if name != router])

    def _middle(self, received: Received) -> Callable[[], bool]:
        """A condition: some part of the answer has come."""
        wanted = self._rng.randint(1, max(1, len(received.wanted.answers[0].token_ids) // 2))
        return lambda: received.positions[0] >= wanted

    async def _read(self, reader: Reader) -> None:
        await reader.read()

    async def _library(self, reader: Reader) -> None:
        addresses = list(self._addresses.values())
        self._rng.shuffle(addresses)
        # Its own patience of a minute is less than a kill each second may cost.
        policy = ResumePolicy(timeout_s=self._request_s)
        await library.read(reader.received, addresses, self._tally, policy=policy)

    async def _deadline(self, reader: Reader) -> None:
        await reader.read()

    async def _slow(self, reader: Reader) -> None:
        await reader.read(pace_s=0.5)

    async def _leave(self, reader: Reader) -> None:
        """Closes its call, and comes back at either router."""
        await reader.read(self._middle(reader.received))
        self._tally.ended(reader.received.wanted.request.request_id)
        if self.comes_back is None:
            await asyncio.sleep(self._rng.uniform(0, 1.5))
        else:
            self.is_away = True
            await self.comes_back.wait()
        reader.router = self._rng.choice(list(self._stubs))
        await reader.read()

    async def _reread(self, reader: Reader) -> None:
        """Reads what is finished once more, from the beginning."""
        await reader.read()
        again = Received(reader.received.wanted)
        await self._reader(again, resumes=True).read()
        reader.received.faults += again.faults
        if again.finish_reasons != reader.received.finish_reasons:
            reader.received.faults.append("read again, it ended otherwise")

    async def _rival(self, reader: Reader) -> Received:
        return await self._overtake(reader, resumes=True)

    async def _repeat(self, reader: Reader) -> Received:
        return await self._overtake(reader, resumes=False)

    async def _overtake(self, first: Reader, *, resumes: bool) -> Received:
        """A second call reads from the beginning, and the first ends; what the second received."""
        is_middle, has_come = self._middle(first.received), asyncio.Event()

        def note() -> bool:
            if is_middle():
                has_come.set()
            return False

        async def read_first() -> None:
            try:
                await first.read(note, follows=False)
            finally:
                has_come.set()

        reading = asyncio.create_task(read_first())
        try:
            await has_come.wait()
            received = Received(first.received.wanted)
            second = self._reader(received, resumes=resumes, router=self._other(first.router))
            await second.read()
            await reading
        finally:
            reading.cancel()
            await asyncio.wait([reading])
        first.received.faults += received.faults
        return received

    async def _clash(self, reader: Reader) -> None:
        """Sends another request of the same id, which must be refused while the first lives."""
        await reader.read(lambda: reader.received.is_begun)
        if self._tally.was_store_away(time.monotonic()):
            # A router that does not reach the store cannot know of the other's requests.
            await reader.read()
            return
        other = inference_pb2.GenerateRequest()
        other.CopyFrom(reader.received.wanted.request)
        other.sampling.max_tokens += 1
        # It ends with its call where it is accepted.
        other.keep_on_disconnect = False
        call = self._stubs[self._rng.choice(list(self._stubs))].Generate(other)
        is_accepted = False
        try:
            async with asyncio.timeout(_CLASH_S):
                is_accepted = await call.read() is not grpc.aio.EOF
        except TimeoutError:
            self._tally.events["clash: no answer"] += 1
        except grpc.aio.AioRpcError as error:
            self._tally.events[f"clash: {from_rpc_error(error).reason}"] += 1
        finally:
            call.cancel()
        if is_accepted and self._tally.was_store_away(time.monotonic()):
            raise FailedError(already_exists(_CLASHED, "both were accepted, without a store"))
        if is_accepted:
            reader.received.faults.append("another body was accepted under its id")
        await reader.read()

    async def _abort(self, reader: Reader) -> None:
        """Aborts by the other router, and reads how it ended."""
        received = reader.received
        if self._rng.random() < 0.7:
            await reader.read(self._middle(received))
        reading = asyncio.create_task(reader.read())
        try:
            await asyncio.sleep(0)
            await self._abort_by_other(reader)
            aborted_s = time.monotonic()
            await asyncio.wait([reading], timeout=_BUFFERED_S)
            position = received.positions[0]
            await reading
        finally:
            reading.cancel()
            await asyncio.wait([reading])
        num_more = received.positions[0] - position
        # A scheduler that was not told, and does not reach the store, cannot know.
        if num_more > 200 and not self._tally.was_store_away_since(aborted_s):
            received.faults.append(f"{num_more} tokens after its abort")

    async def _abort_by_other(self, reader: Reader) -> None:
        """Until some router says that it is ended."""
        received, router = reader.received, self._other(reader.router)
        received.was_aborted = True
        num_not_found = 0
        while not received.is_finished:
            try:
                (result,) = await abort(self._stubs, router, [received.wanted.request.request_id])
            except ServiceError as error:
                self._tally.events[f"abort: {error.reason}"] += 1
                if error.code not in {
                    grpc.StatusCode.UNAVAILABLE,
                    grpc.StatusCode.DEADLINE_EXCEEDED,
                }:
                    received.faults.append(f"Abort failed: {error!r}")
                    return
            else:
                self._tally.events[f"abort: {_OUTCOMES.Result.Name(result)}"] += 1
                if result != _OUTCOMES.RESULT_NOT_FOUND:
                    return
                num_not_found += 1
                if num_not_found > 20:
                    if received.is_begun:
                        received.faults.append("Abort does not find it")
                    return  # else no router has admitted the request
            await asyncio.sleep(0.3)
            router = self._other(router)
