"""Reports slow steps of a service's start to the person who started the service.

`headrace.local` reads the services' stderr and takes marked lines as progress, whatever the log
level is. A service that was started in another way logs its progress.
"""

import logging
import os
import sys

logger = logging.getLogger("headrace")

# Set in the environment of a service whose stderr `headrace.local` reads.
VARIABLE = "HEADRACE_PROGRESS"
_MARK = "\x1eheadrace: "


def say(what: str) -> None:
    """Reports the step that begins now, or, after a colon, how far the step is."""
    if os.environ.get(VARIABLE) == "1":
        sys.stderr.write(f"{_MARK}{what}\n")
        sys.stderr.flush()
    else:
        logger.info("%s", what)


def said(line: str) -> str | None:
    """The progress that a line of a service's stderr reports; None for a line of the log."""
    return line.removeprefix(_MARK) if line.startswith(_MARK) else None
