"""Decides whether a request ends with its newest token."""

from collections.abc import Sequence

import numpy as np

from scheduler.core.plan import Int32Array, RepetitionLimit, RequestStatus
from scheduler.core.request import Request

# A final status, and the stop token that caused it.
End = tuple[RequestStatus, int | None]


def stop_status(request: Request, token_ids: Int32Array, max_num_tokens: int) -> End | None:
    """The final status of a request and the stop token, or None if the request goes on.

    Tested in this order: EOS, stop ids, length, repetition. Before min_tokens only the length is
    tested. An EOS as the last allowed token gives STOPPED, not LENGTH_CAPPED.

    Args:
        token_ids: [num_tokens] prompt and generated tokens, the newest last.
        max_num_tokens: tokens at which any request ends.
    """
    spec = request.spec
    num_outputs = len(token_ids) - request.num_prompt_tokens
    is_free_to_stop = num_outputs >= spec.min_tokens
    if is_free_to_stop:
        token = int(token_ids[-1])
        if token in spec.eos_token_ids:
            return RequestStatus.STOPPED, None
        if token in spec.stop_token_ids:
            return RequestStatus.STOPPED, token
    if len(token_ids) >= max_num_tokens or num_outputs >= spec.max_tokens:
        return RequestStatus.LENGTH_CAPPED, None
    if (
        is_free_to_stop
        and spec.repetition is not None
        and is_repeating(token_ids[request.num_prompt_tokens :], spec.repetition)
    ):
        return RequestStatus.REPETITION, None
    return None


def is_repeating(output_token_ids: Int32Array | Sequence[int], limit: RepetitionLimit) -> bool:
    """Whether the output ends in some pattern min_count times; shorter patterns first."""
    output = np.asarray(output_token_ids)
    if limit.max_pattern_size <= 0 or limit.min_count < 2:
        return False
    for size in range(max(limit.min_pattern_size, 1), limit.max_pattern_size + 1):
        num_needed = size * limit.min_count
        if num_needed > len(output):
            return False
        tail = output[-num_needed:].reshape(limit.min_count, size)
        if (tail == tail[0]).all():
            return True
    return False
