"""Which versions of Headrace work together: those whose minor numbers are neighbours.

Services say their versions when they connect, and the side that is told refuses what does not work,
in words that name both. A peer that does not say its version is older than this rule, and accepted.
"""

import functools
import re
from importlib import metadata

from headrace.service.errors import failed_precondition

VERSION_SKEW = "VERSION_SKEW"

_NUMBERS = re.compile(r"(\d{1,6})\.(\d{1,6})\b")


@functools.cache
def version() -> str:
    """This Headrace's version; "" where it runs from a folder without being installed."""
    try:
        return metadata.version("headrace")
    except metadata.PackageNotFoundError:
        return ""


def skew(ours: str, theirs: str) -> int | None:
    """By how many minor versions the other is ahead; None for another major version.

    A version that cannot be read counts as ours.
    """
    mine, other = _NUMBERS.match(ours), _NUMBERS.match(theirs)
    if mine is None or other is None:
        return 0
    return int(other[2]) - int(mine[2]) if mine[1] == other[1] else None


def check_peer(peer: str, theirs: str, us: str) -> None:
    """ServiceError unless a peer of version `theirs` and we work together.

    peer and us say in words who they are, e.g. "router r-1" and "this scheduler".
    """
    ours = version()
    steps = skew(ours, theirs)
    if steps is not None and abs(steps) <= 1:
        return
    raise failed_precondition(
        VERSION_SKEW,
        f"{peer} is Headrace {_short(theirs)} and {us} is {ours}: only versions whose minor numbers"
        " are neighbours work together; upgrade one minor version after the other",
    )


def _short(text: str) -> str:
    """What a peer says, fit for a log line."""
    return repr(text[:32]) if not text[:32].isprintable() else text[:32]
