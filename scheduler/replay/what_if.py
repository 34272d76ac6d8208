"""Runs a recorded workload under other settings.

Requests arrive, become ready, are paused, continued and aborted at the same steps as in the
recording. Their sampled tokens are those of the recording, then token 0. Drafts are accepted at the
recording's rate. Steps are counted, not timed: a changed budget changes how long a step takes.
"""

from array import array
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, get_args, get_type_hints

import msgspec
import numpy as np

from scheduler.core.plan import Pause, SchedulerConfig, StepPlan, StepResult
from scheduler.core.scheduler import SchedulerCore
from scheduler.replay.replay import apply_inputs
from scheduler.replay.schema import HeadRecord
from scheduler.replay.trace import TraceRecord, header, trace_request

# A run that needs this many times the recording's steps is assumed to never end.
MAX_STEPS_FACTOR = 50
MIN_STEPS = 10_000


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """Totals of a run. Steps waited are counted from arrival to the first admission.

    num_missed: requests that ended because their deadlines had passed. Steps to the first token are
    of the requests that got one.
    """

    num_steps: int
    num_finished: int
    num_output_tokens: int
    num_preemptions: int
    num_recomputed_tokens: int
    num_cached_tokens: int
    mean_steps_waited: float
    max_steps_waited: int
    num_missed: int
    p99_steps_to_first_token: float


def changed(config: SchedulerConfig, changes: Sequence[str]) -> SchedulerConfig:
    """Settings with `name=value` changes applied.

    Raises:
        ValueError: there is no such setting, or the value is invalid.
    """
    types = get_type_hints(SchedulerConfig)
    values: dict[str, Any] = {}
    for change in changes:
        name, is_set, text = change.partition("=")
        if name not in types or not is_set:
            names = ", ".join(field.name for field in fields(SchedulerConfig))
            raise ValueError(f"{change!r}: expected NAME=VALUE with NAME one of {names}")
        values[name] = _parsed(name, text, types[name])
    config = replace(config, **values)
    try:
        msgspec.convert(header(config, ""), HeadRecord)
    except msgspec.ValidationError as error:
        raise ValueError(f"no core can have that: {error}") from error
    return config


def _parsed(name: str, text: str, kind: Any) -> Any:
    if kind is bool:
        if text.lower() not in {"true", "false"}:
            raise ValueError(f"{name}={text}: expected true or false")
        return text.lower() == "true"
    if kind in {int, float}:
        try:
            return kind(text)
        except ValueError:
            raise ValueError(f"{name}={text}: expected a number") from None
    choices = [choice for arg in get_args(kind) for choice in (get_args(arg) or (arg,))]
    choices = [choice for choice in choices if isinstance(choice, str)]
    if text == "none" and type(None) in get_args(kind):
        return None
    if text not in choices:
        raise ValueError(f"{name}={text}: expected one of {', '.join(choices)}")
    return text


def recorded_outcome(trace: TraceRecord) -> RunOutcome:
    """Totals of the recorded run."""
    sums = _Sums()
    computed: dict[str, int] = {}
    for name in _live_at_start(trace):
        sums.arrived(name, trace["start"]["step"])
    num_steps = 0
    # What ended without a last token and without an abort has missed its deadline.
    ended: set[str] = set()
    explained = set(trace.get("start", {}).get("finished_ids", ()))
    for step in trace["steps"]:
        num_steps += 1
        ended.update(step.get("sched", {}).get("finished_ids", ()))
        explained.update(step.get("abort", ()), step.get("abort_mid", ()))
        for name in step.get("add", ()):
            sums.arrived(name, step["i"])
        plan = step.get("sched", {})
        for name in plan.get("preempted", ()):
            sums.preempted(computed.get(name, 0))
        for name in plan.get("new", ()):
            sums.admitted(name, step["i"], plan["hit"][name])
        sums.num_cached_tokens += sum(plan["hit"][name] for name in plan.get("resumed", ()))
        for output in step.get("update", {}).get("out", ()):
            sums.num_output_tokens += len(output["tokens"])
            if "finish" in output:
                sums.num_finished += 1
                explained.add(output["id"])
            if output["tokens"]:
                sums.got_token(output["id"], step["i"])
        computed = {name: fields[1] for name, fields in step["state"]["reqs"].items()}
    sums.num_missed = len(ended - explained)
    return sums.outcome(num_steps)


