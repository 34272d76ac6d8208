"""Converts headrace.v1 messages from and to this service's types, and validates incoming ones."""

import math
import re
import time
from collections.abc import Collection, Iterable, Sequence
from typing import assert_never, cast

import numpy as np

from headrace.service.columns import pack_int32, pack_uint32, unpack_int32
from headrace.service.errors import invalid
from headrace.service.protocol import (
    CANCEL_REASON,
    FINISH_REASON,
    REFUSAL_REASON,
    WORKER_ROLE,
    WORKER_STATE,
)
from headrace.service.sampling import check_values
from headrace.service.versions import version
from headrace.v1 import common_pb2, gpuworker_pb2, inference_pb2, scheduler_pb2
from headrace.vocabulary import CancelReason, FinishReason, WorkerRole
from scheduler.core.plan import Int32Array, RequestStatus, StepPlan, StepResult
from scheduler.managed import WorkerLoad
from scheduler.requests import Submission, largest_id
from scheduler.rpc.audit import row_tables_of
from scheduler.rpc.explain_wire import history_of
from scheduler.updates import RequestEnd, RouterUpdate
from scheduler.worker import RowLogprobs, WorkerResult, WorkerSpec

# One of several completions carries its number: "id#0".
# Of a worker's words about itself.
_MAX_WORDS_CHARS = 128
# As routers make them: TENANT/ID#COMPLETION, of which ID is always there.
_VALID_ID = re.compile(r"([A-Za-z0-9._-]{1,64}/)?[A-Za-z0-9._:-]{1,128}(#[0-9]{1,2})?")
_MAX_ROUTER_ID_CHARS = 256
_MAX_ABORTS = 1000
_MAX_INT32 = 2**31 - 1
# Of a worker's message about a failed row, which the client gets.
_MAX_ERROR_CHARS = 1000

# Limits that a worker must report, and their maxima: tables are allocated in these sizes.
_MOST_BY_LIMIT = {
    "max_model_len": 1 << 24,
    "block_size": 1 << 16,
    "num_kv_blocks": 1 << 24,
    "max_num_seqs": 1 << 14,
    "max_num_batched_tokens": 1 << 24,
    "vocab_size": 1 << 24,
}
_MAX_SPEC_TOKENS = 64
# A deeper pipeline gains nothing; see SchedulerConfig.pipeline_depth.
_MAX_PIPELINE_DEPTH = 2
_FINISH_REASON_BY_STATUS = {
    RequestStatus.STOPPED: FinishReason.STOP,
    RequestStatus.LENGTH_CAPPED: FinishReason.LENGTH,
    RequestStatus.REPETITION: FinishReason.REPETITION,
    RequestStatus.ABORTED: FinishReason.ABORTED,
    RequestStatus.ERROR: FinishReason.ERROR,
    RequestStatus.DEADLINE: FinishReason.DEADLINE,
}


def check_router_id(router_id: str) -> None:
    """ServiceError unless the router's name can be printed in a log line."""
    if len(router_id) > _MAX_ROUTER_ID_CHARS or not router_id.isprintable():
        must = f"must be at most {_MAX_ROUTER_ID_CHARS} characters, all of them printable"
        raise invalid("hello.router_id", must)


