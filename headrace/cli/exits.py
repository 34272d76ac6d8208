"""How a command ends: exit codes, and errors as one line on stderr."""

from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from headrace.service.errors import ServiceError

T = TypeVar("T")

FAILED = 1
UNREACHABLE = 3
INTERRUPTED = 130
# The exit code that shells report for a program ended by SIGPIPE.
PIPE_CLOSED = 141


class Failure(click.ClickException):
    """The request failed; the message is for the user."""

    exit_code = FAILED


class Unreachable(Failure):
    """No server answered."""

    exit_code = UNREACHABLE


def explained(error: "ServiceError") -> Failure:
    """A ServiceError as one line that says what to do."""
    if error.reason == "UNREACHABLE":
        return Unreachable(". ".join(filter(None, (error.message, _what_to_try(error.message)))))
    if error.reason == "BAD_TOKEN":
        # The server's message is for programs that set metadata themselves.
        return Failure(f"this server wants its token: --auth-token-file FILE [{error.reason}]")
    retry = f" (again in {error.retry_after_s:g} s)" if error.retry_after_s else ""
    return Failure(f"{error.message}{retry} [{error.reason}]")


def _what_to_try(message: str) -> str:
    if "tls_ca_file" in message:
        return "The option is --tls-ca-file PEM; --tls trusts the system's authorities"
    if "client certificate" in message:
        return "The options are --tls-cert-file and --tls-key-file"
    if "TLS" in message or "certificate" in message:
        return ""
    if "Socket closed" in message:
        return "A server listens there, and speaks neither gRPC nor TLS"
    return "Start one with `headrace serve`, or say where it is with --server HOST:PORT"


def run(
    work: Coroutine[Any, Any, T],
    runner: Callable[..., T] | None = None,
    *,
    otlp_endpoint: str | None = None,
) -> T:
    """Runs a command's work to its end, traced if there is an endpoint for traces.

    ServiceError becomes Failure. runner runs the work; None: a new event loop.
    """
    import asyncio

    from headrace.service import telemetry
    from headrace.service.errors import ServiceError

    try:
        traces = telemetry.setup("headrace-cli", otlp_endpoint)
    except click.ClickException:
        work.close()
        raise
    try:
        return (runner or asyncio.run)(work)
    except ServiceError as error:
        raise explained(error) from error
    finally:
        traces.shutdown()