def try_settings(trace: TraceRecord, config: SchedulerConfig) -> RunOutcome:
    """Totals of a trace's workload under other settings."""
    return Trial(trace, config).run()


class _Sums:
    def __init__(self) -> None:
        self.num_finished = self.num_output_tokens = self.num_preemptions = 0
        self.num_recomputed_tokens = self.num_cached_tokens = 0
        self._arrivals: dict[str, int] = {}
        self._waits: dict[str, int] = {}
        self._first_tokens: dict[str, int] = {}
        self.num_missed = 0

    def arrived(self, name: str, step: int) -> None:
        self._arrivals[name] = step

    def admitted(self, name: str, step: int, num_cached: int) -> None:
        self.num_cached_tokens += num_cached
        self._waits.setdefault(name, step - self._arrivals[name])

    def preempted(self, num_lost: int) -> None:
        self.num_preemptions += 1
        self.num_recomputed_tokens += num_lost

    def got_token(self, name: str, step: int) -> None:
        self._first_tokens.setdefault(name, step - self._arrivals[name])

    def outcome(self, num_steps: int) -> RunOutcome:
        waits, firsts = list(self._waits.values()), list(self._first_tokens.values())
        return RunOutcome(
            num_steps=num_steps,
            num_finished=self.num_finished,
            num_output_tokens=self.num_output_tokens,
            num_preemptions=self.num_preemptions,
            num_recomputed_tokens=self.num_recomputed_tokens,
            num_cached_tokens=self.num_cached_tokens,
            mean_steps_waited=sum(waits) / len(waits) if waits else 0.0,
            max_steps_waited=max(waits, default=0),
            num_missed=self.num_missed,
            p99_steps_to_first_token=float(np.percentile(firsts, 99)) if firsts else 0.0,
        )