def submission_of(message: scheduler_pb2.Submission) -> Submission:
    """A router's submission; ServiceError names the field that is wrong."""
    if not _VALID_ID.fullmatch(message.request_id):
        raise invalid("request_id", "must be 1 to 128 characters of [A-Za-z0-9._:-]")
    prompt = unpack_int32(message.prompt_token_ids, "prompt_token_ids")
    generated = unpack_int32(message.generated_token_ids, "generated_token_ids")
    if not len(prompt):
        raise invalid("prompt_token_ids", "must not be empty")
    sampling = message.sampling
    if not sampling.max_tokens:
        raise invalid("sampling.max_tokens", "must be at least 1")
    if not sampling.HasField("seed"):
        raise invalid("sampling.seed", "must be set")
    check_values(sampling)
    for name in ("arrival_time_unix_s", "deadline_unix_s"):
        if not math.isfinite(getattr(message, name)):
            raise invalid(name, "must be a finite number")
    return Submission(
        handle=message.handle,
        request_id=message.request_id,
        prompt_token_ids=prompt,
        generated_token_ids=generated,
        max_tokens=sampling.max_tokens,
        sampling=sampling,
        largest_token_ids=_largest_token_ids(prompt, generated, sampling),
        model=message.model,
        worker_id=message.worker_id,
        epoch=message.epoch,
        stop_token_ids=tuple(sampling.stop_token_ids),
        min_tokens=sampling.min_tokens,
        ignore_eos=sampling.ignore_eos,
        wants_logprobs=sampling.HasField("logprobs"),
        wants_prompt_logprobs=sampling.HasField("prompt_logprobs"),
        priority=message.priority,
        arrival_time=message.arrival_time_unix_s,
        deadline=message.deadline_unix_s or None,
        cache_salt=message.cache_salt,
        tenant=message.tenant,
        traceparent=message.traceparent,
        history=history_of(message.history),
    )


def _largest_token_ids(
    prompt: Int32Array, generated: Int32Array, sampling: common_pb2.SamplingParams
) -> dict[str, int]:
    """The largest token id of each field that names any; ServiceError if one is negative."""
    largest = {"prompt_token_ids": largest_id(prompt)}
    if len(generated):
        largest["generated_token_ids"] = largest_id(generated)
    for name, token_id in largest.items():
        if token_id > _MAX_INT32:
            raise invalid(name, "must not be negative")
    if sampling.stop_token_ids:
        largest["sampling.stop_token_ids"] = max(sampling.stop_token_ids)
    if sampling.logit_bias:
        largest["sampling.logit_bias"] = max(sampling.logit_bias)
    for sequence in sampling.bad_token_ids:
        name = "sampling.bad_token_ids"
        largest[name] = max(largest.get(name, 0), *sequence.ids)
    return largest


def status_of_cancellation(message: scheduler_pb2.Cancellation) -> RequestStatus:
    """The final status that a router asks for."""
    match CANCEL_REASON.word(message.reason, CancelReason.ABORTED):
        case CancelReason.ABORTED:
            return RequestStatus.ABORTED
        case CancelReason.STOP_STRING:
            return RequestStatus.STOPPED
        case CancelReason.DEADLINE:
            return RequestStatus.DEADLINE
        case never:
            assert_never(never)


def scheduler_message(update: RouterUpdate) -> scheduler_pb2.SchedulerMessage:
    """What is sent to a router in one message."""
    has_step = len(update.handles) or update.ends or update.admissions
    return scheduler_pb2.SchedulerMessage(
        step_update=_step_update(update) if has_step else None,
        refusals=[
            scheduler_pb2.Refusal(
                handle=refusal.handle,
                reason=REFUSAL_REASON.number(refusal.reason),
                message=refusal.message,
                field=refusal.field,
            )
            for refusal in update.refusals
        ],
        moved=update.moved,
        aborts=update.aborts,
    )


def pool_snapshot(
    scheduler_id: str, loads: Iterable[WorkerLoad], *, is_draining: bool
) -> scheduler_pb2.PoolSnapshot:
    """The pool as routers see it."""
    return scheduler_pb2.PoolSnapshot(
        scheduler_id=scheduler_id,
        workers=[worker_message(load) for load in loads],
        draining=is_draining,
        version=version(),
        time_unix_s=time.time(),
    )


def ids_to_abort(message: inference_pb2.AbortRequest) -> Sequence[str]:
    """The ids of the requests to end."""
    if message.tenant:
        raise invalid("tenant", "must be empty; a router knows the requests of a tenant")
    if not 1 <= len(message.request_ids) <= _MAX_ABORTS:
        raise invalid("request_ids", f"must be 1 to {_MAX_ABORTS} ids")
    for position, request_id in enumerate(message.request_ids):
        if not _VALID_ID.fullmatch(request_id):
            raise invalid(
                f"request_ids[{position}]", "must be 1 to 128 characters of [A-Za-z0-9._:-]"
            )
    return message.request_ids


