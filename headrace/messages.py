"""Converts the client's types to messages and back."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields

from headrace.service.errors import invalid
from headrace.service.protocol import FINISH_REASON
from headrace.steps import QueuePage, StepBatch, StepRow, WaitingRequest, WorkerStep, WorkerSteps
from headrace.types import (
    AbortOutcome,
    AbortResult,
    ChatMessage,
    Delta,
    DurationCounts,
    ExplainEvent,
    ModelInfo,
    PoolInfo,
    RequestHistory,
    Sampling,
    SchedulerLink,
    StageTime,
    StatusRecord,
    TenantLoad,
    TokenLogprobs,
    Usage,
    WorkerAudit,
    WorkerStatus,
)
from headrace.v1 import common_pb2, inference_pb2, steps_pb2

Prompt = str | Sequence[int] | Sequence[ChatMessage]

_ABORT_RESULTS = {
    inference_pb2.AbortOutcome.RESULT_ABORTED: AbortResult.ABORTED,
    inference_pb2.AbortOutcome.RESULT_ALREADY_FINISHED: AbortResult.ALREADY_FINISHED,
}


def set_prompt(request: inference_pb2.GenerateRequest, prompt: Prompt) -> None:
    """Sets the field for the prompt's form: text, chat messages or token ids."""
    if isinstance(prompt, str):
        request.text = prompt
    elif prompt and isinstance(prompt[0], ChatMessage):
        request.chat.SetInParent()
        for message in prompt:
            request.chat.messages.add(role=message.role, content=message.content)  # type: ignore[union-attr]
    else:
        request.token_ids.ids.extend(prompt)  # type: ignore[arg-type]
        request.token_ids.SetInParent()


def sampling_params(sampling: Sampling) -> common_pb2.SamplingParams:
    """Names are the same on both sides; None stays unset."""
    params = common_pb2.SamplingParams()
    for field in fields(Sampling):
        if (value := getattr(sampling, field.name)) is not None:
            with naming(field.name):
                params.MergeFrom(common_pb2.SamplingParams(**{field.name: value}))
    return params


def resume_request(
    request_id: str, from_token: int, positions: Sequence[int] = ()
) -> inference_pb2.ResumeRequest:
    """Asks for the tokens from positions[index] on; of further completions, from from_token on."""
    with naming("from_token"):
        return inference_pb2.ResumeRequest(
            request_id=request_id, from_token=from_token, from_token_by_index=positions
        )


@contextlib.contextmanager
def naming(field: str) -> Iterator[None]:
    """What the wire cannot carry (a negative count, half a character) is the field's fault."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise invalid(field, str(error)) from error


def to_deltas(response: inference_pb2.GenerateResponse) -> Iterator[Delta]:
    """One delta per output; what belongs to the whole request goes with the last or first."""
    usage = None
    if response.HasField("usage"):
        usage = Usage(**{f.name: getattr(response.usage, f.name) for f in fields(Usage)})
    prompt_logprobs = _logprobs(response.prompt_logprobs)
    last = len(response.outputs) - 1
    if last < 0:
        yield Delta(request_id=response.request_id, usage=usage, prompt_logprobs=prompt_logprobs)
    for i, output in enumerate(response.outputs):
        matched = output.WhichOneof("matched_stop")
        yield Delta(
            request_id=response.request_id,
            index=output.index,
            text=output.text,
            token_ids=tuple(output.token_ids),
            first_token_position=output.first_token_position,
            logprobs=_logprobs(output.logprobs),
            text_offsets=tuple(output.text_offsets),
            finish_reason=FINISH_REASON.word(output.finish_reason, None),
            matched_stop=getattr(output, matched) if matched else None,
            usage=usage if i == last else None,
            prompt_logprobs=prompt_logprobs if i == 0 else (),
        )


def _logprobs(entries: Iterable[common_pb2.TokenLogprobs]) -> tuple[TokenLogprobs, ...]:
    return tuple(
        TokenLogprobs(
            e.token_id, e.logprob, e.rank, tuple(zip(e.top_token_ids, e.top_logprobs, strict=True))
        )
        for e in entries
    )


def to_outcome(o: inference_pb2.AbortOutcome) -> AbortOutcome:
    """What became of one id."""
    return AbortOutcome(o.request_id, _ABORT_RESULTS.get(o.result, AbortResult.NOT_FOUND))


def to_record(r: inference_pb2.GetStatusResponse) -> StatusRecord:
    """A request's record."""
    return StatusRecord(
        request_id=r.request_id,
        state=r.state,
        epoch=r.epoch,
        tenant=r.tenant,
        model=r.model,
        create_time_unix_s=r.create_time.ToNanoseconds() / 1e9,
        update_time_unix_s=r.update_time.ToNanoseconds() / 1e9,
        prompt_tokens=r.prompt_tokens,
        completion_tokens=r.completion_tokens,
        detail=r.detail,
        router_id=r.router_id,
        scheduler_id=r.scheduler_id,
        worker_id=r.worker_id,
    )


