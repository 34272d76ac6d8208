"""Checks of a plan; the error message names the column and the fault."""

import numpy as np

from gpuworker.core.plan import Int32Array, PlanError, ReceivedPlan


def check_columns(plan: ReceivedPlan, vocab_size: int, max_num_batched_tokens: int) -> Int32Array:
    """Checks lengths and signs; returns num_draft_tokens as [num_reqs].

    Raises:
        PlanError: naming the column.
    """
    num_reqs = plan.num_reqs
    for name in ("num_computed_tokens", "num_scheduled_tokens"):
        if len(getattr(plan, name)) != num_reqs:
            raise PlanError(f"{name}: {len(getattr(plan, name))} values for {num_reqs} rows")
    drafts = plan.num_draft_tokens
    if not len(drafts):
        drafts = np.zeros(num_reqs, dtype=np.int32)
    if len(drafts) != num_reqs or drafts.sum() != len(plan.draft_token_ids):
        raise PlanError(
            f"num_draft_tokens: {len(drafts)} values summing to {int(drafts.sum())} for "
            f"{num_reqs} rows and {len(plan.draft_token_ids)} draft_token_ids"
        )
    if not num_reqs:
        return drafts
    if plan.num_computed_tokens.min() < 0:
        raise PlanError("num_computed_tokens: must be >= 0")
    if (plan.num_scheduled_tokens <= drafts).any() or drafts.min() < 0:
        raise PlanError("num_scheduled_tokens: must exceed num_draft_tokens, which is >= 0")
    ids = plan.draft_token_ids
    if len(ids) and (ids.min() < -1 or ids.max() >= vocab_size):
        raise PlanError(f"draft_token_ids: must be in [-1, {vocab_size})")
    total = int(plan.num_scheduled_tokens.sum())
    if total > max_num_batched_tokens:
        raise PlanError(
            f"num_scheduled_tokens: {total} in all, at most max_num_batched_tokens "
            f"{max_num_batched_tokens}"
        )
    return drafts


def what_is_wrong(
    plan: ReceivedPlan,
    i: int,
    name: str,
    *,
    num_drafts: int,
    num_tokens: int,
    num_blocks: int,
    max_model_len: int,
) -> str:
    """Says why the i-th row of a plan, called `name`, cannot advance as the plan says.

    The row has num_tokens tokens and num_blocks KV blocks; if no other check fails, the blocks are
    too few.
    """
    computed, scheduled = int(plan.num_computed_tokens[i]), int(plan.num_scheduled_tokens[i])
    end = computed + scheduled
    if end - num_drafts > num_tokens:
        what = "is scheduled past the tokens it has"
    elif end > max_model_len:
        what = "is scheduled past max_model_len"
    elif num_drafts and end - num_drafts != num_tokens:
        what = "has drafts before its last token is computed"
    else:
        what = "has too few KV blocks for its tokens"
    return (
        f"rows: {name} {what}: {computed} computed + {scheduled} scheduled, {num_drafts} of them "
        f"drafts; it has {num_tokens} tokens and {num_blocks} blocks"
    )
