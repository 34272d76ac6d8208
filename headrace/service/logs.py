"""Log lines of a service: text, or JSON objects, with the trace and request that they belong to.

A line never has a prompt or generated text. Lines that repeat are limited: of one message in the
code, at most MAX_REPEATS come in REPEAT_S seconds, and the next that comes says how many did not.
"""

import json
import logging
import sys
import time
from collections.abc import Callable
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, Literal

from headrace.service import telemetry

LogFormat = Literal["text", "json"]

MAX_REPEATS = 10
REPEAT_S = 60.0
# Messages in the code are few; those of libraries may be made of data.
_MAX_MESSAGES = 1000

# The request that the current task serves, "" for none; set by whoever answers a call.
request_id: ContextVar[str] = ContextVar("headrace_request_id", default="")


def setup(service: str, level: str, log_format: LogFormat) -> None:
    """Logs to stderr from now on; level as in the settings."""
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(_note_context)
    handler.addFilter(RepeatFilter())
    handler.setFormatter(_Json(service) if log_format == "json" else _Text(service))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def _note_context(record: logging.LogRecord) -> bool:
    """Adds the ids of the task that logs; `extra={"request_id": ...}` of the call wins."""
    span = telemetry.current_span().get_span_context()
    record.trace_id = f"{span.trace_id:032x}" if span.is_valid else ""
    record.span_id = f"{span.span_id:016x}" if span.is_valid else ""
    if not hasattr(record, "request_id"):
        record.request_id = request_id.get()
    return True


class RepeatFilter(logging.Filter):
    """Drops what repeats too often; errors with a traceback are limited like all else."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        # By where a message is logged: when its count began, lines since then, lines left out.
        self._seen: dict[tuple[str, int, str], tuple[float, int, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the line comes; notes on the record how many before it did not."""
        record.num_left_out = 0
        key = (record.name, record.levelno, str(record.msg))
        now = self._clock()
        since, count, num_left_out = self._seen.get(key, (now, 0, 0))
        if now - since >= REPEAT_S:
            since, count = now, 0
        if count >= MAX_REPEATS:
            self._seen[key] = (since, count, num_left_out + 1)
            return False
        if len(self._seen) >= _MAX_MESSAGES:
            self._seen.clear()
        self._seen[key] = (since, count + 1, 0)
        record.num_left_out = num_left_out
        return True


class _Text(logging.Formatter):
    """A line for people: time, level, service, message, ids if there are any."""

    def __init__(self, service: str) -> None:
        super().__init__(f"%(asctime)s %(levelname)s {service} %(message)s%(ids)s%(left_out)s")

    def format(self, record: logging.LogRecord) -> str:
        fields = record.__dict__
        record.ids = "".join(
            f" {name}={fields[name]}" for name in ("request_id", "trace_id") if fields.get(name)
        )
        num_left_out = fields.get("num_left_out", 0)
        record.left_out = f" ({num_left_out} more like this were left out)" if num_left_out else ""
        return super().format(record)


class _Json(logging.Formatter):
    """One JSON object a line."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        fields = record.__dict__
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "service": self._service,
            "logger": record.name,
            "message": record.getMessage(),
        }
        for name in ("request_id", "trace_id", "span_id", "num_left_out"):
            if fields.get(name):
                line[name] = fields[name]
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)