def abort_response(
    request_ids: Sequence[str], found: Collection[str]
) -> inference_pb2.AbortResponse:
    """The outcome for each id; `found` lived here."""
    outcome = inference_pb2.AbortOutcome
    return inference_pb2.AbortResponse(
        outcomes=[
            outcome(
                request_id=request_id,
                result=outcome.RESULT_ABORTED if request_id in found else outcome.RESULT_NOT_FOUND,
            )
            for request_id in request_ids
        ]
    )


def plan_message(
    plan: StepPlan, samplings: Sequence[object], traceparent: str, *, wants_audit: bool = False
) -> gpuworker_pb2.StepPlan:
    """A plan for the worker; samplings has one entry for each of plan.row_requests."""
    return gpuworker_pb2.StepPlan(
        step_id=plan.step_id,
        freed_rows=pack_int32(plan.freed_rows),
        row_requests=[
            gpuworker_pb2.RowRequest(
                row=request.row,
                request_id=request.request_id,
                token_ids=pack_int32(request.token_ids),
                num_prompt_tokens=request.num_prompt_tokens,
                sampling=cast("common_pb2.SamplingParams", sampling),
            )
            for request, sampling in zip(plan.row_requests, samplings, strict=True)
        ],
        appended_block_rows=pack_int32(plan.appended_block_rows),
        appended_block_ids=pack_int32(plan.appended_block_ids),
        rows=pack_int32(plan.rows),
        num_computed_tokens=pack_int32(plan.num_computed_tokens),
        num_scheduled_tokens=pack_int32(plan.num_scheduled_tokens),
        num_draft_tokens=pack_int32(plan.num_draft_tokens),
        draft_token_ids=pack_int32(plan.draft_token_ids),
        traceparent=traceparent,
        audit=wants_audit,
    )


def worker_result(message: gpuworker_pb2.StepResult) -> WorkerResult:
    """A worker's result; ServiceError names a column of the wrong length.

    InFlight.check compares the values with the plan.
    """
    num_sampled_tokens = unpack_int32(message.num_sampled_tokens, "num_sampled_tokens")
    token_ids = unpack_int32(message.token_ids, "token_ids")
    num_draft_tokens = unpack_int32(message.num_draft_tokens, "num_draft_tokens")
    draft_token_ids = unpack_int32(message.draft_token_ids, "draft_token_ids")
    _check_counts(num_sampled_tokens, token_ids, "num_sampled_tokens")
    _check_counts(num_draft_tokens, draft_token_ids, "num_draft_tokens")
    message_by_failed_row = {
        error.row: error.message[:_MAX_ERROR_CHARS] for error in message.errors
    }
    return WorkerResult(
        step=StepResult(
            step_id=message.step_id,
            num_sampled_tokens=num_sampled_tokens,
            token_ids=token_ids,
            num_draft_tokens=num_draft_tokens,
            draft_token_ids=draft_token_ids,
            failed_rows=tuple(message_by_failed_row),
        ),
        logprobs=tuple(_row_logprobs(entry) for entry in message.logprobs),
        message_by_failed_row=message_by_failed_row,
        audit=row_tables_of(message.audit) if message.HasField("audit") else None,
    )


def _row_logprobs(message: gpuworker_pb2.RowLogprobs) -> RowLogprobs:
    largest_token_id = 0
    for entry in (*message.tokens, *message.prompt_tokens):
        if len(entry.top_token_ids) != len(entry.top_logprobs):
            raise invalid("logprobs.top_logprobs", "must be as many as top_token_ids")
        if any(map(math.isnan, (entry.logprob, *entry.top_logprobs))):
            raise invalid("logprobs.logprob", "must be a number")
        largest_token_id = max(largest_token_id, entry.token_id, *entry.top_token_ids)
    return RowLogprobs(message.row, message.tokens, message.prompt_tokens, largest_token_id)


