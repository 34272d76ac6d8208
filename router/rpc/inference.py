"""The Inference service: checks each call, hands it to the Router, and answers.

Generate writes to its client from the call's own task; everything that the request holds is
released when that task ends, however it ends.
"""

import contextlib
import functools
import time
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from headrace.service import logs, telemetry
from headrace.service.errors import ServiceError, invalid, not_found, unimplemented
from headrace.service.handlers import write
from headrace.service.requests import release_request
from headrace.status.store import StatusStore
from headrace.v1 import inference_pb2, inference_pb2_grpc, steps_pb2
from router.aborts import Aborts
from router.calls import Reservation
from router.prompts import PromptReader
from router.request import ClientRequest
from router.revival import FirstTokens, Origin
from router.router import Router
from router.rpc import explained, pool, spans, steps, wire
from router.rpc.access import Access
from router.rpc.key_permits import KeyPermits
from router.rpc.model_defaults import ModelDefaults
from router.rpc.scheduler_client import SchedulerClient
from router.rpc.status_reply import read_status
from router.stream import cost_of, replies
from router.take_up import TakeUps
from router.text.tokenizer import ModelText

_MAX_ABORTS = 1000


@dataclass(frozen=True, slots=True)
class Services:
    """The parts that the service uses; all owned by the process's main function."""

    router: Router
    models: Mapping[str, ModelText]
    defaults: Mapping[str, ModelDefaults]
    prompts: PromptReader
    schedulers: Iterable[SchedulerClient]
    status: StatusStore
    take_ups: TakeUps
    aborts: Aborts
    max_prompt_bytes: int


