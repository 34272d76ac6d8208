"""Async client of Headrace's public API, headrace.v1.Inference.

    async with HeadraceClient("127.0.0.1:8700") as client:
        async for delta in client.generate("Once upon a time", sampling=Sampling(max_tokens=64)):
            print(delta.text, end="")

Refusals and failures are `ServiceError`: a canonical code, a stable reason, a message that says
what to do. A stream whose connection or router is lost goes on by itself, without a gap, as
`ResumePolicy` says. Leaving a stream early, by `break` with `aclosing`, by an exception or by
cancelling the task, ends the request on the server.
"""

import contextlib
import random
import time
import uuid
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Self

from opentelemetry.trace import SpanKind

from headrace import messages
from headrace.connections import Routers, UnreachableError
from headrace.messages import Prompt
from headrace.resuming import Received, ResumePolicy
from headrace.service import telemetry
from headrace.service.channels import ChannelConfig
from headrace.service.errors import ServiceError
from headrace.steps import QueuePage, StepBatch, WorkerSteps
from headrace.stream import SERVICE, Ending, RequestStream, Tell
from headrace.types import (
    AbortOutcome,
    ChatMessage,
    Completion,
    Delta,
    ModelInfo,
    Output,
    PoolInfo,
    RequestHistory,
    Sampling,
    StatusRecord,
    TokenLogprobs,
    WorkerAudit,
    WorkerStatus,
)
from headrace.v1 import common_pb2, inference_pb2, steps_pb2

__all__ = [
    "ChannelConfig",
    "ChatMessage",
    "HeadraceClient",
    "Prompt",
    "ResumePolicy",
    "Sampling",
    "ServiceError",
]

_CALL_TIMEOUT_S = 15.0


