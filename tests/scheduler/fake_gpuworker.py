"""A gpuworker that speaks the real protocol and runs no model.

Its next token is a function of all tokens before it, so what a request should give is known. Its
KV cache holds, per slot, what the tokens up to there were: a block used by two requests, freed
too early or taken wrongly from the prefix cache is noticed at the step that reads it.
"""

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from itertools import chain

import grpc.aio
import numpy as np

from headrace.service import terms
from headrace.service.columns import pack_int32, unpack_int32
from headrace.service.errors import unavailable
from headrace.service.serving import GrpcServer, ServingConfig
from headrace.v1 import common_pb2, gpuworker_pb2, gpuworker_pb2_grpc

VOCAB_SIZE = 1000
EOS_TOKEN_ID = 2
_FIRST_TOKEN_ID = 10
_PRIME = 1_000_003


def next_hash(before: int, token_id: int) -> int:
    return (before * _PRIME + token_id + 1) % (1 << 61)


def hash_of(token_ids: Sequence[int]) -> int:
    value = 7
    for token_id in token_ids:
        value = next_hash(value, token_id)
    return value


def token_after(prefix_hash: int) -> int:
    return _FIRST_TOKEN_ID + prefix_hash % (VOCAB_SIZE - _FIRST_TOKEN_ID)


def expected_tokens(prompt: Sequence[int], num_tokens: int) -> list[int]:
    """What a request with this prompt generates; never EOS."""
    value = hash_of(prompt)
    tokens = []
    for _ in range(num_tokens):
        tokens.append(token_after(value))
        value = next_hash(value, tokens[-1])
    return tokens


class Row:
    """A request in the fake's batch.

    Columns, so that a step looks at all of a long history at once: hashes[i] covers
    token_ids[: i + 1], slots[i] is where the KV of position i is.
    """

    def __init__(self, request: gpuworker_pb2.RowRequest, max_num_tokens: int) -> None:
        self.request_id = request.request_id
        self.num_prompt_tokens = request.num_prompt_tokens
        self.sampling = request.sampling
        self.token_ids: list[int] = []
        self.hashes = np.zeros(max_num_tokens + 1, dtype=np.int64)
        self.slots = np.zeros(max_num_tokens + 1, dtype=np.int64)
        self.num_slots = 0
        self.block_ids: list[int] = []
        for token_id in unpack_int32(request.token_ids, "token_ids").tolist():
            self.append(token_id)

    @property
    def last_hash(self) -> int:
        return int(self.hashes[len(self.token_ids) - 1])

    def append(self, token_id: int) -> None:
        before = self.last_hash if self.token_ids else hash_of([])
        self.hashes[len(self.token_ids)] = next_hash(before, token_id)
        self.token_ids.append(token_id)

    def append_block(self, block_id: int, block_size: int) -> None:
        self.block_ids.append(block_id)
        room = self.slots[self.num_slots : self.num_slots + block_size]
        room[:] = block_id * block_size + np.arange(len(room))
        self.num_slots += len(room)


