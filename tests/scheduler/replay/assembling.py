"""Traces put together from what a recorder emits."""

from scheduler.replay.trace import TraceRecord


def assemble(records: list[TraceRecord]) -> TraceRecord:
    """A trace from a recording's records: the header, then its steps."""
    first, *steps = records
    trace: TraceRecord = {**first, "requests": dict(first.get("requests", {})), "steps": []}
    for step in steps:
        trace["requests"] |= step.get("requests", {})
        trace["steps"].append({name: part for name, part in step.items() if name != "requests"})
    return trace
