"""Which engine suits a request: what an engine can never serve, and how busy an engine is."""

from headrace.vocabulary import RefusalReason
from scheduler.core.plan import Int32Array
from scheduler.engine import WorkerEngine
from scheduler.requests import Submission, largest_id
from scheduler.updates import NotTaken


def busyness(engine: WorkerEngine) -> tuple[float, int]:
    """Smaller is less loaded: requests per sequence slot, then blocks in use."""
    used_blocks = engine.info.num_kv_blocks - engine.num_free_blocks
    num_requests = engine.num_requests - engine.num_paused
    return num_requests / engine.info.max_num_seqs, used_blocks


def refusal(engine: WorkerEngine, submission: Submission, generated: Int32Array) -> NotTaken | None:
    """Why this engine can never serve this request, or None.

    generated is [num_tokens] tokens of earlier epochs; they take room as the prompt does.
    """
    vocab_size, largest_token_ids = engine.info.vocab_size, submission.largest_token_ids
    if len(generated):
        largest_token_ids = {**largest_token_ids, "generated_token_ids": largest_id(generated)}
    for name, token_id in largest_token_ids.items():
        if token_id >= vocab_size:
            return NotTaken(
                submission.handle,
                RefusalReason.INVALID,
                f"{name}: must be below {vocab_size}",
                name,
            )
    if engine.end_reached(submission, generated) is not None:
        return None
    num_tokens = len(submission.prompt_token_ids) + len(generated)
    why = engine.refusal(num_tokens, submission.max_tokens)
    return NotTaken(submission.handle, RefusalReason.TOO_LONG, why) if why is not None else None
