"""A request's history as lines of text: the timeline, and where the time went."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.types import RequestHistory, StageTime, TenantLoad

_STAGES = {
    "TOKENIZE": "tokenize",
    "QUEUE": "router's queue",
    "WAIT": "wait",
    "PREFILL": "prefill",
    "DECODE": "decode",
    "PREEMPTED": "preempted",
    "PAUSED": "paused by the client",
    "RECOVERED": "recovered after a loss",
    "OTHER": "network and other",
}
_CAUSES = {
    "NEXT_STEP": "for the next step",
    "BUDGET": "for token budget",
    "SEQUENCE_SLOTS": "for a sequence slot",
    "BLOCKS": "for KV blocks",
    "WATERMARK": "for the watermark",
    "PREEMPTION": "after a preemption",
    "LONG_PREFILLS": "for long prefills",
    "BEHIND_HEAD": "behind others",
}
_WIDTH = 32


def lines(history: "RequestHistory") -> Iterator[str]:
    """The whole history: one line for each event, then the sums."""
    yield from timeline(history)
    yield from time_spent(history)
    waits = history.steps_waited_by_cause.items()
    yield from rows(
        ("steps waited", ", ".join(f"{n} for {cause}" for cause, n in waits) or "none"),
        ("preemptions", str(history.num_preemptions)),
        ("recomputed", f"{history.recomputed_tokens} tokens"),
        ("from cache", f"{history.cached_tokens} tokens"),
    )


def timeline(history: "RequestHistory") -> Iterator[str]:
    """One line for each event: steps, when it began and how long it took, in milliseconds."""
    begin = history.begin_time_unix_s or min((e.time_unix_s for e in history.events), default=0.0)
    for event in history.events:
        # A router's deed belongs to no step.
        steps = "-" if event.kind == "RESUMED" else f"{event.first_step}"
        if event.last_step != event.first_step:
            steps += f"-{event.last_step}"
        since = f"{(event.time_unix_s - begin) * 1000:+.1f} ms"
        took = milliseconds(event.duration_s) if event.duration_s else ""
        place = "" if event.queue_position is None else f"  place {event.queue_position + 1}"
        line = f"step {steps:<9} {since:>13} {took:>12}  {event.kind:<9}{place}  {event.detail}"
        yield line.rstrip()


def time_spent(history: "RequestHistory") -> Iterator[str]:
    """Where the time went, one line for each part."""
    if not history.breakdown:
        return
    yield f"{'total time':<{_WIDTH}} {milliseconds(history.total_s):>12}"
    for part in history.breakdown:
        share = part.seconds / history.total_s if history.total_s else 0.0
        line = f"  {name_of(part):<{_WIDTH - 2}} {milliseconds(part.seconds):>12} {share:>5.0%}"
        if part.stage == "QUEUE" and history.queued_with:
            line += f"  with {waiting(history.queued_with)}"
        yield line


def name_of(part: "StageTime") -> str:
    """What a part of the time was spent on."""
    name = _STAGES.get(part.stage, part.stage.lower())
    cause = _CAUSES.get(part.cause, part.cause.lower().replace("_", " "))
    return f"{name} {cause}".rstrip()


def waiting(loads: "Sequence[TenantLoad]") -> str:
    """What waited in the queue: the sum, then each tenant."""
    num_requests = sum(load.num_requests for load in loads)
    num_tokens = sum(load.num_tokens for load in loads)
    tenants = ", ".join(
        f"{tenant_of(load)} {load.num_requests} ({load.num_tokens})" for load in loads
    )
    return f"{num_requests} requests, {num_tokens} tokens before: {tenants}"


def tenant_of(load: "TenantLoad") -> str:
    """A tenant's name for a person."""
    return {"": "default", "*": "others"}.get(load.tenant, load.tenant)


def milliseconds(seconds: float) -> str:
    """Milliseconds, to a tenth."""
    return f"{seconds * 1000:.1f} ms"


def rows(*pairs: tuple[str, str]) -> Iterator[str]:
    """Names and values in two columns."""
    width = max(len(name) for name, _ in pairs)
    return (f"{name:<{width}}  {value}" for name, value in pairs)
