"""What a service does that takes long, said to the person who started it.

`headrace.local` reads the services' stderr: lines with a mark are such news, whatever the log level
is. A service that is started by something else logs them.
"""

import logging
import os
import sys

logger = logging.getLogger("headrace")

# In the environment of a service whose stderr is read by `local`.
VARIABLE = "HEADRACE_PROGRESS"
_MARK = "\x1eheadrace: "


def say(what: str) -> None:
    """Tells what is done from now on; how far it is may follow a colon."""
    if os.environ.get(VARIABLE) == "1":
        sys.stderr.write(f"{_MARK}{what}\n")
        sys.stderr.flush()
    else:
        logger.info("%s", what)


def said(line: str) -> str | None:
    """What a service said in this line of its stderr; None for a line of its log."""
    return line.removeprefix(_MARK) if line.startswith(_MARK) else None
