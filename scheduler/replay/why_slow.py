"""What would have made one recorded request faster: the recording again, under other settings.

Steps are counted, from the request's arrival until it has the tokens that it has in the recording.
Each setting that a cause depends on is raised until more of it brings nothing; the answer is the
smallest value that brings as much.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from scheduler.core.plan import SchedulerConfig, StepPlan, WaitReason
from scheduler.replay.reader import read_traces
from scheduler.replay.trace import TraceRecord, trace_config
from scheduler.replay.what_if import Trial

_MAX_DOUBLINGS = 4

_SETTING_BY_CAUSE = {
    "BUDGET": "max_num_batched_tokens",
    "LONG_PREFILLS": "max_num_batched_tokens",
    "PREFILL": "max_num_batched_tokens",
    "SEQUENCE_SLOTS": "max_num_seqs",
    "BLOCKS": "num_gpu_blocks",
    "WATERMARK": "num_gpu_blocks",
    "PREEMPTION": "num_gpu_blocks",
    "PREEMPTED": "num_gpu_blocks",
}
# A budget is a power of two; of the others the smallest value that helps is looked for.
_DOUBLED_ONLY = frozenset({"max_num_batched_tokens"})
# What lies behind a wait that names no shortage itself.
_BEHIND = frozenset({"BEHIND_HEAD", "NEXT_STEP"})


@dataclass(frozen=True, slots=True)
class RequestRun:
    """One request in a run.

    reasons: steps in which it waited for its first admission, by what it or the head of the queue
    waited for.
    """

    num_steps: int
    num_preemptions: int
    reasons: Counter[WaitReason]


def run_of(trace: TraceRecord, config: SchedulerConfig, name: str) -> RequestRun | None:
    """A request of a trace under some settings; None: it is not there, or does not get far."""
    trial = Trial(trace, config)
    num_steps = num_preemptions = 0
    was_admitted = False
    reasons: Counter[WaitReason] = Counter()
    for plan in trial.steps():
        if not trial.has_come(name):
            continue
        num_steps += 1
        num_preemptions += sum(victim.request_id == name for victim in plan.facts.victims)
        was_admitted |= any(a.request_id == name for a in plan.admissions)
        if not was_admitted and plan.facts.passed_over:
            reasons[_reason(plan, name)] += 1
        if trial.num_missing(name) <= 0:
            return RequestRun(num_steps, num_preemptions, reasons)
        if not trial.is_live(name):
            return None
    return None


def advise(paths: Sequence[Path], request_id: str, causes: Sequence[str]) -> dict[str, str]:
    """For each cause that a setting bears on, what another value would have changed.

    Args:
        paths: recordings, of which at least one has the whole request.
        request_id: as the scheduler has it.
        causes: stages and causes of waits, by their names on the wire.

    Raises:
        ValueError: no recording has the request, or a file is none.
    """
    for path in paths:
        for _, trace in read_traces(path):
            name = _name_in(trace, request_id)
            if name is None:
                continue
            what_if = _WhatIf(trace, name)
            if what_if.before is not None:
                return {cause: what_if.advice(cause) for cause in causes if _bears(cause)}
    raise ValueError(f"no recording has the whole of {request_id}")


class _WhatIf:
    """Runs of one request under changed settings; a setting is tried once."""

    def __init__(self, trace: TraceRecord, name: str) -> None:
        self._trace = trace
        self._name = name
        self._config = trace_config(trace)
        self._advice_by_setting: dict[str, str] = {}
        self.before = run_of(trace, self._config, name)

    def advice(self, cause: str) -> str:
        """A sentence on a cause."""
        assert self.before is not None, "there is a run to compare with"
        if cause in _BEHIND:
            found = [reason.name for reason, _ in self.before.reasons.most_common()]
            known = [reason for reason in found if reason in _SETTING_BY_CAUSE]
            if not known:
                return "in the recording nothing was short: the wait was for a step that ran"
            cause = known[0]
        setting = _SETTING_BY_CAUSE[cause]
        if setting not in self._advice_by_setting:
            self._advice_by_setting[setting] = self._try(setting)
        return self._advice_by_setting[setting]

    def _try(self, setting: str) -> str:
        assert self.before is not None, "there is a run to compare with"
        value = getattr(self._config, setting)
        runs: dict[int, RequestRun] = {}

        def num_steps(tried: int) -> int:
            if tried not in runs:
                run = run_of(self._trace, _with(self._config, setting, tried), self._name)
                runs[tried] = run or self.before  # type: ignore[assignment]
            return runs[tried].num_steps

        best = value
        runs[value] = self.before
        for doubling in range(1, _MAX_DOUBLINGS + 1):
            if num_steps(value << doubling) < num_steps(best):
                best = value << doubling
        if best == value:
            return f"up to {setting} {value << _MAX_DOUBLINGS}, no step would have been saved"
        if setting not in _DOUBLED_ONLY:
            best = _smallest(value, best, lambda tried: num_steps(tried) <= num_steps(best))
        return _sentence(setting, best - value, best, self.before, runs[best])


def _sentence(setting: str, more: int, value: int, before: RequestRun, after: RequestRun) -> str:
    what = f"{setting} {value}"
    if setting == "num_gpu_blocks":
        what = f"{more} KV blocks more ({what})"
    saved = before.num_steps - after.num_steps
    steps = "1 step" if saved == 1 else f"{saved} steps"
    preemptions = ""
    if before.num_preemptions != after.num_preemptions:
        preemptions = f", with {after.num_preemptions} preemptions for {before.num_preemptions}"
    return f"{what} would have saved {steps} of {before.num_steps}{preemptions}"


def _smallest(low: int, high: int, is_enough: Callable[[int], bool]) -> int:
    """The smallest value above low, up to high, that is enough; high is, and more never is less."""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high


def _with(config: SchedulerConfig, setting: str, value: int) -> SchedulerConfig:
    changes: dict[str, Any] = {setting: value}
    threshold = config.long_prefill_token_threshold
    if setting == "max_num_batched_tokens" and threshold:
        # The threshold follows the budget unless it is set.
        changes["long_prefill_token_threshold"] = threshold * value // config.max_num_batched_tokens
    return replace(config, **changes)


def _bears(cause: str) -> bool:
    return cause in _SETTING_BY_CAUSE or cause in _BEHIND


def _reason(plan: StepPlan, name: str) -> WaitReason:
    """Why a waiting request was not admitted in a step: its own reason, or the head's."""
    facts = plan.facts.passed_over
    own = [fact.reason for fact in facts if fact.request_id == name]
    return (own or [facts[0].reason])[0]


def _name_in(trace: TraceRecord, request_id: str) -> str | None:
    """The last request of an id that a recording has, by its name there."""
    ids = {request_id, f"{request_id}#0"}
    # A name has the request's key behind it where its id was used before.
    names = [name for name in _names(trace) if name.partition("~")[0] in ids]
    return names[-1] if names else None


def _names(trace: TraceRecord) -> Iterator[str]:
    yield from trace.get("start", {}).get("state", {}).get("requests", ())
    for step in trace["steps"]:
        yield from step.get("add", ())