class InferenceService:
    """headrace.v1.Inference. gRPC gives each method its request and the call's context."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._router = services.router
        self._keys = KeyPermits()

    def add_to(self, server: grpc.aio.Server) -> None:
        """Register the service at a server."""
        inference_pb2_grpc.add_InferenceServicer_to_server(self, server)  # type: ignore[arg-type]

    async def Generate(self, request: inference_pb2.GenerateRequest, context: Any) -> None:
        """Stream a completion; when the call ends, the request ends, unless it is to go on."""
        access, is_taken = Access(), False
        try:
            model_name = wire.choose_model(request.model, self._services.models)
            request_id = access.enter(request)
            logs.request_id.set(request_id)
            wanted = wire.take_first_tokens(request)
            body = wire.body_of(request)
            if body:
                take_ups = self._services.take_ups
                if (origin := await take_ups.find_repeated(request_id, body, wanted)) is not None:
                    is_taken = True
                    del request
                    release_request()
                    await self._answer_again(origin, wanted(origin), access, context)
                    return
            with (
                self._keys.hold(access.who) as spend,
                self._router.reserve(request_id, request.tenant, body) as reservation,
                spans.generation(request, request_id, model_name, context) as span,
            ):
                live = await self._submit(request, reservation, wanted, model_name, context)
                is_taken = True
                spans.follow(span, live, self._router)
                # `live` holds everything that the answer needs.
                del request
                release_request()
                try:
                    await self._answer(live, access, context)
                finally:
                    spans.note_outcome(span, live)
                    spend(_num_new_tokens(live))
        except ServiceError as error:
            if not is_taken:
                self._router.meters.refused(error)
            raise

    async def _submit(
        self,
        request: inference_pb2.GenerateRequest,
        reservation: Reservation,
        first_tokens: FirstTokens,
        model_name: str,
        context: Any,
    ) -> ClientRequest:
        """Check a request, read its prompt, and admit it."""
        services = self._services
        tokenizer = services.models[model_name].tokenizer
        bounds = wire.Bounds(self._vocab_size(model_name), services.max_prompt_bytes)
        defaults = services.defaults[model_name]
        defaults.fill_in(request.sampling)
        spec = wire.to_spec(
            request,
            bounds,
            request_id=reservation.request_id,
            model=model_name,
            default_max_tokens=defaults.max_tokens(is_chat=request.HasField("chat")),
            stop_by_token_id=wire.control_stops(request.sampling, tokenizer),
            # A kept request does not end with its call.
            deadline_unix_s=None if request.keep_on_disconnect else _call_deadline(context),
            traceparent=telemetry.current_traceparent(),
            body_sha256=reservation.body_sha256,
        )
        with telemetry.start_span("admission"):
            with telemetry.start_span("tokenize"):
                token_ids, text = await services.prompts.read(
                    model_name,
                    wire.to_prompt(request, bounds),
                    lambda least_tokens: self._router.check(spec, least_tokens),
                    functools.partial(self._router.max_prompt_tokens, model_name),
                    echo=spec.echo,
                    keep_special_tokens=spec.keep_special_tokens,
                )
            if words := list(request.sampling.bad_words):
                bad_words = await services.prompts.bad_words(model_name, words)
                wire.add_bad_token_ids(spec, bad_words)
            return self._router.submit(
                reservation, spec, token_ids, text, tokenizer, first_tokens=first_tokens
            )

    async def _answer(self, live: ClientRequest, access: Access, context: Any) -> None:
        request_id = access.outer_id(live.spec.request_id)
        stream = replies(live, self._router)
        try:
            async for reply in stream:
                if reply.usage is not None:
                    context.set_trailing_metadata(_trailing_metadata(live, self._router))
                await write(context, wire.to_response(request_id, reply))
        finally:
            await stream.aclose()

    async def _answer_again(
        self, origin: Origin, first_tokens: Sequence[int], access: Access, context: Any
    ) -> None:
        """Take a request up and stream it, from the given token of each completion."""
        tokenizer = self._services.take_ups.tokenizer(origin)
        with (
            self._keys.hold(access.who) as spend,
            self._router.take_up(origin, first_tokens, tokenizer) as live,
            spans.resumption(origin.spec, context) as span,
        ):
            del origin
            spans.follow(span, live, self._router)
            try:
                await self._answer(live, access, context)
            finally:
                spans.note_outcome(span, live)
                spend(_num_new_tokens(live))

    async def Resume(self, request: inference_pb2.ResumeRequest, context: Any) -> None:
        """Stream a request of any router from a token position."""
        access = Access()
        request_id = access.inner_id(request.request_id)
        by_index = list(request.from_token_by_index)
        wanted = functools.partial(wire.first_tokens, by_index, request.from_token)
        origin = await self._services.take_ups.find(request_id, wanted)
        await self._answer_again(origin, wanted(origin), access, context)

    async def Abort(
        self, request: inference_pb2.AbortRequest, _context: Any
    ) -> inference_pb2.AbortResponse:
        """End requests of any router, or a tenant's on this router."""
        access, response = Access(), inference_pb2.AbortResponse()
        tenant = access.tenant(request.tenant)
        if request.tenant:
            if request.request_ids:
                raise invalid("request_ids", "must be empty when a tenant is given")
            for inner in self._router.abort_tenant(tenant, access.owns):
                response.outcomes.add(request_id=access.outer_id(inner), result=_ABORT_RESULT[True])
            return response
        if not 1 <= len(request.request_ids) <= _MAX_ABORTS:
            raise invalid("request_ids", f"must be 1 to {_MAX_ABORTS} ids, or give a tenant")
        inner_ids = [
            access.inner_id(request_id, f"request_ids[{position}]")
            for position, request_id in enumerate(request.request_ids)
        ]
        ended = await self._services.aborts.end(inner_ids)
        for request_id, inner in zip(request.request_ids, inner_ids, strict=True):
            response.outcomes.add(request_id=request_id, result=_ABORT_RESULT[ended[inner]])
        return response

    async def GetStatus(
        self, request: inference_pb2.GetStatusRequest, _context: Any
    ) -> inference_pb2.GetStatusResponse:
        """A request's record in the status store."""
        request_id = Access().inner_id(request.request_id)
        status = self._services.status
        if not status.is_configured:
            raise unimplemented(
                "NO_STATUS_STORE", "this router keeps no status; start it with --store-url"
            )
        found = await read_status(status, request_id)
        found.request_id = request.request_id
        return found

    async def Explain(
        self, request: inference_pb2.ExplainRequest, _context: Any
    ) -> inference_pb2.ExplainResponse:
        """The account of the scheduler that has or had the request, and this router's."""
        access = Access()
        request_id = access.inner_id(request.request_id)
        account = self._router.calls.account(request_id)
        found = await self._scheduled(request_id)
        if found is None and account is None:
            raise not_found(
                "UNKNOWN_REQUEST",
                f"request_id: no scheduler has had {request.request_id!r} lately;"
                " GetStatus may know the request",
            )
        answer = found or inference_pb2.ExplainResponse(request_id=request_id)
        if account is not None:
            explained.complete(answer, account, has_run=found is not None)
        return access.explanation(answer)

    async def _scheduled(self, request_id: str) -> inference_pb2.ExplainResponse | None:
        """The explanation of the scheduler that has or had a request; None: none knows it."""
        owner = self._router.calls.scheduler_of(request_id)
        found = [s for s in self._services.schedulers if owner is None or s.name == owner]
        # Of several completions the first is explained.
        for name in (request_id, f"{request_id}#0"):
            for scheduler in found:
                try:
                    return await scheduler.explain(name)
                except ServiceError as error:
                    if error.code is not grpc.StatusCode.NOT_FOUND:
                        raise
        return None

    async def ListModels(
        self, _request: inference_pb2.ListModelsRequest, _context: Any
    ) -> inference_pb2.ListModelsResponse:
        """Models of this router that at least one worker serves."""
        response = inference_pb2.ListModelsResponse()
        now = self._router.now()
        for name, text in sorted(self._services.models.items()):
            workers = self._router.pool.ready(name, now)
            defaults = self._services.defaults[name]
            if workers:
                response.models.add(
                    name=name,
                    max_model_len=max(worker.max_model_len for worker in workers),
                    vocab_size=max(worker.vocab_size for worker in workers),
                    num_ready_workers=len(workers),
                    has_chat_template=text.chat_template is not None,
                    default_sampling=defaults.sampling,
                    default_chat_max_tokens=defaults.max_tokens(is_chat=True),
                )
        return response

    async def GetPool(
        self, _request: inference_pb2.GetPoolRequest, _context: Any
    ) -> inference_pb2.GetPoolResponse:
        """The workers as their schedulers last reported them."""
        return pool.pool(self._router, list(self._services.schedulers), self._services.status)

    async def AuditPool(
        self, _request: inference_pb2.AuditPoolRequest, _context: Any
    ) -> inference_pb2.AuditPoolResponse:
        """The audits of all schedulers."""
        return await pool.audits(self._services.schedulers)

    async def UpdateWorker(
        self, request: inference_pb2.UpdateWorkerRequest, _context: Any
    ) -> inference_pb2.UpdateWorkerResponse:
        """Drain a worker, use it again, or set its role."""
        return await pool.update_worker(list(self._services.schedulers), request)

    async def WatchSteps(
        self, request: steps_pb2.WatchStepsRequest, _context: Any
    ) -> AsyncGenerator[steps_pb2.WatchStepsResponse, None]:
        """The steps of all workers, as their schedulers report them."""
        watching = steps.watch_steps(lambda: self._services.schedulers, request)
        async with contextlib.aclosing(watching) as responses:
            async for response in responses:
                yield response

    async def GetStepBatch(
        self, request: steps_pb2.GetStepBatchRequest, _context: Any
    ) -> steps_pb2.GetStepBatchResponse:
        """The requests of one step."""
        return await steps.step_batch(self._services.schedulers, request)

    async def ListQueue(
        self, request: steps_pb2.ListQueueRequest, _context: Any
    ) -> steps_pb2.ListQueueResponse:
        """The requests that wait, here and in the schedulers."""
        return await steps.list_queue(self._router, self._services.schedulers, request)

    def _vocab_size(self, model_name: str) -> int:
        """The smallest vocabulary of the ready workers; without one, the tokenizer's."""
        ready = self._router.pool.ready(model_name, self._router.now())
        if not ready:
            return self._services.models[model_name].tokenizer.vocab_size
        return min(worker.vocab_size for worker in ready)


