"""Records a run: a core's inputs and decisions, in the trace format.

A Recorder is a SchedulerCore whose input methods also write a record. The records are plain data;
the caller decides where they go (a file, a comparison).
"""

from collections.abc import Callable
from enum import IntEnum
from typing import Any

import numpy as np

from scheduler.core.plan import (
    FinishedRequest,
    Int32Array,
    NewRequest,
    Pause,
    RequestStatus,
    ResetOutcome,
    SchedulerConfig,
    StepOutput,
    StepPlan,
    StepResult,
)
from scheduler.core.scheduler import SchedulerCore
from scheduler.replay import snapshot
from scheduler.replay.trace import TraceRecord, header, request_record

_FINISH_NAMES = {
    RequestStatus.STOPPED: "stop",
    RequestStatus.LENGTH_CAPPED: "length",
    RequestStatus.REPETITION: "repetition",
    RequestStatus.ERROR: "error",
}


class _Phase(IntEnum):
    """The order of events within a step record."""

    NONE = 0
    CONTROL = 1
    ADD = 2
    READY = 3
    LEASE = 4
    CLIENT = 5
    ABORT = 6
    SCHEDULE = 7
    ABORT_MID = 8
    UPDATE = 9
    DRAFTS = 10


_ONCE = frozenset({_Phase.SCHEDULE, _Phase.UPDATE, _Phase.DRAFTS})


