"""Runs a recorded trace through the current core and finds the first difference.

Pure: a trace is a decoded JSON object, as recordings of vLLM 0.27.1 and `--record` hold it. Only
inputs (requests, aborts, sampled tokens, drafts) are read from the trace; the core makes every
decision again.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from scheduler.core.plan import (
    Int32Array,
    Pause,
    StepPlan,
    StepResult,
)
from scheduler.core.scheduler import SchedulerCore
from scheduler.replay import snapshot
from scheduler.replay.recorder import Recorder
from scheduler.replay.trace import TraceRecord, trace_config, trace_request

# Fields are compared in this order, the order in which the core decides them.
_SCHED_FIELDS = (
    "tokens", "computed", "new", "resumed", "hit", "preempted", "preempt_info", "spec", "blocks",
    "begun_leases", "ended_leases", "finished_ids", "common_prefix", "free",
)  # fmt: skip
_STATE_FIELDS = (
    *("free", "free_crc", "free_head"),
    *("running", "waiting", "skipped", "held", "paused", "reqs"),
)
_ORDERED = frozenset({"tokens", "computed"})


@dataclass(frozen=True, slots=True)
class Difference:
    """The first difference between a replay and its trace; a missing field is None.

    is_on_purpose: the difference is intended. In vLLM 0.27.1 min_tokens overrides even the length
    limit, and the request continues (and hangs at max_model_len); here the request ends.
    """

    trace: str
    step: int
    field: str
    expected: Any
    got: Any
    is_on_purpose: bool = False

    def __str__(self) -> str:
        return (
            f"{self.trace}: step {self.step}, {self.field}: "
            f"expected {self.expected!r}, got {self.got!r}"
        )


class Replay:
    """The replay of one trace through a core."""

    def __init__(self, trace: TraceRecord) -> None:
        self.trace = trace
        self._records: list[TraceRecord] = []
        self.core = Recorder(trace_config(trace), self._records.append)
        self._keys: dict[str, int] = {}
        # For each step without a result: its id, its requests' names and rows.
        self._flights: dict[int, tuple[int, list[str], list[int]]] = {}
        # When the last step was planned; the recording has no time of results.
        self._now = 0.0
        if "start" in trace:
            self._start(trace["start"])

    def steps(self) -> Iterator[tuple[TraceRecord, TraceRecord]]:
        """Yields each step's record in the trace and the current core's record for its inputs."""
        for expected in self.trace["steps"]:
            apply_inputs(self.core, expected, self._keys, self._add)
            if "sched" in expected:
                self._schedule(expected)
            for name in expected.get("abort_mid", ()):
                self.core.abort(self._keys[name])
            if "update" in expected:
                self._update(expected["update"])
            if "drafts" in expected:
                self._drafts(expected["drafts"])
            self.core.end_step()
            yield expected, self._records.pop()

    def on_plan(self, plan: StepPlan, now: float) -> None:
        """A step was planned; for those who watch the replay."""

    @property
    def names(self) -> Iterable[str]:
        """The requests so far."""
        return self._keys

    def _start(self, start: TraceRecord) -> None:
        """Restore the state of a recording that begins in the middle of a run."""
        names = start["state"]["requests"]
        self._keys = {name: key for key, name in enumerate(names)}
        specs = {name: trace_request(self.trace, name, key) for name, key in self._keys.items()}
        snapshot.restore(self.core.state, start["state"], specs)
        self.core.resume(start, self._keys)
        flights = zip(start["flights"], self.core.state.flights, strict=True)
        for (number, names), flight in flights:
            self._flights[number] = (flight.step_id, names, flight.rows.tolist())

    def _add(self, name: str, now: float) -> None:
        key = self._keys[name] = len(self._keys)
        self.core.add_request(trace_request(self.trace, name, key), now)

    def _schedule(self, step: TraceRecord) -> None:
        self._now = step.get("now", 0.0)
        plan = self.core.schedule(self._now, throttle_prefills=step.get("throttle", False))
        self.on_plan(plan, self._now)
        rows = plan.rows.tolist()
        names = [self.core.state.table.request(row).request_id for row in rows]
        self._flights[step["i"]] = (plan.step_id, names, rows)

    def _update(self, update: TraceRecord) -> None:
        step_id, names, rows = self._flights.pop(update["of"])
        sampled = [update["sampled"].get(name, []) for name in names]
        failed = update.get("failed", ())
        self.core.update(
            StepResult(
                step_id=step_id,
                num_sampled_tokens=_int32([len(tokens) for tokens in sampled]),
                token_ids=_int32([token for tokens in sampled for token in tokens]),
                failed_rows=tuple(rows[names.index(name)] for name in failed),
            ),
            update.get("now", self._now),
        )

    def _drafts(self, drafts: dict[str, list[int]]) -> None:
        # A recording that begins in the middle of a run lacks requests that ended before.
        drafts = {name: tokens for name, tokens in drafts.items() if name in self._keys}
        self.core.update_drafts(
            [self._keys[name] for name in drafts],
            _int32([len(tokens) for tokens in drafts.values()]),
            _int32([token for tokens in drafts.values() for token in tokens]),
        )


def apply_inputs(
    core: SchedulerCore,
    step: TraceRecord,
    key_by_name: Mapping[str, int],
    add: Callable[[str, float], None],
) -> None:
    """Feed a core the inputs of a step's record that come before `schedule`.

    Args:
        core: the core to drive.
        step: the record.
        key_by_name: the key of every request added so far; `add` extends the mapping.
        add: adds a request by name, at a time.
    """
    for control in step.get("ctl", ()):
        if control[0] == "pause":
            core.set_pause(Pause(control[1]))
        else:
            core.reset_prefix_cache(reset_running=control[1])
    for name in step.get("add", ()):
        add(name, step.get("now", 0.0))
    for name in step.get("ready", ()):
        core.mark_ready(name)
    for action, lease_id in step.get("leases", ()):
        if action == "commit":
            core.commit_lease(lease_id)
        else:
            core.end_lease(lease_id)
    for action, name in step.get("client", ()):
        if action == "pause":
            core.pause_request(key_by_name[name])
        else:
            core.continue_request(key_by_name[name])
    for name in step.get("abort", ()):
        core.abort(key_by_name[name])


def first_difference(trace: TraceRecord) -> Difference | None:
    """Replays a trace; the first difference, or None."""
    name = trace.get("name", "trace")
    num_outputs: Counter[str] = Counter()
    for expected, got in Replay(trace).steps():
        for output in expected.get("update", {}).get("out", ()):
            num_outputs[output["id"]] += len(output["tokens"])
        for field, want, have in _compared(expected, got):
            if not _equal(field, want, have):
                is_on_purpose = field == "update.out" and all(
                    _is_length_before_min_tokens(trace, num_outputs, *pair)
                    for pair in zip(want, have, strict=False)
                    if pair[0] != pair[1]
                )
                return Difference(name, expected["i"], field, want, have, is_on_purpose)
    return None


def _is_length_before_min_tokens(
    trace: TraceRecord, num_outputs: Counter[str], expected: TraceRecord, got: TraceRecord
) -> bool:
    request_id = expected["id"]
    min_tokens = trace["requests"].get(request_id, {}).get("min_tokens", 0)
    is_guarded = num_outputs[request_id] < min_tokens
    return is_guarded and got == expected | {"finish": "length"}


def _compared(expected: TraceRecord, got: TraceRecord) -> Iterator[tuple[str, Any, Any]]:
    yield "ctl", expected.get("ctl"), got.get("ctl")
    for field in _SCHED_FIELDS if "sched" in expected else ():
        yield f"sched.{field}", expected["sched"].get(field), got["sched"].get(field)
    for field in ("out", "pc") if "update" in expected else ():
        yield f"update.{field}", expected["update"].get(field), got["update"].get(field)
    for field in _STATE_FIELDS:
        want = expected["state"].get(field)
        # A recording may omit fields that are expensive to compute.
        if want is not None or field in {"skipped", "held", "paused"}:
            yield f"state.{field}", want, got["state"].get(field)


def _equal(field: str, expected: Any, got: Any) -> bool:
    if field.rpartition(".")[2] in _ORDERED:
        return bool(expected == got and list(expected) == list(got))
    return bool(expected == got)


def _int32(values: list[int]) -> Int32Array:
    return np.array(values, dtype=np.int32)