_ABORT_RESULT = {
    True: inference_pb2.AbortOutcome.RESULT_ABORTED,
    False: inference_pb2.AbortOutcome.RESULT_ALREADY_FINISHED,
    None: inference_pb2.AbortOutcome.RESULT_NOT_FOUND,
}


def _num_new_tokens(live: ClientRequest) -> int:
    """Tokens that a call has used: of a prompt that this call brought, and of output."""
    num_prompt_tokens = 0 if live.is_taken_up else live.spec.n * len(live.prompt_token_ids)
    return num_prompt_tokens + live.num_completion_tokens - live.num_tokens_before


def _call_deadline(context: Any) -> float | None:
    """The call's own deadline, seconds since the epoch."""
    remaining_s = context.time_remaining()
    return None if remaining_s is None else time.time() + float(remaining_s)


def _trailing_metadata(live: ClientRequest, router: Router) -> tuple[tuple[str, str], ...]:
    """The cost of a request; times in seconds."""
    cost = cost_of(live, router)
    return (
        ("x-headrace-queue-s", f"{cost.queue_s:.6f}"),
        ("x-headrace-prefill-s", f"{cost.prefill_s:.6f}"),
        ("x-headrace-decode-s", f"{cost.decode_s:.6f}"),
        ("x-headrace-paused-s", f"{cost.paused_s:.6f}"),
        ("x-headrace-cached-tokens", str(cost.cached_tokens)),
        ("x-headrace-preemptions", str(cost.num_preemptions)),
        ("x-headrace-draft-tokens", str(live.num_draft_tokens)),
        ("x-headrace-accepted-tokens", str(live.num_accepted_draft_tokens)),
        ("x-headrace-recoveries", str(live.num_recoveries)),
        ("x-headrace-durable", "true" if cost.is_durable else "false"),
    )