class Recorder(SchedulerCore):
    """A SchedulerCore that records its inputs and decisions.

    Args:
        config: the core's settings.
        emit: called with each step's record at the end of the step.
        max_crc_blocks: records have no checksum of a free list longer than this.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        emit: Callable[[TraceRecord], None],
        *,
        max_crc_blocks: int = 1 << 30,
    ) -> None:
        super().__init__(config)
        self._emit = emit
        self._max_crc_blocks = max_crc_blocks
        self._is_stopped = False
        self._step: TraceRecord = {}
        self._phase = _Phase.NONE
        self._num_steps = 0
        # Names of live requests.
        self._name_by_key: dict[int, str] = {}
        # Names used in the current file.
        self._names: set[str] = set()
        # For each step without a result: its number in this file, its requests' names and rows.
        self._flights: dict[int, tuple[int, list[str], list[int]]] = {}
        self._finished: list[str] = []
        # Cached tokens of each live request's first admission; -1 once an output record has them.
        self._first_cached: dict[str, int] = {}

    def add_request(self, request: NewRequest, now: float) -> None:
        if self._enter(_Phase.ADD):
            name = request.request_id
            if name in self._names:
                name = f"{name}~{request.key}"
            self._names.add(name)
            self._name_by_key[request.key] = name
            self._step.setdefault("add", []).append(name)
            self._step.setdefault("requests", {})[name] = request_record(request, self._num_steps)
        super().add_request(request, now)

    def mark_ready(self, request_id: str) -> None:
        if self._enter(_Phase.READY):
            self._step.setdefault("ready", []).append(request_id)
        super().mark_ready(request_id)

    def commit_lease(self, lease_id: int) -> None:
        if self._enter(_Phase.LEASE):
            self._step.setdefault("leases", []).append(["commit", lease_id])
        super().commit_lease(lease_id)

    def end_lease(self, lease_id: int) -> None:
        if self._enter(_Phase.LEASE):
            self._step.setdefault("leases", []).append(["end", lease_id])
        super().end_lease(lease_id)

    def pause_request(self, key: int) -> int | None:
        self._note_client("pause", key)
        return super().pause_request(key)

    def continue_request(self, key: int) -> None:
        self._note_client("continue", key)
        super().continue_request(key)

    def abort(
        self, key: int, status: RequestStatus = RequestStatus.ABORTED
    ) -> FinishedRequest | None:
        is_mid = self._phase in {_Phase.SCHEDULE, _Phase.ABORT_MID}
        phase, field = (_Phase.ABORT_MID, "abort_mid") if is_mid else (_Phase.ABORT, "abort")
        if key in self.state.requests and self._enter(phase):
            self._step.setdefault(field, []).append(self._name_by_key[key])
        finished = super().abort(key, status)
        if finished is not None:
            self._note_finished((finished,))
        return finished

    def set_pause(self, pause: Pause) -> None:
        if self._enter(_Phase.CONTROL):
            self._step.setdefault("ctl", []).append(["pause", pause.value])
        super().set_pause(pause)

    def reset_prefix_cache(self, *, reset_running: bool) -> ResetOutcome:
        is_recorded = self._enter(_Phase.CONTROL)
        outcome = super().reset_prefix_cache(reset_running=reset_running)
        if is_recorded:
            names = [self._name_by_key[key] for key in outcome.preempted_keys]
            self._step.setdefault("ctl", []).append(
                ["reset_prefix_cache", reset_running, outcome.is_reset, names]
            )
        return outcome

    def schedule(self, now: float, *, throttle_prefills: bool = False) -> StepPlan:
        is_recorded = self._enter(_Phase.SCHEDULE)
        plan = super().schedule(now, throttle_prefills=throttle_prefills)
        if is_recorded:
            if throttle_prefills:
                self._step["throttle"] = True
            if now:
                self._step["now"] = now
            self._note_finished(plan.expired)
            self._step["sched"] = self._plan_record(plan)
        return plan

    def update(self, result: StepResult, now: float) -> StepOutput:
        # The plan of an empty step may be in the previous file, so that its result has no flight.
        if result.step_id not in self._flights or not self._enter(_Phase.UPDATE):
            return super().update(result, now)
        number, names, rows = self._flights[result.step_id]
        # An earlier empty step may never have got a result.
        self._flights = {i: flight for i, flight in self._flights.items() if i > result.step_id}
        sampled = _split(names, result.num_sampled_tokens, result.token_ids)
        output = super().update(result, now)
        record: TraceRecord = {
            "of": number,
            "sampled": {name: tokens for name, tokens in sampled.items() if tokens},
            "out": self._output_record(output),
        }
        if any(request.export_lease_id is not None for request in output.finished):
            record["now"] = now  # from which the leases run
        self._step["update"] = record
        stats = self.take_prefix_cache_stats()
        counts = [getattr(stats, field) for field in stats.__slots__]
        if any(counts):
            record["pc"] = counts
        if result.failed_rows:
            record["failed"] = [names[rows.index(row)] for row in result.failed_rows]
        if len(result.num_draft_tokens):
            self._step["drafts"] = _split(names, result.num_draft_tokens, result.draft_token_ids)
            self._phase = _Phase.DRAFTS
        self._note_finished(output.finished)
        return output

    def update_drafts(
        self, keys: list[int], num_drafts: Int32Array, draft_token_ids: Int32Array
    ) -> None:
        if self._enter(_Phase.DRAFTS):
            drafts = _split(keys, num_drafts, draft_token_ids)
            self._step["drafts"] = {
                self._name_by_key[key]: tokens
                for key, tokens in drafts.items()
                if key in self._name_by_key  # other requests have ended
            }
        super().update_drafts(keys, num_drafts, draft_token_ids)

    def header(self, name: str) -> TraceRecord:
        """The first record of a recording that begins here.

        In the middle of a run, this record holds the core's state. `emit` may request this record
        after any other record, to begin a new file: each file replays by itself.
        """
        self.end_step()
        record = header(self.config, name)
        if not self._num_steps:
            return record
        self.forget_names()
        flights = self.state.flights
        self._flights = {flight.step_id: self._flights[flight.step_id] for flight in flights}
        live = self.state.requests.items()
        record["requests"] = {
            self._name_by_key[key]: request_record(request.spec, 0) for key, request in live
        }
        record["start"] = {
            "step": self._num_steps,
            "state": snapshot.take(self.state, self._name_by_key),
            "finished_ids": list(self._finished),
            "first_cached": dict(self._first_cached),
            "flights": [flight[:2] for flight in self._flights.values()],
        }
        return record

    def resume(self, start: TraceRecord, key_by_name: dict[str, int]) -> None:
        """Continue from a recording's initial state, which the core has been restored to."""
        self._num_steps = start["step"]
        self._name_by_key = {key: name for name, key in key_by_name.items()}
        self._names = set(key_by_name)
        self._finished = list(start["finished_ids"])
        self._first_cached = dict(start["first_cached"])
        for (number, names), flight in zip(start["flights"], self.state.flights, strict=True):
            self._flights[flight.step_id] = (number, names, flight.rows.tolist())

    def forget_names(self) -> None:
        """Allow reuse of the names of ended requests, which no record of the new file holds."""
        self._names = set(self._name_by_key.values())

    def stop(self) -> None:
        """Stop recording: from now on the Recorder is a plain SchedulerCore."""
        self._is_stopped = True
        self._phase = _Phase.NONE
        for noted in (
            *(self._step, self._name_by_key, self._names),
            *(self._flights, self._finished, self._first_cached),
        ):
            noted.clear()

    def end_step(self) -> None:
        """Close the step's record: the next event begins a new record."""
        if self._phase is _Phase.NONE:
            return
        self._step["state"] = snapshot.state_record(
            self.state, self._name_by_key, max_crc_blocks=self._max_crc_blocks
        )
        step = {"i": self._num_steps, **self._step}
        self._num_steps += 1
        self._step = {}
        self._phase = _Phase.NONE
        self._emit(step)

    def _enter(self, phase: _Phase) -> bool:
        """Whether to record the event; begins a new step's record if the phase order requires."""
        if phase < self._phase or (phase == self._phase and phase in _ONCE):
            self.end_step()
        if not self._is_stopped:
            self._phase = phase
        return not self._is_stopped

    def _note_client(self, action: str, key: int) -> None:
        if key in self.state.requests and self._enter(_Phase.CLIENT):
            self._step.setdefault("client", []).append([action, self._name_by_key[key]])

    def _note_finished(self, finished: tuple[FinishedRequest, ...]) -> None:
        """Note that requests ended; their names stay reserved in the current file."""
        if self._is_stopped:
            return
        for request in finished:
            name = self._name_by_key.pop(request.key)
            self._first_cached.pop(name, None)
            self._finished.append(name)

    def _plan_record(self, plan: StepPlan) -> TraceRecord:
        requests = self.state.table.requests
        names = []
        for row in plan.rows.tolist():
            request = requests[row]
            assert request is not None, f"row {row} is scheduled and free"
            names.append(self._name_by_key[request.key])
        rows = plan.rows.tolist()
        name_by_row = dict(zip(rows, names, strict=True))
        self._flights[plan.step_id] = (self._num_steps, names, rows)
        admitted = {self._name_by_key[a.key]: a for a in plan.admissions}
        for name, admission in admitted.items():
            self._first_cached.setdefault(name, admission.num_cached_tokens)
        record: TraceRecord = {
            "tokens": dict(zip(names, plan.num_scheduled_tokens.tolist(), strict=True)),
            "new": [name for name, a in admitted.items() if not a.is_resumed],
            "resumed": [name for name, a in admitted.items() if a.is_resumed],
        }
        if plan.preempted_keys:
            victims = plan.facts.victims
            record["preempted"] = [self._name_by_key[victim.key] for victim in victims]
            record["preempt_info"] = [
                [self._name_by_key[v.key], self._name_by_key[v.trigger_key], int(v.was_scheduled)]
                for v in victims
            ]
        if self._finished:
            record["finished_ids"] = sorted(self._finished)
            self._finished = []
        record["computed"] = dict(zip(names, plan.num_computed_tokens.tolist(), strict=True))
        if admitted:
            record["hit"] = {name: a.num_cached_tokens for name, a in admitted.items()}
        if len(plan.num_draft_tokens):
            spec = _split(names, plan.num_draft_tokens, plan.draft_token_ids)
            record["spec"] = {name: drafts for name, drafts in spec.items() if drafts}
        blocks: dict[str, list[int]] = {}
        appended = zip(
            plan.appended_block_rows.tolist(), plan.appended_block_ids.tolist(), strict=True
        )
        for row, block_id in appended:
            blocks.setdefault(name_by_row[row], []).append(block_id)
        if blocks:
            record["blocks"] = blocks
        leases = {
            "begun_leases": [[lease.lease_id, *lease.block_ids] for lease in plan.begun_leases],
            "ended_leases": list(plan.ended_leases),
        }
        record |= {field: value for field, value in leases.items() if value}
        common_prefix = self.state.kv.num_common_prefix_blocks()
        if common_prefix:
            record["common_prefix"] = common_prefix
        record["free"] = self.num_free_blocks
        return record

    def _output_record(self, output: StepOutput) -> list[TraceRecord]:
        ends = {request.key: request for request in output.finished}
        records = []
        tokens = _split(output.keys.tolist(), output.num_new_tokens, output.token_ids)
        for key in dict.fromkeys([*tokens, *ends]):
            name = self._name_by_key[key]
            record: TraceRecord = {"id": name, "tokens": tokens.get(key, [])}
            end = ends.get(key)
            if end is not None:
                record["finish"] = _FINISH_NAMES[end.status]
                if end.stop_token_id is not None:
                    record["stop_reason"] = end.stop_token_id
                elif end.status is RequestStatus.REPETITION:
                    record["stop_reason"] = "repetition_detected"
            if name in self._first_cached:
                cached = self._first_cached[name]
                if cached >= 0:
                    record["cached"] = cached
                    self._first_cached[name] = -1
            records.append(record)
        return records


def _split(names: list[Any], counts: Int32Array, token_ids: Int32Array) -> dict[Any, list[int]]:
    ends = np.cumsum(counts).tolist()
    tokens = token_ids.tolist()
    return {
        name: tokens[end - count : end]
        for name, count, end in zip(names, counts.tolist(), ends, strict=True)
    }