class Trial:
    """A closed loop: a core, and a worker that repeats the recording's tokens."""

    def __init__(self, trace: TraceRecord, config: SchedulerConfig) -> None:
        self._trace = trace
        self._config = config
        self._core = SchedulerCore(config)
        self._sums = _Sums()
        self._number = 0  # the current step's number
        self._names: list[str] = []
        self._key_by_name: dict[str, int] = {}
        self._outputs = _outputs_by_name(trace)
        self._num_given: Counter[str] = Counter()
        self._acceptance = _acceptance(trace)
        self._accepted_credit = 0.0
        self._flights: deque[tuple[StepPlan, list[str]]] = deque()

    def run(self) -> RunOutcome:
        """Run to the end."""
        for _ in self.steps():
            pass
        return self._sums.outcome(self._number)

    def has_come(self, name: str) -> bool:
        """Whether a request has come so far, by its name in the recording."""
        return name in self._key_by_name

    def is_live(self, name: str) -> bool:
        """Whether a request that has come has not ended."""
        return self._key_by_name[name] in self._core.state.requests

    def num_missing(self, name: str) -> int:
        """Tokens of a request in the recording that it has not got in this run."""
        return len(self._outputs[name]) - self._num_given[name]

    def steps(self) -> Iterator[StepPlan]:
        """Run step by step: yields each plan, without a pipeline after its result."""
        num_recorded = sum(1 for _ in self._trace["steps"])
        steps = iter(self._trace["steps"])
        for name, output in _live_at_start(self._trace).items():
            self._add(name, 0.0, output)
        for name in self._trace.get("start", {}).get("state", {}).get("paused", ()):
            self._core.pause_request(self._key_by_name[name])
        max_steps = max(MIN_STEPS, MAX_STEPS_FACTOR * num_recorded)
        while self._number < num_recorded or (
            self._core.has_unfinished and self._number < max_steps
        ):
            step: TraceRecord = next(steps, {})
            if not step:
                # After the recording's end no record lifts a pause of the core or of a request.
                self._core.set_pause(Pause.UNPAUSED)
                for key in self._key_by_name.values():
                    self._core.continue_request(key)
            apply_inputs(self._core, step, self._key_by_name, self._add)
            plan = self._schedule(step)
            for name in step.get("abort_mid", ()):
                self._core.abort(self._key_by_name[name])
            while len(self._flights) >= self._config.pipeline_depth:
                self._update()
            self._number += 1
            yield plan

    def _add(self, name: str, now: float, output: list[int] | None = None) -> None:
        request = trace_request(self._trace, name, len(self._names))
        if output is not None:
            request = replace(request, output_token_ids=np.array(output, dtype=np.int32))
        self._names.append(name)
        self._key_by_name[name] = request.key
        self._sums.arrived(name, self._number)
        # The core ignores later events of a request that it has refused.
        if self._core.refusal(len(request.prompt_token_ids), request.max_tokens) is None:
            self._core.add_request(request, now)

    def _schedule(self, step: TraceRecord) -> StepPlan:
        plan = self._core.schedule(
            step.get("now", 0.0), throttle_prefills=step.get("throttle", False)
        )
        self._sums.num_missed += len(plan.expired)
        for victim in plan.facts.victims:
            self._sums.preempted(victim.num_lost_tokens)
        for admission in plan.admissions:
            name = self._names[admission.key]
            self._sums.admitted(name, self._number, admission.num_cached_tokens)
        keys = self._core.state.table.key[plan.rows].tolist()
        self._flights.append((plan, [self._names[key] for key in keys]))
        return plan

    def _update(self) -> None:
        plan, names = self._flights.popleft()
        if not names:
            return
        is_chunk = self._core.state.flights[0].is_prefill_chunk.tolist()
        num_drafts = plan.num_draft_tokens.tolist() or [0] * len(names)
        tokens = [
            [] if is_chunk[i] else self._next_tokens(name, num_drafts[i])
            for i, name in enumerate(names)
        ]
        next_drafts = np.where(is_chunk, 0, self._config.num_spec_tokens).astype(np.int32)
        result = StepResult(
            step_id=plan.step_id,
            num_sampled_tokens=np.array([len(ids) for ids in tokens], dtype=np.int32),
            token_ids=np.array([i for ids in tokens for i in ids], dtype=np.int32),
            num_draft_tokens=next_drafts,
            draft_token_ids=np.zeros(next_drafts.sum(), dtype=np.int32),
        )
        output = self._core.update(result, 0.0)
        self._sums.num_output_tokens += len(output.token_ids)
        self._sums.num_finished += len(output.finished)
        for key, count in zip(output.keys.tolist(), output.num_new_tokens.tolist(), strict=True):
            self._num_given[self._names[key]] += count
            if count:
                self._sums.got_token(self._names[key], self._number)

    def _next_tokens(self, name: str, num_drafts: int) -> list[int]:
        self._accepted_credit += num_drafts * self._acceptance
        num_accepted = min(int(self._accepted_credit), num_drafts)
        self._accepted_credit -= num_accepted
        start = self._num_given[name]
        known = self._outputs[name][start : start + 1 + num_accepted].tolist()
        return known + [0] * (1 + num_accepted - len(known))


def _live_at_start(trace: TraceRecord) -> dict[str, list[int]]:
    """Tokens by request generated before the recording began in the middle of a run."""
    if "start" not in trace:
        return {}
    state = trace["start"]["state"]
    waiting = (*state["skipped"], *state.get("held", ()), *state["waiting"])
    names = (*state["running"], *waiting, *state.get("paused", ()))
    return {name: state["requests"][name]["output"] for name in names}


def _outputs_by_name(trace: TraceRecord) -> "dict[str, array[int]]":
    outputs: defaultdict[str, array[int]] = defaultdict(lambda: array("i"))
    for step in trace["steps"]:
        for output in step.get("update", {}).get("out", ()):
            outputs[output["id"]].extend(output["tokens"])
    return outputs


def _acceptance(trace: TraceRecord) -> float:
    """The share of drafts that the recorded worker accepted."""
    num_drafted = num_accepted = 0
    drafts_by_step: TraceRecord = {}
    for step in trace["steps"]:
        if spec := step.get("sched", {}).get("spec"):
            drafts_by_step[step["i"]] = spec
        update = step.get("update")
        if update is None:
            continue
        for name, drafts in drafts_by_step.pop(update["of"], {}).items():
            if name in update["sampled"]:
                num_drafted += len(drafts)
                num_accepted += len(update["sampled"][name]) - 1
    return num_accepted / num_drafted if num_drafted else 0.5
