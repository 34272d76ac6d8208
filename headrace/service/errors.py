"""Errors that a service sends to its callers, and their conversion to and from gRPC.

A service raises `ServiceError`; `map_errors` maps it to a canonical code, a message and
google.rpc details (ErrorInfo with a stable reason, BadRequest with the field, RetryInfo). A
caller gets the same `ServiceError` back from `from_rpc_error`.
"""

import asyncio
import logging
from functools import partial
from typing import Any, NoReturn

import grpc
import grpc.aio
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from headrace.service.handlers import Behaviour, CallOverError, surround

logger = logging.getLogger(__name__)

DOMAIN = "headrace"
_DETAILS_KEY = "grpc-status-details-bin"
# gRPC sends a message up to three times in the trailers, escaped, and callers accept 8 KiB of
# trailers. A longer message would reach the caller as an error about metadata.
_MAX_MESSAGE_BYTES = 1_000
# Exceptions that end the process or a generator, and cancellation: no failures of the work.
_PROCESS_ENDS = (KeyboardInterrupt, SystemExit, GeneratorExit)
CALL_ENDS = (*_PROCESS_ENDS, asyncio.CancelledError)


class ServiceError(Exception):
    """A refusal or failure that the caller is meant to see.

    reason is stable UPPER_SNAKE for programs; message is for people and says what to do. The middle
    of a long message is left out. counted_as: the reason in metrics, where that says more.
    """

    counted_as = ""

    def __init__(
        self,
        code: grpc.StatusCode,
        reason: str,
        message: str,
        *,
        field: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        self.message = _shortened(message)
        super().__init__(self.message)
        self.code = code
        self.reason = reason
        self.field = field
        self.retry_after_s = retry_after_s

    def __repr__(self) -> str:
        return f"ServiceError({self.code.name}, {self.reason}, {self.message!r})"


def _shortened(message: str) -> str:
    """Leaves out the middle of a long message.

    Errors name the field at the beginning and say what to do at the end.
    """
    data = message.encode(errors="replace")
    if len(data) <= _MAX_MESSAGE_BYTES:
        return message
    half = _MAX_MESSAGE_BYTES // 2 - 3
    return f"{data[:half].decode(errors='ignore')} ... {data[-half:].decode(errors='ignore')}"


def invalid(field: str, message: str) -> ServiceError:
    """The request's `field` is wrong; message says what it must be."""
    return ServiceError(
        grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD", f"{field}: {message}", field=field
    )


# Called with reason and message.
not_found = partial(ServiceError, grpc.StatusCode.NOT_FOUND)
already_exists = partial(ServiceError, grpc.StatusCode.ALREADY_EXISTS)
failed_precondition = partial(ServiceError, grpc.StatusCode.FAILED_PRECONDITION)
deadline_exceeded = partial(ServiceError, grpc.StatusCode.DEADLINE_EXCEEDED)
unimplemented = partial(ServiceError, grpc.StatusCode.UNIMPLEMENTED)
unauthenticated = partial(ServiceError, grpc.StatusCode.UNAUTHENTICATED)
aborted = partial(ServiceError, grpc.StatusCode.ABORTED)
internal = partial(ServiceError, grpc.StatusCode.INTERNAL)


def unavailable(reason: str, message: str, retry_after_s: float | None = None) -> ServiceError:
    return ServiceError(grpc.StatusCode.UNAVAILABLE, reason, message, retry_after_s=retry_after_s)


def exhausted(reason: str, message: str, retry_after_s: float | None = None) -> ServiceError:
    return ServiceError(
        grpc.StatusCode.RESOURCE_EXHAUSTED, reason, message, retry_after_s=retry_after_s
    )


def to_status(error: ServiceError) -> status_pb2.Status:
    """The google.rpc.Status that carries the error."""
    status = status_pb2.Status(code=error.code.value[0], message=error.message)
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN)
    if error.field is not None:
        info.metadata["field"] = error.field
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=error.field, description=error.message
        )
        status.details.add().Pack(error_details_pb2.BadRequest(field_violations=[violation]))
    status.details.add().Pack(info)
    if error.retry_after_s is not None:
        delay = Duration()
        delay.FromNanoseconds(int(error.retry_after_s * 1e9))
        status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=delay))
    return status


def from_rpc_error(error: grpc.aio.AioRpcError) -> ServiceError:
    """The peer's ServiceError; without error details, code and message alone."""
    reason, field, retry_after_s = error.code().name, None, None
    for detail in _status_of(error).details:
        info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
        if detail.Unpack(info):
            reason, field = info.reason, info.metadata.get("field")
        elif detail.Unpack(retry):
            retry_after_s = retry.retry_delay.ToNanoseconds() / 1e9
    return ServiceError(
        error.code(), reason, error.details() or "", field=field, retry_after_s=retry_after_s
    )


def _status_of(error: grpc.aio.AioRpcError) -> status_pb2.Status:
    for key, value in error.trailing_metadata() or ():
        if key == _DETAILS_KEY:
            try:
                return status_pb2.Status.FromString(value)
            except DecodeError:
                break
    return status_pb2.Status()


def malformed(why: object) -> ServiceError:
    """The bytes of a request are not a message."""
    return ServiceError(
        grpc.StatusCode.INVALID_ARGUMENT,
        "MALFORMED_MESSAGE",
        f"the request is not a well-formed message: {why}",
    )


async def _abort(context: Any, code: grpc.StatusCode, status: status_pb2.Status) -> NoReturn:
    trailing = tuple(context.trailing_metadata() or ())
    details = ((_DETAILS_KEY, status.SerializeToString()),)
    await context.abort(code, status.message, trailing + details)
    raise AssertionError("abort raises")


def _as_service_error(error: BaseException, method: str) -> ServiceError:
    """The error itself, or INTERNAL for a bug; the bug's traceback goes to the log only."""
    if isinstance(error, ServiceError):
        return error
    logger.error("%s failed", method, exc_info=error)
    return internal("INTERNAL", f"{method} failed: {type(error).__name__}; see the service's log")


def map_errors(handler: Any, method: str) -> Any:
    """The handler of `make_handler`, answering every exception that is no cancellation."""
    name = method.rpartition("/")[2]

    async def around(behaviour: Behaviour, messages: Any, context: Any) -> Any:
        try:
            return await behaviour(messages, context)
        except (grpc.aio.AbortError, grpc.aio.UsageError, *_PROCESS_ENDS):
            raise
        except BaseException as error:
            if _is_cancelled(error):
                raise
            failure = _as_service_error(error, name)
            code, status = failure.code, to_status(failure)
            del failure
        # After the except block, so that the traceback and the request in its frames are freed.
        return await _abort(context, code, status)

    return surround(handler, around)


def _is_cancelled(error: BaseException) -> bool:
    """Whether the call is over; False where the handler awaited a future that was cancelled."""
    if not isinstance(error, asyncio.CancelledError):
        return False
    task = asyncio.current_task()
    return isinstance(error, CallOverError) or (task is not None and task.cancelling() > 0)