class FakeModel:
    """Rows and KV slots of one Execute stream."""

    def __init__(self, worker: "FakeGpuWorker") -> None:
        self._worker = worker
        self._rows: dict[int, Row] = {}
        num_slots = (worker.num_kv_blocks + 1) * worker.block_size
        self._kv = np.full(num_slots, -1, dtype=np.int64)

    def step(self, plan: gpuworker_pb2.StepPlan) -> gpuworker_pb2.StepResult:
        for row in unpack_int32(plan.freed_rows, "freed_rows").tolist():
            del self._rows[row]
        for request in plan.row_requests:
            self._place(request)
        appended = zip(
            unpack_int32(plan.appended_block_rows, "rows").tolist(),
            unpack_int32(plan.appended_block_ids, "ids").tolist(),
            strict=True,
        )
        for row, block_id in appended:
            assert 1 <= block_id <= self._worker.num_kv_blocks, f"block {block_id} is none"
            self._rows[row].append_block(block_id, self._worker.block_size)
        rows = unpack_int32(plan.rows, "rows").tolist()
        computed = unpack_int32(plan.num_computed_tokens, "computed").tolist()
        scheduled = unpack_int32(plan.num_scheduled_tokens, "scheduled").tolist()
        assert sum(scheduled) <= self._worker.max_num_batched_tokens, "over the budget"
        result = gpuworker_pb2.StepResult(step_id=plan.step_id)
        sampled: list[int] = []
        counts: list[int] = []
        for row, num_computed, num_scheduled in zip(rows, computed, scheduled, strict=True):
            token_ids = self._advance(row, num_computed, num_scheduled, result)
            counts.append(len(token_ids))
            sampled.extend(token_ids)
        result.num_sampled_tokens = pack_int32(np.array(counts, dtype=np.int32))
        result.token_ids = pack_int32(np.array(sampled, dtype=np.int32))
        if plan.audit:
            result.audit.CopyFrom(self._audit())
        return result

    def _audit(self) -> gpuworker_pb2.RowsAudit:
        tables = {row: list(self._rows[row].block_ids) for row in sorted(self._rows)}
        self._worker.spoil_audit(tables)
        return gpuworker_pb2.RowsAudit(
            rows=pack_int32(np.array(list(tables), dtype=np.int32)),
            num_blocks=pack_int32(np.array([len(ids) for ids in tables.values()], dtype=np.int32)),
            block_ids=pack_int32(np.array(list(chain(*tables.values())), dtype=np.int32)),
        )

    def _place(self, request: gpuworker_pb2.RowRequest) -> None:
        assert request.row not in self._rows, f"row {request.row} is taken"
        assert request.row < self._worker.max_num_seqs, f"row {request.row} is none"
        assert request.sampling.HasField("seed"), "a request without a seed"
        self._rows[request.row] = Row(request, self._worker.max_model_len)

    def _advance(
        self, number: int, num_computed: int, num_scheduled: int, result: gpuworker_pb2.StepResult
    ) -> list[int]:
        row = self._rows[number]
        end = num_computed + num_scheduled
        assert num_scheduled > 0, "a row that does not advance"
        assert end <= len(row.token_ids), f"{row.request_id} advances beyond its tokens"
        assert row.num_slots >= end, f"{row.request_id} lacks blocks"
        is_lost = self._kv[row.slots[:num_computed]] != row.hashes[:num_computed]
        assert not is_lost.any(), f"KV of {row.request_id} was lost at {np.argmax(is_lost)}"
        self._kv[row.slots[num_computed:end]] = row.hashes[num_computed:end]
        if row.request_id in self._worker.failing_ids:
            result.errors.add(row=number, message="logits are not finite")
            return []
        logprobs = gpuworker_pb2.RowLogprobs(row=number)
        if row.sampling.HasField("prompt_logprobs"):
            computed_prompt = row.token_ids[max(num_computed, 1) : min(end, row.num_prompt_tokens)]
            logprobs.prompt_tokens.extend(_logprobs(computed_prompt))
        token_ids = []
        if end == len(row.token_ids):
            token_ids = [self._worker.sample(row)]
            row.append(token_ids[0])
            if row.sampling.HasField("logprobs"):
                logprobs.tokens.extend(_logprobs(token_ids, row.sampling.logprobs))
        if logprobs.tokens or logprobs.prompt_tokens:
            result.logprobs.append(logprobs)
        return token_ids


def _logprobs(token_ids: Sequence[int], num_top: int = 0) -> list[common_pb2.TokenLogprobs]:
    top = {"top_token_ids": range(num_top), "top_logprobs": [-1.0] * num_top}
    return [
        common_pb2.TokenLogprobs(token_id=t, logprob=-float(t), rank=1, **top) for t in token_ids
    ]


