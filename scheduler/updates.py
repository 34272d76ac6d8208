"""What a router is told of its requests: tokens, admissions, ends, log probabilities, refusals."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from headrace.vocabulary import RefusalReason
from scheduler.core.plan import EMPTY_INT32, FinishedRequest, Int32Array
from scheduler.requests import FirstAdmission, LiveRequest, UInt32Array

EMPTY_UINT32: UInt32Array = np.empty(0, dtype=np.uint32)
NO_DRAFTS: Int32Array = np.empty((0, 2), dtype=np.int32)


@dataclass(frozen=True, slots=True)
class RequestEnd:
    """A live request ended; message is for a person, set for ERROR."""

    request: LiveRequest
    facts: FinishedRequest
    message: str = ""


@dataclass(frozen=True, slots=True)
class NewAdmission:
    """The request of a router's handle was admitted for the first time."""

    handle: int
    admission: FirstAdmission


@dataclass(frozen=True, slots=True)
class NewLogprobs:
    """Log probabilities of a live request; the items are the wire's.

    Args:
        tokens: one per new token of a step.
        prompt_tokens: one per prompt token but the first, or empty.
    """

    request: LiveRequest
    tokens: Sequence[object]
    prompt_tokens: Sequence[object]


@dataclass(frozen=True, slots=True)
class NotTaken:
    """A submission that was refused; field is the one that is INVALID, of the submission."""

    handle: int
    reason: RefusalReason
    message: str
    field: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterUpdate:
    """What one step, or several merged, brought for one router.

    A handle comes up once in the columns. A request ends after its tokens. Nothing follows for the
    handles in `moved`. `aborts` are ids to end that may wait in the router.
    """

    handles: UInt32Array = field(default_factory=lambda: EMPTY_UINT32)  # [num_requests]
    num_new_tokens: Int32Array = field(default_factory=lambda: EMPTY_INT32)  # [num_requests]
    token_ids: Int32Array = field(default_factory=lambda: EMPTY_INT32)  # [sum(num_new_tokens)]
    # [num_requests, 2] drafts verified and accepted, or [0, 2] when no request had any.
    draft_counts: Int32Array = field(default_factory=lambda: NO_DRAFTS)
    ends: tuple[RequestEnd, ...] = ()
    admissions: tuple[NewAdmission, ...] = ()
    logprobs: tuple[NewLogprobs, ...] = ()
    refusals: tuple[NotTaken, ...] = ()
    moved: tuple[int, ...] = ()
    aborts: tuple[str, ...] = ()


def merge(updates: Sequence[RouterUpdate]) -> RouterUpdate:
    """One update that says what all of `updates` say, in their order."""
    if len(updates) == 1:
        return updates[0]
    handles = np.concatenate([update.handles for update in updates])
    num_new_tokens = np.concatenate([update.num_new_tokens for update in updates])
    token_ids = np.concatenate([update.token_ids for update in updates])
    # A stable sort keeps each request's tokens in the order of the steps.
    order = np.argsort(handles, kind="stable")
    starts = np.cumsum(num_new_tokens) - num_new_tokens  # [num_pieces]
    counts = num_new_tokens[order]
    new_starts = np.cumsum(counts) - counts
    source = np.repeat(starts[order] - new_starts, counts) + np.arange(len(token_ids))
    merged_handles, first = np.unique(handles[order], return_index=True)
    draft_counts = NO_DRAFTS
    if any(len(update.draft_counts) for update in updates):
        pieces = np.concatenate([_draft_counts(update) for update in updates])
        draft_counts = np.add.reduceat(pieces[order], first, axis=0, dtype=np.int32)
    return RouterUpdate(
        handles=merged_handles,
        num_new_tokens=(
            np.add.reduceat(counts, first, dtype=np.int32) if len(first) else EMPTY_INT32
        ),
        token_ids=token_ids[source],
        draft_counts=draft_counts,
        ends=tuple(end for update in updates for end in update.ends),
        admissions=tuple(admission for update in updates for admission in update.admissions),
        logprobs=tuple(entry for update in updates for entry in update.logprobs),
        refusals=tuple(refusal for update in updates for refusal in update.refusals),
        moved=tuple(handle for update in updates for handle in update.moved),
        aborts=tuple(request_id for update in updates for request_id in update.aborts),
    )


def _draft_counts(update: RouterUpdate) -> Int32Array:
    """[num_requests, 2], zeros where the step had no drafts."""
    if len(update.draft_counts):
        return update.draft_counts
    return np.zeros((len(update.handles), 2), dtype=np.int32)
