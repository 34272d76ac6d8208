"""What became of completions: the dispatcher finds it, and the router applies it to requests."""

from dataclasses import dataclass

from headrace.service.errors import ServiceError
from router.outputs import CompletionFinish
from router.request import ClientCompletion


@dataclass(frozen=True, slots=True)
class Ended:
    """A completion has ended, and nothing of it is left in the dispatcher."""

    completion: ClientCompletion
    finish: CompletionFinish


@dataclass(frozen=True, slots=True)
class Failed:
    """A completion cannot be served; the router ends it, with the others of its request."""

    completion: ClientCompletion
    error: ServiceError


@dataclass(frozen=True, slots=True)
class Paused:
    """A completion is paused, so there may be a pause to end in time (see `fail_overdue`)."""

    completion: ClientCompletion


@dataclass(frozen=True, slots=True)
class Moved:
    """A completion was taken up elsewhere; the router releases its request, and the caller gets
    the error.
    """

    completion: ClientCompletion
    error: ServiceError


# Of several, those that have ended come before those that fail.
Outcome = Ended | Failed | Paused | Moved
