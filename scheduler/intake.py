"""Converts a live request for a scheduling core, and tells when the core is not needed."""

from scheduler.core.block_hash import BLOCKS_PER_SLICE, BlockHashes
from scheduler.core.plan import (
    FinishedRequest,
    Int32Array,
    NewRequest,
    RequestStatus,
    SchedulerConfig,
)
from scheduler.requests import LiveRequest, Submission
from scheduler.worker import WorkerSpec


def new_request(request: LiveRequest, info: WorkerSpec, *, hashes_ahead: bool) -> NewRequest:
    """The request as the core of a worker takes it.

    With hashes_ahead, a long prompt has block_hashes that the caller fills before the core gets it.
    """
    submission = request.submission
    is_long = len(submission.prompt_token_ids) > BLOCKS_PER_SLICE * info.block_size
    return NewRequest(
        key=request.key,
        request_id=submission.request_id,
        prompt_token_ids=submission.prompt_token_ids,
        output_token_ids=request.generated_token_ids,
        max_tokens=submission.max_tokens,
        arrival_time=submission.arrival_time,
        priority=submission.priority,
        eos_token_ids=() if submission.ignore_eos else info.eos_token_ids,
        stop_token_ids=submission.stop_token_ids,
        min_tokens=submission.min_tokens,
        cache_salt=submission.cache_salt,
        # Log probabilities of the prompt exist only for prompt tokens that are computed.
        skip_reading_prefix_cache=submission.wants_prompt_logprobs,
        deadline=submission.deadline,
        block_hashes=(
            BlockHashes(info.block_size, submission.cache_salt)
            if is_long and hashes_ahead
            else None
        ),
        is_recovering=request.is_recovering,
    )


def end_reached(
    submission: Submission, generated: Int32Array, info: WorkerSpec, config: SchedulerConfig
) -> RequestStatus | None:
    """How a request has ended with its last generated token; None if it goes on.

    generated is [num_tokens] of an earlier epoch, whose end may have been lost on the way.
    """
    if not len(generated):
        return None
    if len(generated) >= submission.min_tokens:
        ends = submission.stop_token_ids
        if not submission.ignore_eos:
            ends += info.eos_token_ids
        if generated[-1] in ends:
            return RequestStatus.STOPPED
    num_tokens = len(submission.prompt_token_ids) + len(generated)
    if len(generated) >= submission.max_tokens or num_tokens >= config.max_num_tokens:
        return RequestStatus.LENGTH_CAPPED
    return None


def unscheduled_end(request: LiveRequest, status: RequestStatus) -> FinishedRequest:
    """The end of a request that no core has."""
    return FinishedRequest(
        request.key, request.submission.request_id, status, None, 0, request.generated_token_ids
    )