def worker_info(message: common_pb2.Worker) -> WorkerSpec:
    """What a worker says of itself; ServiceError names the field that makes no sense."""
    for name, most in _MOST_BY_LIMIT.items():
        if not 1 <= getattr(message, name) <= most:
            raise invalid(name, f"must be at least 1 and at most {most}")
    if message.num_spec_tokens > _MAX_SPEC_TOKENS:
        raise invalid("num_spec_tokens", f"must be at most {_MAX_SPEC_TOKENS}")
    if not message.worker_id:
        raise invalid("worker_id", "must not be empty")
    return WorkerSpec(
        worker_id=message.worker_id,
        incarnation=message.incarnation,
        model=message.model,
        max_model_len=message.max_model_len,
        block_size=message.block_size,
        num_kv_blocks=message.num_kv_blocks,
        max_num_seqs=message.max_num_seqs,
        max_num_batched_tokens=message.max_num_batched_tokens,
        vocab_size=message.vocab_size,
        eos_token_ids=tuple(message.eos_token_ids),
        num_spec_tokens=message.num_spec_tokens,
        pipeline_depth=max(1, min(message.pipeline_depth, _MAX_PIPELINE_DEPTH)),
        role=WORKER_ROLE.word(message.role, WorkerRole.MIXED),
        device=message.device,
        dtype=message.dtype,
        version=message.version[:_MAX_WORDS_CHARS],
        driver=message.driver[:_MAX_WORDS_CHARS],
        device_memory_bytes=message.device_memory_bytes,
    )


def worker_message(load: WorkerLoad) -> common_pb2.Worker:
    """A worker and its load, as routers are told."""
    info = load.info
    return common_pb2.Worker(
        worker_id=info.worker_id,
        incarnation=info.incarnation,
        model=info.model,
        role=WORKER_ROLE.number(info.role),
        state=WORKER_STATE.number(load.state),
        max_model_len=info.max_model_len,
        block_size=info.block_size,
        num_kv_blocks=info.num_kv_blocks,
        max_num_seqs=info.max_num_seqs,
        max_num_batched_tokens=info.max_num_batched_tokens,
        vocab_size=info.vocab_size,
        eos_token_ids=info.eos_token_ids,
        num_free_kv_blocks=load.num_free_blocks,
        num_running=load.num_running,
        num_waiting=load.num_waiting,
        device=info.device,
        dtype=info.dtype,
        version=info.version,
        driver=info.driver,
        device_memory_bytes=info.device_memory_bytes,
        displaces_by_priority=info.displaces_by_priority,
    )


def _step_update(update: RouterUpdate) -> scheduler_pb2.StepUpdate:
    return scheduler_pb2.StepUpdate(
        handles=pack_uint32(update.handles),
        num_new_tokens=pack_int32(update.num_new_tokens),
        token_ids=pack_int32(update.token_ids),
        draft_counts=pack_int32(update.draft_counts),
        finished=[_finished(end) for end in update.ends],
        admitted=[
            scheduler_pb2.Admitted(
                handle=new.handle,
                num_cached_tokens=new.admission.num_cached_tokens,
                time_unix_s=new.admission.time_s,
                worker_id=new.admission.worker_id,
            )
            for new in update.admissions
        ],
        logprobs=[
            scheduler_pb2.RequestLogprobs(
                handle=entry.request.submission.handle,
                tokens=cast("Sequence[common_pb2.TokenLogprobs]", entry.tokens),
                prompt_tokens=cast("Sequence[common_pb2.TokenLogprobs]", entry.prompt_tokens),
            )
            for entry in update.logprobs
        ],
    )


def _finished(end: RequestEnd) -> scheduler_pb2.Finished:
    return scheduler_pb2.Finished(
        handle=end.request.submission.handle,
        reason=FINISH_REASON.number(_FINISH_REASON_BY_STATUS[end.facts.status]),
        stop_token_id=end.facts.stop_token_id,
        message=end.message,
        num_preemptions=end.facts.num_preemptions,
    )


def _check_counts(counts: Int32Array, values: Int32Array, field: str) -> None:
    if int(np.add.reduce(counts, dtype=np.int64)) != len(values):
        raise invalid(field, f"must sum up to {len(values)}")