def to_explanation(r: inference_pb2.ExplainResponse) -> RequestHistory:
    """A request's timeline and sums."""
    return RequestHistory(
        request_id=r.request_id,
        events=tuple(map(_explain_event, r.events)),
        steps_waited_by_cause=dict(r.steps_waited_by_cause),
        recomputed_tokens=r.recomputed_tokens,
        cached_tokens=r.cached_tokens,
        num_preemptions=r.num_preemptions,
        breakdown=tuple(
            StageTime(stage=part.stage, cause=part.cause, seconds=part.seconds)
            for part in r.breakdown
        ),
        total_s=r.total_s,
        queued_with=tuple(map(_tenant_load, r.queued_with)),
        begin_time_unix_s=r.begin_time_unix_s,
    )


def to_model(m: inference_pb2.Model) -> ModelInfo:
    """A model that is served."""
    return ModelInfo(
        name=m.name,
        max_model_len=m.max_model_len,
        vocab_size=m.vocab_size,
        num_ready_workers=m.num_ready_workers,
        has_chat_template=m.has_chat_template,
        # Seven digits are what a 32-bit number has: 0.2, not 0.20000000298.
        default_sampling={
            field.name: float(f"{value:.7g}") if isinstance(value, float) else value
            for field, value in m.default_sampling.ListFields()
        },
        default_chat_max_tokens=m.default_chat_max_tokens,
    )


def to_pool(r: inference_pb2.GetPoolResponse) -> PoolInfo:
    """The workers and their load."""
    return PoolInfo(
        workers=tuple(map(to_worker, r.workers)),
        num_queued=r.num_queued,
        num_in_flight=r.num_in_flight,
        num_paused=r.num_paused,
        version=r.version,
        time_unix_s=r.time_unix_s,
        schedulers=tuple(map(_scheduler_link, r.schedulers)),
        has_store=r.has_store,
        is_store_up=r.is_store_up,
        durations=tuple(
            DurationCounts(
                metric=d.metric, model=d.model, bounds_s=tuple(d.bounds_s), counts=tuple(d.counts)
            )
            for d in r.durations
        ),
        queued_by_tenant=tuple(map(_tenant_load, r.queued_by_tenant)),
    )


def _scheduler_link(s: inference_pb2.SchedulerLink) -> SchedulerLink:
    return SchedulerLink(
        address=s.address,
        scheduler_id=s.scheduler_id,
        connected=s.connected,
        version=s.version,
        clock_offset_s=s.clock_offset_s,
        error=s.error,
    )


def to_audit(a: common_pb2.WorkerAudit) -> WorkerAudit:
    """The audit of one worker."""
    return WorkerAudit(
        worker_id=a.worker_id,
        scheduler_id=a.scheduler_id,
        num_kv_blocks=a.num_kv_blocks,
        num_free_blocks=a.num_free_blocks,
        num_cached_blocks=a.num_cached_blocks,
        num_owned_blocks=a.num_owned_blocks,
        num_requests=a.num_requests,
        num_compared_rows=a.num_compared_rows if a.HasField("num_compared_rows") else None,
        faults=tuple(a.faults),
    )


