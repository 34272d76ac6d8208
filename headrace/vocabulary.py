"""Enums that more than one part of Headrace uses.

Pure, so that cores can import this module. `headrace.service.protocol` maps the enums to the wire.
"""

from enum import StrEnum


class FinishReason(StrEnum):
    """Why a completion ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORTED = "aborted"
    ERROR = "error"
    DEADLINE = "deadline"
    REPETITION = "repetition"


class CancelReason(StrEnum):
    """Why a router ends a completion in its scheduler."""

    ABORTED = "aborted"
    STOP_STRING = "stop_string"
    DEADLINE = "deadline"


class RefusalReason(StrEnum):
    """Why a scheduler does not take a completion."""

    NO_WORKER = "NO_WORKER"
    WORKER_LOST = "WORKER_LOST"
    TOO_LONG = "TOO_LONG"
    DRAINING = "DRAINING"
    DUPLICATE = "DUPLICATE"
    INVALID = "INVALID"


class WorkerRole(StrEnum):
    """What a worker is for."""

    MIXED = "mixed"
    PREFILL = "prefill"
    DECODE = "decode"


class WorkerState(StrEnum):
    """Whether a worker takes requests."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    LOST = "lost"
    QUARANTINED = "quarantined"