class FakeGpuWorker(gpuworker_pb2_grpc.GpuWorkerServicer):
    """One worker; `start` and `kill` as often as wanted, on one port, each a new incarnation.

    hold() stops steps before they are done, release(n) lets n of them end (all when n is None).
    """

    def __init__(
        self,
        worker_id: str = "w0",
        *,
        model: str = "fake",
        block_size: int = 4,
        num_kv_blocks: int = 64,
        max_model_len: int = 256,
        max_num_seqs: int = 16,
        max_num_batched_tokens: int = 64,
    ) -> None:
        self.worker_id = worker_id
        self.model = model
        self.block_size = block_size
        self.num_kv_blocks = num_kv_blocks
        self.max_model_len = max_model_len
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.failing_ids: set[str] = set()
        # Number of its tokens after which a request gets EOS.
        self.eos_after: dict[str, int] = {}
        self.is_loaded = True
        self.is_draining = False
        # Changes the next result that has rows, once.
        self.spoil: Callable[[gpuworker_pb2.StepResult], None] | None = None
        self.pace_s = 0.0
        self.plans: list[gpuworker_pb2.StepPlan] = []
        # Changes the block tables that an audit gives, by row.
        self.spoil_audit: Callable[[dict[int, list[int]]], None] = lambda tables: None
        self.num_steps_begun = 0
        self.address = "127.0.0.1:0"
        self.errors: list[AssertionError] = []
        self.changed = asyncio.Condition()
        self._num_allowed: int | None = None
        self._num_held = 0
        self._drain_asked = asyncio.Event()
        self.num_streams = 0
        self._server: GrpcServer | None = None
        self._incarnation = ""

    async def start(self) -> str:
        self._incarnation = uuid.uuid4().hex
        self._server = GrpcServer(ServingConfig(listen=self.address), ["headrace.v1.GpuWorker"])
        gpuworker_pb2_grpc.add_GpuWorkerServicer_to_server(self, self._server.server)
        self.address = await self._server.start()
        return self.address

    def drain(self) -> None:
        """Say that it is shutting down, and take no new stream."""
        self.is_draining = True
        self._drain_asked.set()

    async def kill(self) -> None:
        """Break every call, at once."""
        if self._server is not None:
            await self._server.stop(0)
            self._server = None

    def hold(self) -> None:
        self._num_allowed = 0

    async def release(self, num_steps: int | None = None) -> None:
        async with self.changed:
            if num_steps is None or self._num_allowed is None:
                self._num_allowed = num_steps
            else:
                self._num_allowed += num_steps
            self.changed.notify_all()

    async def step_begun(self, number: int) -> None:
        """Wait until that many steps were begun, over all incarnations."""
        async with self.changed:
            await self.changed.wait_for(lambda: self.num_steps_begun >= number)

    def sample(self, row: Row) -> int:
        num_generated = len(row.token_ids) - row.num_prompt_tokens
        if self.eos_after.get(row.request_id) == num_generated:
            return EOS_TOKEN_ID
        return token_after(row.last_hash)

    async def Describe(self, request, context):
        if not self.is_loaded:
            raise unavailable("LOADING", "the model is loading")
        return gpuworker_pb2.DescribeResponse(
            worker=common_pb2.Worker(
                worker_id=self.worker_id,
                state=(
                    common_pb2.WORKER_STATE_DRAINING
                    if self.is_draining
                    else common_pb2.WORKER_STATE_READY
                ),
                incarnation=self._incarnation,
                model=self.model,
                max_model_len=self.max_model_len,
                block_size=self.block_size,
                num_kv_blocks=self.num_kv_blocks,
                max_num_seqs=self.max_num_seqs,
                max_num_batched_tokens=self.max_num_batched_tokens,
                vocab_size=VOCAB_SIZE,
                eos_token_ids=[EOS_TOKEN_ID],
            )
        )

    async def Execute(
        self,
        request_iterator: AsyncIterator[gpuworker_pb2.StepPlan],
        context: grpc.aio.ServicerContext,
    ) -> None:
        if self.is_draining:
            raise unavailable("DRAINING", "it is shutting down")
        term = terms.term_in(context.invocation_metadata())
        assert term is not None, "a scheduler without a term"
        await context.send_initial_metadata(terms.metadata_of(term))
        telling = asyncio.create_task(self._tell_of_draining(context))
        self.num_streams += 1
        try:
            await self._serve(request_iterator, context)
        finally:
            self.num_streams -= 1
            telling.cancel()

    async def _tell_of_draining(self, context: grpc.aio.ServicerContext) -> None:
        await self._drain_asked.wait()
        await context.write(gpuworker_pb2.StepResult(draining=True))

    async def _serve(
        self,
        request_iterator: AsyncIterator[gpuworker_pb2.StepPlan],
        context: grpc.aio.ServicerContext,
    ) -> None:
        model = FakeModel(self)
        async for plan in request_iterator:
            self.plans.append(plan)
            await self._begin_step()
            try:
                result = model.step(plan)
            except (AssertionError, KeyError) as error:
                self.errors.append(AssertionError(repr(error)))
                raise
            if self.spoil is not None and plan.rows:
                self.spoil(result)
                self.spoil = None
            if self.pace_s:
                await asyncio.sleep(self.pace_s)
            await context.write(result)

    @property
    def is_held(self) -> bool:
        """Whether a step is held up and no other is allowed."""
        return self._num_held > 0 and self._num_allowed == 0

    async def held(self) -> None:
        """Wait until it is held."""
        async with self.changed:
            await self.changed.wait_for(lambda: self.is_held)

    async def _begin_step(self) -> None:
        async with self.changed:
            self.num_steps_begun += 1
            self._num_held += 1
            self.changed.notify_all()
            try:
                await self.changed.wait_for(
                    lambda: self._num_allowed is None or self._num_allowed > 0
                )
            finally:
                self._num_held -= 1
            if self._num_allowed is not None:
                self._num_allowed -= 1