def watch_steps_request(after: Mapping[str, int], history_s: float) -> steps_pb2.WatchStepsRequest:
    """Asks for the steps after a position of each worker."""
    with naming("after or history_s"):
        return steps_pb2.WatchStepsRequest(
            after=[
                steps_pb2.StepPosition(worker_id=worker_id, position=position)
                for worker_id, position in after.items()
            ],
            history_s=history_s,
        )


def to_worker_steps(w: steps_pb2.WorkerSteps) -> WorkerSteps:
    """New steps of a worker."""
    return WorkerSteps(
        worker_id=w.worker_id,
        scheduler_id=w.scheduler_id,
        model=w.model,
        steps=tuple(map(_step, w.steps)),
        has_gap=w.has_gap,
    )


def to_step_batch(r: steps_pb2.GetStepBatchResponse) -> StepBatch:
    """The requests of a step."""
    rows = tuple(
        StepRow(
            request_id=row.request_id,
            num_tokens=row.num_tokens,
            num_drafts=row.num_drafts,
            num_computed_tokens=row.num_computed_tokens,
            kind=steps_pb2.StepRow.Kind.Name(row.kind).removeprefix("KIND_").lower(),
        )
        for row in r.rows
    )
    return StepBatch(worker_id=r.worker_id, step=_step(r.step), rows=rows)


def to_queue_page(r: steps_pb2.ListQueueResponse) -> QueuePage:
    """Requests that wait."""
    names = [field.name for field in fields(WaitingRequest)]
    return QueuePage(
        requests=tuple(WaitingRequest(**{n: getattr(q, n) for n in names}) for q in r.requests),
        num_waiting=r.num_waiting,
    )


_STEP_FIELDS = tuple(
    field.name for field in fields(WorkerStep) if field.name != "num_waiting_by_reason"
)


def _step(s: steps_pb2.Step) -> WorkerStep:
    return WorkerStep(
        num_waiting_by_reason=dict(s.num_waiting_by_reason),
        **{name: getattr(s, name) for name in _STEP_FIELDS},
    )


def _tenant_load(load: inference_pb2.TenantLoad) -> TenantLoad:
    return TenantLoad(
        tenant=load.tenant, num_requests=load.num_requests, num_tokens=load.num_tokens
    )


def _explain_event(e: inference_pb2.ExplainEvent) -> ExplainEvent:
    return ExplainEvent(
        first_step=e.first_step,
        last_step=e.last_step,
        kind=e.kind,
        detail=e.detail,
        num_tokens=e.num_tokens,
        queue_position=e.queue_position if e.HasField("queue_position") else None,
        time_unix_s=e.time_unix_s,
        duration_s=e.duration_s,
        num_needed_blocks=e.num_needed_blocks,
        num_free_blocks=e.num_free_blocks,
    )


def to_worker(w: common_pb2.Worker) -> WorkerStatus:
    """A worker and its load."""
    return WorkerStatus(
        worker_id=w.worker_id,
        model=w.model,
        role=common_pb2.WorkerRole.Name(w.role).removeprefix("WORKER_ROLE_").lower(),
        state=common_pb2.WorkerState.Name(w.state).removeprefix("WORKER_STATE_").lower(),
        device=w.device,
        dtype=w.dtype,
        num_running=w.num_running,
        num_waiting=w.num_waiting,
        max_num_seqs=w.max_num_seqs,
        num_free_kv_blocks=w.num_free_kv_blocks,
        num_kv_blocks=w.num_kv_blocks,
        block_size=w.block_size,
        max_model_len=w.max_model_len,
        max_num_batched_tokens=w.max_num_batched_tokens,
        version=w.version,
        driver=w.driver,
        device_memory_bytes=w.device_memory_bytes,
    )
