"""A submission of a request that lives here already: is it the same request, and can it go on?

A router that resumes a request submits it again, with the tokens that it has and a greater epoch.
Where the request still lives, it goes on with its KV and only changes its router.
"""

import logging
from collections.abc import Sequence

import numpy as np

from headrace.status.records import Superseded
from headrace.vocabulary import RefusalReason
from scheduler.core.plan import Int32Array, RequestStatus
from scheduler.orphans import Orphans
from scheduler.requests import NO_ROUTER, LiveRequest, Submission
from scheduler.switchboard import Switchboard
from scheduler.updates import EMPTY_UINT32, NewAdmission, NotTaken, RouterUpdate

logger = logging.getLogger(__name__)

_SET_ASIDE_TTL_S = 5.0


def refusal(submission: Submission, older: LiveRequest) -> NotTaken | None:
    """Why a submission of a live id is a duplicate; None if it may take the request's place.

    The arrival tells apart requests that use one id one after the other; an epoch counts within one
    request. A call that was repeated while the store was away may live twice, with two arrivals:
    the store knows one of the two, which is claimed there under greater epochs.
    """
    live = older.submission
    if (submission.arrival_time, submission.epoch) > (live.arrival_time, live.epoch):
        return None
    if submission.epoch > live.epoch and _is_repeated(submission, live):
        return None
    return NotTaken(
        submission.handle,
        RefusalReason.DUPLICATE,
        f"{submission.request_id} runs here under epoch {live.epoch}",
    )


def take_over(
    switchboard: Switchboard, connection: int, submission: Submission, older: LiveRequest
) -> bool:
    """Give a live request to the router of a newer submission; False if the older request ends.

    The router gets the tokens that it lacks at once. Where the request cannot go on for it, the
    older request is superseded and its id is free.
    """
    unread = _unread_token_ids(submission, older)
    if older.connection != NO_ROUTER:
        switchboard.detach(older)
    if unread is None:
        _supersede(switchboard, older)
        return False
    if older.is_superseded:
        older.is_superseded = False
        num_kept = len(submission.generated_token_ids)
        switchboard.requests.note_journaled(older, num_kept)
    switchboard.attach(older, connection, submission)
    if older.is_paused:
        older.owner.set_paused(older, is_paused=False)
    _tell_so_far(switchboard, older, unread)
    return True


def set_aside(switchboard: Switchboard, orphans: Orphans, request: LiveRequest) -> None:
    """Record nothing more of a request that another owner has taken up or ended.

    A router that took it up may be about to submit it here: it ends only when none has done so for
    a while.
    """
    if request.connection != NO_ROUTER:
        switchboard.detach(request)
    _stop_recording(switchboard, request)
    orphans.add([request], ttl_s=_SET_ASIDE_TTL_S)


def on_superseded(
    switchboard: Switchboard, orphans: Orphans, superseded: Sequence[Superseded]
) -> None:
    """Let go of requests whose records were refused. What was aborted ends for its router too."""
    for refused in superseded:
        request = switchboard.requests.find(refused.name)
        # A router may have taken the request over since the refused piece was taken.
        if request is None or request.submission.epoch != refused.epoch:
            continue
        logger.info(
            "%s: the store has it as %s of another owner",
            *(refused.name, refused.state),
            extra={"request_id": refused.name},
        )
        if refused.is_aborted:
            _supersede(switchboard, request)
        else:
            set_aside(switchboard, orphans, request)


def _supersede(switchboard: Switchboard, request: LiveRequest) -> None:
    """End a request of which no record is to hear: it is computed again, or it was aborted."""
    _stop_recording(switchboard, request)
    switchboard.requests.release_id(request)
    request.owner.cancel(request, RequestStatus.ABORTED)


def _stop_recording(switchboard: Switchboard, request: LiveRequest) -> None:
    request.is_superseded = True
    switchboard.requests.note_journaled(request, None)


def _unread_token_ids(submission: Submission, older: LiveRequest) -> Int32Array | None:
    """[num_tokens] that the submission lacks; None if the live request cannot go on for it."""
    if not _is_same(submission, older.submission):
        return None
    token_ids = older.owner.output_token_ids(older)
    if token_ids is None:
        return None
    num_read = len(submission.generated_token_ids)
    unread = token_ids[num_read:]
    if not np.array_equal(submission.generated_token_ids, token_ids[:num_read]):
        return None
    wants_logprobs = submission.wants_logprobs or submission.wants_prompt_logprobs
    if wants_logprobs and len(unread):
        return None  # log probabilities that were published are not kept
    return unread


def _is_same(one: Submission, other: Submission) -> bool:
    """Whether two submissions are of one request and mean the same."""
    return _place(one) == _place(other) and _is_repeated(one, other)


def _is_repeated(one: Submission, other: Submission) -> bool:
    """Whether two submissions are of one call, perhaps admitted twice: of the same tokens."""
    return _terms(one) == _terms(other) and np.array_equal(
        one.prompt_token_ids, other.prompt_token_ids
    )


def _place(submission: Submission) -> tuple[object, ...]:
    """What decides a request's place among others, without the priority: that ages with each
    submission, and the request goes on with the priority that it has.
    """
    return submission.arrival_time, submission.deadline


def _terms(submission: Submission) -> tuple[object, ...]:
    """All that decides a request's tokens, without the arrays."""
    return (
        submission.model,
        submission.max_tokens,
        submission.sampling,
        submission.cache_salt,
        submission.tenant,
    )


def _tell_so_far(switchboard: Switchboard, request: LiveRequest, unread: Int32Array) -> None:
    """Tell the new router what the request has brought so far."""
    handle = request.submission.handle
    admissions: tuple[NewAdmission, ...] = ()
    if request.admission is not None:
        admissions = (NewAdmission(handle, request.admission),)
    is_any = len(unread) > 0
    if not is_any and not admissions:
        return
    switchboard.tell(
        request.connection,
        RouterUpdate(
            handles=np.array([handle], dtype=np.uint32) if is_any else EMPTY_UINT32,
            num_new_tokens=np.array([len(unread)] if is_any else [], dtype=np.int32),
            token_ids=unread,
            admissions=admissions,
        ),
    )


def give_back(switchboard: Switchboard, request: LiveRequest, refusal: NotTaken) -> None:
    """Return a request that cannot go on here to its router, which submits it elsewhere."""
    switchboard.detach(request, refusal)
    _supersede(switchboard, request)
