"""The term of an Execute stream: which of two schedulers that drive one worker yields.

A scheduler's term is the time at which its process started, so the scheduler that was started later
wins while its stream lives. A scheduler that has a lease of the worker takes the lease's number,
above every time; a worker that has seen such a term refuses smaller ones for good. The scheduler
sends its term with the call; the worker sends it back, with the initial metadata, once it has taken
the stream.
"""

from collections.abc import Iterable
from typing import Any

from headrace.service.errors import invalid

KEY = "x-headrace-term"
# Reasons of the worker: a stream is refused; a stream is ended because a newer stream came.
NEWER_OWNER = "NEWER_OWNER"
STREAM_REPLACED = "STREAM_REPLACED"
_MAX_DIGITS = 20
FIRST_LEASED = 10**19


def metadata_of(term: int) -> tuple[tuple[str, str], ...]:
    """The metadata that carry a term."""
    return ((KEY, str(term)),)


def term_in(metadata: Iterable[Any] | None) -> int | None:
    """The term in a call's metadata; None if it has none.

    Raises:
        ServiceError: INVALID_ARGUMENT, if it is no whole number.
    """
    for key, value in metadata or ():
        if key == KEY:
            if not (value.isascii() and value.isdigit() and len(value) <= _MAX_DIGITS):
                raise invalid(KEY, f"must be a whole number of at most {_MAX_DIGITS} digits")
            return int(value)
    return None
