"""`headrace explain --why-slow`: the largest parts of a request's time, and what would change them.

What happened is in the request's history. What other settings would have changed comes from a
recording, which the package of the scheduler replays; without a recording that is left out.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from headrace.cli import explaining

if TYPE_CHECKING:
    from headrace.types import RequestHistory, StageTime

_MAX_CAUSES = 3
_ENTRY_POINTS = "headrace.advice"

# What a recording of the scheduler does not show.
_ADVICE = {
    "TOKENIZE": "shorter prompts, or more tokenizer processes in the router",
    "QUEUE": "more workers; `max_num_seqs` or KV blocks, by what requests at the workers wait for;"
    " policy `fair` if another tenant was ahead",
    "DECODE": "fewer tokens, or faster steps: `headrace top` shows what fills them",
    "PAUSED": "a client that reads",
    "RECOVERED": "nothing here: the logs say why what it ran on was lost",
    "OTHER": "the network, or a router with more of a processor",
}
_NO_RECORDING = (
    "What other settings would have changed is left out: no recording was given. The scheduler"
    " writes one (docs/operations.md, Recordings); give it by --recording."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """A part of a request's time; advice is empty where only a recording could tell."""

    name: str
    stage: str
    cause: str
    seconds: float
    share: float
    facts: str
    advice: str


def causes_of(history: "RequestHistory", recordings: Sequence[Path]) -> list[Cause]:
    """The largest parts first.

    Raises:
        ClickException: a recording cannot be read or lacks the request.
    """
    largest = sorted(history.breakdown, key=lambda part: -part.seconds)[:_MAX_CAUSES]
    advice = dict(_ADVICE)
    advice |= _replayed(history, [part.cause or part.stage for part in largest], recordings)
    return [
        Cause(
            name=explaining.name_of(part),
            stage=part.stage,
            cause=part.cause,
            seconds=part.seconds,
            share=part.seconds / history.total_s if history.total_s else 0.0,
            facts=_facts(history, part),
            advice=advice.get(part.cause or part.stage, ""),
        )
        for part in largest
    ]


def lines(
    history: "RequestHistory", causes: Sequence[Cause], *, is_replayed: bool
) -> Iterator[str]:
    """The causes as text."""
    yield f"{history.request_id} took {explaining.milliseconds(history.total_s)}"
    for number, cause in enumerate(causes, 1):
        took = explaining.milliseconds(cause.seconds)
        yield f"{number}. {cause.name:<30} {took:>12} {cause.share:>5.0%}"
        if cause.facts:
            yield f"   {cause.facts}"
        if cause.advice:
            yield f"   would change it: {cause.advice}"
    if not is_replayed and not all(cause.advice for cause in causes):
        yield _NO_RECORDING


def _replayed(
    history: "RequestHistory", causes: Sequence[str], recordings: Sequence[Path]
) -> Mapping[str, str]:
    if not recordings:
        return {}
    from importlib import metadata

    (point,) = metadata.entry_points(group=_ENTRY_POINTS, name="why-slow") or (None,)
    if point is None:
        raise click.ClickException("the scheduler's package, which replays recordings, is not here")
    advise: Callable[[Sequence[Path], str, Sequence[str]], Mapping[str, str]] = point.load()
    try:
        return advise(recordings, history.request_id, causes)
    except ValueError as error:
        raise click.ClickException(str(error)) from error


def _facts(history: "RequestHistory", part: "StageTime") -> str:
    """What the history says of a part, in a sentence; empty if nothing."""
    found = _FACTS.get(part.stage)
    return found(history, part) if found is not None else ""


def _of_queue(history: "RequestHistory", _part: "StageTime") -> str:
    return explaining.waiting(history.queued_with) if history.queued_with else "nothing was before"


def _of_wait(history: "RequestHistory", part: "StageTime") -> str:
    num_steps = history.steps_waited_by_cause.get(part.cause, 0)
    steps = f"{num_steps} steps" if num_steps else ""
    needs = [e for e in history.events if e.kind == "WAITED" and e.num_needed_blocks]
    if part.cause not in {"BLOCKS", "WATERMARK"} or not needs:
        return steps
    worst = max(needs, key=lambda event: event.num_needed_blocks - event.num_free_blocks)
    needed, free = worst.num_needed_blocks, worst.num_free_blocks
    more = f"needed {needed - free} KV blocks more" if needed > free else "the watermark held back"
    return f"{more}: {needed} needed, {free} free; {steps}"


def _of_prefill(history: "RequestHistory", _part: "StageTime") -> str:
    runs = [event for event in history.events if event.kind == "SCHEDULED"]
    cached = f"{history.cached_tokens} tokens from the prefix cache"
    return f"{runs[0].detail}; {cached}" if runs else cached


def _of_decode(history: "RequestHistory", part: "StageTime") -> str:
    runs = [event for event in history.events if event.kind == "SCHEDULED"]
    num_steps = sum(event.last_step - event.first_step + 1 for event in runs)
    if not num_steps:
        return ""
    return f"{num_steps} steps of {explaining.milliseconds(part.seconds / num_steps)}"


def _of_preemptions(history: "RequestHistory", _part: "StageTime") -> str:
    falls = [event.detail for event in history.events if event.kind == "PREEMPTED"]
    last = f"; the last time {falls[-1]}" if falls else ""
    return f"{history.num_preemptions} times, {history.recomputed_tokens} tokens again{last}"


def _of_losses(history: "RequestHistory", _part: "StageTime") -> str:
    return "; ".join(e.detail for e in history.events if e.kind in {"LOST", "RESUMED"})


_FACTS: dict[str, Callable[["RequestHistory", "StageTime"], str]] = {
    "QUEUE": _of_queue,
    "WAIT": _of_wait,
    "PREFILL": _of_prefill,
    "DECODE": _of_decode,
    "PREEMPTED": _of_preemptions,
    "RECOVERED": _of_losses,
}
