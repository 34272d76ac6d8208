"""Messages to and from a scheduler, between proto and the router's own types."""

from array import array
from collections.abc import Iterable
from typing import assert_never

from headrace.service.columns import pack_int32, unpack_int32, unpack_uint32
from headrace.service.errors import invalid
from headrace.service.protocol import (
    CANCEL_REASON,
    FINISH_REASON,
    REFUSAL_REASON,
    WORKER_ROLE,
    WORKER_STATE,
)
from headrace.v1 import common_pb2, inference_pb2, scheduler_pb2
from headrace.vocabulary import CancelReason, FinishReason, WorkerRole, WorkerState
from router.core.credit import WorkerReport
from router.outputs import Admitted, CompletionFinish, Logprobs, Refusal, StepOutputs
from router.request import ClientCompletion

# For a worker that does not report it.
_DEFAULT_BATCHED_TOKENS = 2048


def to_submission(completion: ClientCompletion) -> scheduler_pb2.Submission:
    """A completion with the tokens generated so far; text and stop strings stay in the router."""
    request = completion.request
    spec = request.spec
    assert isinstance(spec.sampling, common_pb2.SamplingParams), "the wire's own parameters"
    submission = scheduler_pb2.Submission(
        handle=completion.handle,
        request_id=completion.request_id,
        epoch=completion.epoch,
        worker_id=completion.worker_id,
        model=spec.model,
        prompt_token_ids=pack_int32(request.prompt_token_ids),
        generated_token_ids=completion.known_token_ids.tobytes(),
        sampling=spec.sampling,
        priority=completion.priority,
        arrival_time_unix_s=completion.arrived_unix_s,
        deadline_unix_s=spec.deadline_unix_s or 0.0,
        cache_salt=request.cache_salt,
        tenant=spec.tenant,
        traceparent=spec.traceparent,
        history=[
            inference_pb2.ExplainEvent(
                kind="LOST", detail=f"its scheduler {name} was lost", time_unix_s=time_unix_s
            )
            for time_unix_s, name in completion.losses
        ],
    )
    submission.sampling.seed = completion.seed
    submission.sampling.max_tokens = request.max_tokens
    submission.sampling.n = 1
    if completion.index or completion.token_ids or completion.first_token:
        # They are the same for all completions, and come with a completion's first token.
        submission.sampling.ClearField("prompt_logprobs")
    submission.sampling.stop_token_ids.extend(spec.stop_by_token_id)
    del submission.sampling.stop[:]
    del submission.sampling.bad_words[:]
    return submission


def to_cancellation(handle: int, finish: CompletionFinish) -> scheduler_pb2.Cancellation:
    """The cancellation of the completion that was sent under the handle, and ends like this."""
    reason = CANCEL_REASON.number(_cancel_reason(finish.reason))
    return scheduler_pb2.Cancellation(handle=handle, reason=reason, detail=finish.message)


def _cancel_reason(reason: FinishReason) -> CancelReason:
    """How a completion that ends here for this reason ends in its scheduler."""
    match reason:
        case FinishReason.STOP:
            return CancelReason.STOP_STRING
        case FinishReason.DEADLINE:
            return CancelReason.DEADLINE
        case (
            FinishReason.ABORTED
            | FinishReason.ERROR
            | FinishReason.LENGTH
            | FinishReason.REPETITION
        ):
            return CancelReason.ABORTED
        case never:
            assert_never(never)


def to_pause(handle: int, *, is_paused: bool) -> scheduler_pb2.Pause:
    """The pause of the completion that was sent under the handle, or the pause's end."""
    return scheduler_pb2.Pause(handle=handle, paused=is_paused)


def to_step_outputs(update: scheduler_pb2.StepUpdate) -> StepOutputs:
    """One step's columns; ServiceError names a column of the wrong length."""
    handles = unpack_uint32(update.handles, "step_update.handles").tolist()
    num_new_tokens = unpack_int32(update.num_new_tokens, "step_update.num_new_tokens").tolist()
    token_ids = array("i")
    token_ids.frombytes(unpack_int32(update.token_ids, "step_update.token_ids").tobytes())
    if len(handles) != len(num_new_tokens):
        raise invalid("step_update.num_new_tokens", f"must have {len(handles)} entries")
    if sum(num_new_tokens) != len(token_ids):
        raise invalid("step_update.token_ids", f"must have {sum(num_new_tokens)} entries")
    draft_counts = unpack_int32(update.draft_counts, "step_update.draft_counts").tolist()
    if len(draft_counts) not in {0, 2 * len(handles)}:
        raise invalid("step_update.draft_counts", f"must have {2 * len(handles)} entries, or none")
    return StepOutputs(
        handles=handles,
        num_new_tokens=num_new_tokens,
        token_ids=token_ids,
        draft_counts=list(zip(draft_counts[::2], draft_counts[1::2], strict=True)),
        finish_by_handle={f.handle: _finish(f) for f in update.finished},
        admissions=[
            Admitted(a.handle, a.num_cached_tokens, a.time_unix_s) for a in update.admitted
        ],
        logprobs=[
            Logprobs(entry.handle, _encoded(entry.tokens), _encoded(entry.prompt_tokens))
            for entry in update.logprobs
        ],
    )


def _encoded(logprobs: Iterable[common_pb2.TokenLogprobs]) -> list[bytes]:
    return [entry.SerializeToString() for entry in logprobs]


def _finish(finished: scheduler_pb2.Finished) -> CompletionFinish:
    return CompletionFinish(
        FINISH_REASON.word(finished.reason, FinishReason.ERROR),
        stop_token_id=finished.stop_token_id if finished.HasField("stop_token_id") else None,
        message=finished.message,
        num_preemptions=finished.num_preemptions,
    )


def to_refusal(refusal: scheduler_pb2.Refusal) -> Refusal:
    """A scheduler's refusal of a completion."""
    reason = REFUSAL_REASON.word(refusal.reason, None)
    return Refusal(refusal.handle, reason, refusal.message, refusal.field)


def to_report(worker: common_pb2.Worker) -> WorkerReport:
    """A worker as placement sees it."""
    return WorkerReport(
        worker_id=worker.worker_id,
        incarnation=worker.incarnation,
        model=worker.model,
        state=WORKER_STATE.word(worker.state, WorkerState.LOST),
        max_model_len=worker.max_model_len,
        block_size=worker.block_size,
        num_kv_blocks=worker.num_kv_blocks,
        max_num_seqs=worker.max_num_seqs,
        vocab_size=worker.vocab_size,
        num_free_kv_blocks=worker.num_free_kv_blocks,
        num_running=worker.num_running,
        num_waiting=worker.num_waiting,
        max_num_batched_tokens=worker.max_num_batched_tokens or _DEFAULT_BATCHED_TOKENS,
        role=WORKER_ROLE.word(worker.role, WorkerRole.MIXED),
        displaces_by_priority=worker.displaces_by_priority,
    )