class HeadraceClient:
    """Calls one of several routers, and another one when that one fails. Owns its channels.

    Use a client in `async with`, in one event loop; tasks of that loop can share it.
    """

    def __init__(
        self,
        target: str,
        config: ChannelConfig | None = None,
        *,
        resume: ResumePolicy | None = None,
        tell: Tell = lambda _: None,
        tls_name: str = "",
    ) -> None:
        """
        Args:
            target: "host:port" or "unix:PATH"; several are separated by commas.
            config: TLS, token and message size; None: plain text without a token.
            resume: when a stream goes on after its connection is lost; None: for up to a minute.
            tell: called with a line for a person when a connection is lost, and when a stream is
                resumed.
            tls_name: what the server's certificate must certify; empty: the host in `target`.
        """
        self._routers = Routers(target, config, tls_name)
        self._policy = resume or ResumePolicy()
        self._tell = tell
        self._ending = Ending(self.abort)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Ends requests whose streams are open, and closes the channels."""
        await self._ending.close_all()
        await self._routers.aclose()

    def generate(
        self,
        prompt: Prompt,
        *,
        model: str = "",
        sampling: Sampling | None = None,
        request_id: str = "",
        priority: int = 0,
        tenant: str = "",
        deadline_s: float | None = None,
        cache_salt: str = "",
        include_stop_str_in_output: bool = False,
        echo: bool = False,
        keep_special_tokens: bool = False,
        keep_on_disconnect: bool = False,
        recover_always: bool = False,
    ) -> AsyncGenerator[Delta, None]:
        """Streams completions of a prompt.

        Args:
            prompt: text, used as it is; token ids; or chat messages, put through the model's
                chat template.
            model: may be empty where one model is served.
            sampling: None is the server's defaults.
            request_id: to abort the request or ask about it; empty: a new id.
            priority: smaller is more urgent.
            tenant: the account that the request is billed to and scheduled fairly with.
            deadline_s: seconds from now after which the request ends with reason DEADLINE.
            cache_salt: requests of one tenant and equal salts share cached prefixes.
            include_stop_str_in_output: keep a matched stop string in the text.
            echo: send the prompt's text before the output.
            keep_special_tokens: leave special tokens in the text.
            keep_on_disconnect: leaving the stream early does not end the request, which can be
                resumed for some time.
            recover_always: when all that held the request is lost, the request is finished at
                once, and not when it is resumed.

        Raises:
            ServiceError: refused, or failed on the way; reason UNREACHABLE: no server there.
        """
        request_id = request_id or new_request_id()
        with messages.naming("request"):
            request = inference_pb2.GenerateRequest(
                request_id=request_id,
                model=model,
                sampling=messages.sampling_params(sampling or Sampling()),
                priority=priority,
                tenant=tenant,
                cache_salt=cache_salt,
                include_stop_str_in_output=include_stop_str_in_output,
                echo=echo,
                keep_special_tokens=keep_special_tokens,
                # A lost connection must not end what is to be resumed.
                keep_on_disconnect=keep_on_disconnect or self._policy.timeout_s > 0,
            )
            if self._policy.timeout_s and not request.sampling.HasField("seed"):
                # A request that all routers have lost is sent again, and must give the same tokens.
                request.sampling.seed = random.getrandbits(63)
            if recover_always:
                request.recover = request.RECOVER_ALWAYS
        with messages.naming("prompt"):
            messages.set_prompt(request, prompt)
        if deadline_s is not None:
            request.deadline.FromNanoseconds(time.time_ns() + int(deadline_s * 1e9))
        is_to_end = request.keep_on_disconnect and not keep_on_disconnect
        stream = RequestStream(
            self._routers,
            self._policy,
            self._tell,
            Received(),
            request_id=request_id,
            generate=request,
            ending=self._ending if is_to_end else None,
        )
        return stream.deltas()

    def resume(self, request_id: str, from_token: int = 0) -> AsyncGenerator[Delta, None]:
        """Goes on streaming a live or finished request, from the given generated token.

        Leaving the stream early does not end the request, unless the request was begun so.
        """
        # What the wire cannot carry is refused before the stream begins.
        messages.resume_request(request_id, from_token)
        received = Received(from_token=from_token)
        stream = RequestStream(
            self._routers, self._policy, self._tell, received, request_id=request_id
        )
        return stream.deltas()

    async def complete(self, prompt: Prompt, **options: Any) -> Completion:
        """The whole answer at once; options as `generate` takes them."""
        async with contextlib.aclosing(self.generate(prompt, **options)) as deltas:
            return await gather(deltas)

    async def abort(
        self, request_ids: Sequence[str] = (), *, tenant: str = ""
    ) -> list[AbortOutcome]:
        """Ends requests: 1 to 1000 of them, or instead of ids all live ones of a tenant.

        Outcomes come in the order asked.
        """
        request = inference_pb2.AbortRequest(request_ids=request_ids, tenant=tenant)
        response = await self._call("Abort", request)
        return [messages.to_outcome(outcome) for outcome in response.outcomes]

    async def status(self, request_id: str) -> StatusRecord:
        """The state of a request; ServiceError NOT_FOUND when the store has no record of it."""
        request = inference_pb2.GetStatusRequest(request_id=request_id)
        return messages.to_record(await self._call("GetStatus", request))

    async def explain(self, request_id: str) -> RequestHistory:
        """The scheduling history of a request that runs or finished recently."""
        request = inference_pb2.ExplainRequest(request_id=request_id)
        return messages.to_explanation(await self._call("Explain", request))

    async def models(self) -> list[ModelInfo]:
        """Models that at least one worker serves, by name."""
        response = await self._call("ListModels", inference_pb2.ListModelsRequest())
        return [messages.to_model(model) for model in response.models]

    async def pool(self) -> PoolInfo:
        """The workers and their load, as the router sees them."""
        return messages.to_pool(await self._call("GetPool", inference_pb2.GetPoolRequest()))

    async def audit(self) -> list[WorkerAudit]:
        """Who owns the KV blocks of each worker, and what is wrong, by worker."""
        response = await self._call("AuditPool", inference_pb2.AuditPoolRequest())
        return [messages.to_audit(worker) for worker in response.workers]

    async def drain(self, worker_id: str) -> WorkerStatus:
        """Lets a worker finish what it has and gives it nothing new, until it is started again.

        Raises:
            ServiceError: NOT_FOUND names the workers that there are; so for the next two methods.
        """
        return await self._update_worker(worker_id, drained=True)

    async def undrain(self, worker_id: str) -> WorkerStatus:
        """Gives a drained worker requests again."""
        return await self._update_worker(worker_id, drained=False)

    async def set_role(self, worker_id: str, role: str) -> WorkerStatus:
        """Makes a worker "mixed", "prefill" or "decode" for routers."""
        with messages.naming("role"):
            number = common_pb2.WorkerRole.Value(f"WORKER_ROLE_{role.upper()}")
        return await self._update_worker(worker_id, role=number)

    async def _update_worker(self, worker_id: str, **changes: Any) -> WorkerStatus:
        request = inference_pb2.UpdateWorkerRequest(worker_id=worker_id, **changes)
        return messages.to_worker((await self._call("UpdateWorker", request)).worker)

    async def watch_steps(
        self, *, after: Mapping[str, int] | None = None, history_s: float = 0.0
    ) -> AsyncGenerator[list[WorkerSteps], None]:
        """Steps of all workers, about four lists a second; an empty one when nothing happens.

        A stream that ends with a ServiceError goes on without a gap with the last position of each
        worker as `after`.

        Args:
            after: the position, by worker_id, to go on from.
            history_s: of other workers, the steps of the last so many seconds come first.
        """
        request = messages.watch_steps_request(after or {}, history_s)
        router = self._routers.current
        call = router.stub.WatchSteps(request, metadata=telemetry.outgoing_metadata())
        try:
            async with router.errors():
                async for response in call:
                    yield [messages.to_worker_steps(worker) for worker in response.workers]
        except UnreachableError:
            self._routers.leave(router)
            raise
        finally:
            call.cancel()

    async def step_batch(self, worker_id: str, position: int) -> StepBatch:
        """The requests of one of a worker's latest steps."""
        request = steps_pb2.GetStepBatchRequest(worker_id=worker_id, position=position)
        return messages.to_step_batch(await self._call("GetStepBatch", request))

    async def queue(self, *, offset: int = 0, limit: int = 100) -> QueuePage:
        """Requests that wait in the schedulers and in the router, from the first 10,000."""
        request = steps_pb2.ListQueueRequest(offset=offset, limit=limit)
        return messages.to_queue_page(await self._call("ListQueue", request))

    async def _call(self, method: str, request: Any) -> Any:
        """One unary call, with errors mapped; part of the caller's trace if there is one."""
        name = f"{SERVICE}/{method}"
        is_traced = bool(telemetry.current_traceparent())
        spanned = telemetry.start_span(name, kind=SpanKind.CLIENT) if is_traced else nullcontext()
        with spanned:
            for _ in range(len(self._routers) - 1):
                with contextlib.suppress(UnreachableError):
                    return await self._try(method, request)
            return await self._try(method, request)

    async def _try(self, method: str, request: Any) -> Any:
        router = self._routers.current
        try:
            async with router.errors():
                return await getattr(router.stub, method)(
                    request, timeout=_CALL_TIMEOUT_S, metadata=telemetry.outgoing_metadata()
                )
        except UnreachableError:
            self._routers.leave(router)
            raise


def new_request_id() -> str:
    """A new, random id."""
    return uuid.uuid4().hex


async def gather(deltas: AsyncIterator[Delta]) -> Completion:
    """Puts the deltas of one request together."""
    by_index: dict[int, list[Delta]] = defaultdict(list)
    request_id, usage = "", None
    num_resumes = 0
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    async for delta in deltas:
        by_index[delta.index].append(delta)
        request_id = delta.request_id
        usage = delta.usage or usage
        num_resumes = delta.num_resumes
        prompt_logprobs = delta.prompt_logprobs or prompt_logprobs
    return Completion(
        request_id=request_id,
        outputs=tuple(_output(by_index[index]) for index in sorted(by_index)),
        usage=usage,
        prompt_logprobs=prompt_logprobs,
        num_resumes=num_resumes,
    )


def _output(deltas: Sequence[Delta]) -> Output:
    ended = next((d for d in deltas if d.finish_reason is not None), None)
    return Output(
        text="".join(d.text for d in deltas),
        token_ids=tuple(t for d in deltas for t in d.token_ids),
        finish_reason=ended.finish_reason if ended else None,
        matched_stop=ended.matched_stop if ended else None,
        logprobs=tuple(entry for d in deltas for entry in d.logprobs),
    )
