"""The one map from refusals and failures to the errors that callers get."""

from typing import assert_never

from grpc import StatusCode

from headrace.service.errors import (
    ServiceError,
    aborted,
    already_exists,
    deadline_exceeded,
    exhausted,
    internal,
    invalid,
    not_found,
    unavailable,
)
from headrace.vocabulary import RefusalReason
from router.core.admission import Reason, Reject
from router.outputs import Refusal
from router.request import ClientCompletion, Spec

TOKENS_LOST = "TOKENS_LOST"


def rejected(reject: Reject, prompt_field: str = "text") -> ServiceError:
    """A request that was not admitted; prompt_field names the field that held the prompt."""
    error = _rejected(reject, prompt_field)
    error.counted_as = reject.reason.value
    return error


def _rejected(reject: Reject, prompt_field: str) -> ServiceError:
    match reject.reason:
        case Reason.PROMPT_TOO_LONG:
            return invalid(prompt_field, reject.message)
        case Reason.MAX_TOKENS_TOO_LARGE:
            return invalid("sampling.max_tokens", reject.message)
        case Reason.MIN_TOKENS_TOO_LARGE:
            return invalid("sampling.min_tokens", reject.message)
        case Reason.TOO_MANY_COMPLETIONS:
            return invalid("sampling.n", reject.message)
        case Reason.NO_READY_WORKER:
            return unavailable(reject.reason.value, reject.message, reject.retry_after_s)
        case Reason.DEADLINE_PASSED | Reason.DEADLINE_OUT_OF_REACH:
            return deadline_exceeded(reject.reason.value, f"deadline: {reject.message}")
        case (
            Reason.QUEUE_FULL
            | Reason.TENANT_QUEUE_FULL
            | Reason.TOO_MANY_LIVE
            | Reason.TENANT_TOO_MANY_LIVE
            | Reason.TENANT_RATE
        ):
            return exhausted(reject.reason.value, reject.message, reject.retry_after_s)
        case never:
            assert_never(never)


def refused(refusal: Refusal, spec: Spec) -> ServiceError:
    """A request that a scheduler refused for good."""
    match refusal.reason:
        case RefusalReason.TOO_LONG:
            return invalid(spec.prompt_field, refusal.message)
        case RefusalReason.INVALID:
            return _invalid_submission(refusal, spec)
        case RefusalReason.DUPLICATE:
            return already_exists("DUPLICATE_REQUEST_ID", refusal.message)
        case RefusalReason.NO_WORKER | RefusalReason.WORKER_LOST | RefusalReason.DRAINING:
            return unavailable(refusal.reason.value, refusal.message, 1.0)
        case None:
            return internal("REFUSED", refusal.message)
        case never:
            assert_never(never)


def _invalid_submission(refusal: Refusal, spec: Spec) -> ServiceError:
    """A field that the router let pass and the scheduler does not; most are the client's own."""
    message = refusal.message.removeprefix(f"{refusal.field}: ")
    if refusal.field.startswith("sampling"):
        return invalid(refusal.field, message)
    if refusal.field == "prompt_token_ids":
        return invalid(spec.prompt_field, message)
    return internal("REFUSED", f"the scheduler refused the request: {refusal.message}")


def is_worth_retrying(refusal: Refusal) -> bool:
    """Whether another worker, or the same worker later, may take the request."""
    return refusal.reason in {
        RefusalReason.NO_WORKER,
        RefusalReason.WORKER_LOST,
        RefusalReason.DRAINING,
    }


def failed(message: str) -> ServiceError:
    """A fault in a worker or scheduler ended the request."""
    return internal("GENERATION_FAILED", message or "the generation failed in its worker")


def schedulers_lost(completion: ClientCompletion) -> ServiceError:
    """Every scheduler that had the completion was lost; the completion is probably the cause."""
    return internal(
        "SCHEDULERS_LOST",
        f"{completion.request_id} was sent to {completion.num_dispatches} schedulers and each was "
        "lost while it had this request; it is not sent again",
    )


def no_longer_fits(spec: Spec) -> ServiceError:
    """The workers that could have held the request are gone."""
    return unavailable(
        "NO_LARGE_WORKER",
        f"{spec.request_id} does not fit any worker that is ready now; try again, or ask for less",
        5.0,
    )


def too_slow(spec: Spec, why: str) -> ServiceError:
    """The client does not read its stream."""
    return exhausted(
        "SLOW_CLIENT", f"{spec.request_id} was ended: {why}; read the stream as it comes"
    )


def draining() -> ServiceError:
    return unavailable("DRAINING", "this router is shutting down; use another, or try again", 1.0)


def late(spec: Spec) -> ServiceError:
    """The deadline passed before the request had ended."""
    return deadline_exceeded(
        "DEADLINE_EXCEEDED", f"deadline: passed before {spec.request_id} was finished"
    )


def resumed_elsewhere(request_id: str) -> ServiceError:
    """Another call, here or at another router, is answered with the request now."""
    return aborted(
        "RESUMED_ELSEWHERE", f"{request_id} goes on in a later call, which resumed the request"
    )


def unknown(request_id: str) -> ServiceError:
    """Nobody knows the request, or its record has expired."""
    return not_found(
        "UNKNOWN_REQUEST",
        f"request_id: there is no request {request_id!r} to resume; send the request again",
    )


def not_known_yet(request_id: str) -> ServiceError:
    """The store does not know the request, and lags behind."""
    return unavailable(
        "STORE_UNAVAILABLE",
        f"request_id: {request_id!r} may be known when the status store keeps up again; try again",
        1.0,
    )


def not_kept(request_id: str) -> ServiceError:
    """The store has a record of the request, and no spec."""
    return not_found(
        "NOT_KEPT",
        f"request_id: {request_id!r} was rejected or is too large to be kept, and cannot be"
        " resumed; send the request again",
    )


def tokens_lost(request_id: str) -> ServiceError:
    """The request ended well, but its tokens or log probabilities are not all there."""
    return ServiceError(
        StatusCode.DATA_LOSS,
        TOKENS_LOST,
        f"{request_id} has ended, and not all of its output was kept; send the request again",
    )


def being_read(request_id: str) -> ServiceError:
    """An equal call came while the prompt of the first one is being read."""
    return unavailable(
        "NOT_ADMITTED_YET",
        f"request_id: an earlier call with {request_id!r} is being admitted; try again",
        0.2,
    )


def contested(request_id: str) -> ServiceError:
    """Other routers were faster, again and again."""
    return unavailable(
        "CONTESTED", f"request_id: {request_id!r} is being resumed by others too; try again", 0.5
    )


def duplicate(request_id: str) -> ServiceError:
    return already_exists(
        "DUPLICATE_REQUEST_ID",
        f"request_id: {request_id!r} is in use by a live request; choose another, or none",
    )
