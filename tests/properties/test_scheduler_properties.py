"""Whatever happens to a scheduler: promises hold, a plain one does the same, recordings replay."""

import json
from collections import deque
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from scheduler.core.plan import (
    NewRequest,
    Pause,
    RemotePrefix,
    RepetitionLimit,
    SchedulerConfig,
    StepPlan,
    StepResult,
)
from scheduler.core.state import MAX_FREED_ROW_WAIT_S
from scheduler.replay.recorder import Recorder
from scheduler.replay.replay import first_difference
from scheduler.replay.schema import decode_head, decode_step
from scheduler.replay.trace import TraceRecord
from tests.scheduler.core.building import check_book
from tests.scheduler.core.mirror import MirroredWorker
from tests.scheduler.core.plain import PlainRecorder
from tests.scheduler.replay.assembling import assemble

EOS = 2
MAX_MODEL_LEN = 48
PREFIXES = [np.random.default_rng(seed).integers(3, 9, MAX_MODEL_LEN, np.int32) for seed in (1, 2)]

configs = st.builds(
    SchedulerConfig,
    block_size=st.sampled_from([2, 2, 4, 1]),
    num_gpu_blocks=st.integers(14, 70),
    max_model_len=st.just(MAX_MODEL_LEN),
    max_num_batched_tokens=st.integers(4, 60),
    max_num_seqs=st.integers(1, 8),
    long_prefill_token_threshold=st.sampled_from([0, 0, 7]),
    long_prefill_share=st.sampled_from([1.0, 0.5, 0.3]),
    enable_chunked_prefill=st.booleans(),
    policy=st.sampled_from(["fcfs", "priority", "preemptive_priority"]),
    enable_prefix_caching=st.booleans(),
    watermark=st.sampled_from([0.0, 0.0, 0.2]),
    reserve_full_sequence=st.booleans(),
    num_spec_tokens=st.sampled_from([0, 0, 3]),
    spec_kind=st.sampled_from(["ngram", "draft", "eagle"]),
    pipeline_depth=st.sampled_from([1, 1, 2, 3]),
)


def random_request(
    random: np.random.Generator, key: int, now: float, *, has_ties: bool
) -> NewRequest:
    """Prompts share beginnings; tokens are few, so that stops and repetitions happen."""
    length = int(random.integers(1, 30))
    prompt = PREFIXES[random.integers(2)][:length].copy()
    prompt[random.integers(length) :] += random.integers(3, dtype=np.int32)

    def maybe(share: float, value: Any, otherwise: Any) -> Any:
        return value if random.random() < share else otherwise

    return NewRequest(
        key=key,
        request_id=f"r{key}",
        prompt_token_ids=prompt,
        max_tokens=int(random.integers(1, 16)),
        arrival_time=float(random.integers(4)) + (0.0 if has_ties else key / 1000),
        priority=int(random.integers(4)),
        eos_token_ids=maybe(0.3, (EOS,), maybe(0.2, (EOS, 3), ())),
        stop_token_ids=maybe(0.1, (4, 5), maybe(0.1, tuple(range(20, 30)), ())),
        min_tokens=maybe(0.2, 3, 0),
        cache_salt=maybe(0.1, "salt", ""),
        skip_reading_prefix_cache=maybe(0.1, True, False),
        needs_grammar=maybe(0.15, True, False),
        deadline=maybe(0.1, now + 12.0, None),
        repetition=maybe(0.2, RepetitionLimit(2, 1, 3), None),
        remote_prefix=maybe(0.3, RemotePrefix("w2", int(random.integers(1, 9)), now + 9.0), None),
        export_s=maybe(0.2, 6.0, 0.0),
    )


class SchedulerMachine(RuleBasedStateMachine):
    """Drives two recorded cores alike: ours, and one that serves request by request."""

    @initialize(config=configs, seed=st.integers(0, 1000), has_ties=st.booleans())
    def start(self, config: SchedulerConfig, seed: int, has_ties: bool) -> None:
        self.config = config
        self.has_ties = has_ties
        self.random = np.random.default_rng(seed)
        self.now = 0.0
        self.records: tuple[list[TraceRecord], list[TraceRecord]] = ([], [])
        # The first core's records, in files that each begin where the one before ended.
        self.files: list[list[TraceRecord]] = []
        self.cores = (
            Recorder(config, self._record),
            PlainRecorder(config, self.records[1].append),
        )
        self.begin_file()
        self.core = self.cores[0]
        self.worker = MirroredWorker(config)
        self.num_added = 0
        self.unblocked: dict[int, bool] = {}
        self.flights: deque[tuple[StepPlan, Any]] = deque()
        self.ended: set[int] = set()
        self.first_admissions: list[int] = []
        self.pause = Pause.UNPAUSED

    @rule(count=st.integers(1, 5))
    def add(self, count: int) -> None:
        for _ in range(count):
            request = random_request(self.random, self.num_added, self.now, has_ties=self.has_ties)
            num_tokens = len(request.prompt_token_ids)
            if self.core.refusal(num_tokens, request.max_tokens) is not None:
                continue
            self.num_added += 1
            is_blocked = request.needs_grammar or request.remote_prefix is not None
            self.unblocked[request.key] = not is_blocked
            for core in self.cores:
                core.add_request(request, self.now)

    @rule(data=st.data())
    @precondition(lambda self: self.num_added)
    def abort(self, data: st.DataObject) -> None:
        self._abort(data.draw(st.integers(0, self.num_added - 1)))

    @rule(data=st.data())
    @precondition(lambda self: self.num_added)
    def mark_ready(self, data: st.DataObject) -> None:
        key = data.draw(st.integers(0, self.num_added - 1))
        for core in self.cores:
            core.mark_ready(f"r{key}")

    @rule(data=st.data())
    @precondition(lambda self: self.num_added)
    def pause_request(self, data: st.DataObject) -> None:
        self._pause(data.draw(st.integers(0, self.num_added - 1)))

    @rule(data=st.data())
    @precondition(lambda self: self.num_added)
    def continue_request(self, data: st.DataObject) -> None:
        self._continue(data.draw(st.integers(0, self.num_added - 1)))

    @rule(pause=st.sampled_from(list(Pause)))
    def set_pause(self, pause: Pause) -> None:
        self.pause = pause
        for core in self.cores:
            core.set_pause(pause)

    @rule(reset_running=st.booleans())
    def reset_prefix_cache(self, reset_running: bool) -> None:
        first, second = (c.reset_prefix_cache(reset_running=reset_running) for c in self.cores)
        assert first == second

    @rule(
        count=st.integers(1, 8),
        throttle=st.sampled_from([False, False, False, True]),
        mid=st.sampled_from(["", "abort", "pause", "pause and continue"]),
    )
    def steps(self, count: int, throttle: bool, mid: str) -> None:
        for _ in range(count):
            self._step(throttle=throttle)
            if mid and self.num_added:
                self._act_in_mid_step(mid, int(self.random.integers(self.num_added)))
            while len(self.flights) >= self.config.pipeline_depth:
                self._update()
            mid = ""

    @rule()
    def begin_file(self) -> None:
        first, second = (core.header("run") for core in self.cores)
        assert first == second
        self.files.append([first])

    @invariant()
    def every_block_has_one_owner(self) -> None:
        if hasattr(self, "cores"):
            for core in self.cores:
                check_book(core)

    @invariant()
    def both_cores_agree(self) -> None:
        if hasattr(self, "records"):
            core, plain = self.records
            assert core == plain

    def teardown(self) -> None:
        if not hasattr(self, "cores"):
            return
        self._run_to_the_end()
        self.both_cores_agree()
        assert self.ended == set(range(self.num_added)), "no final status"
        assert self.core.num_free_blocks == self.config.num_gpu_blocks - 1
        for key in range(self.num_added):
            explanation = self.core.explain(f"r{key}")
            assert explanation is not None
            assert explanation.status.is_finished
            spent_s, total_s = explanation.spent_s.values(), explanation.until - explanation.began
            assert sum(spent_s) == pytest.approx(total_s), "the stages add up to the whole"
            assert min(spent_s) >= 0
        if self.config.policy == "fcfs" and self.config.long_prefill_share == 1:
            in_order = [key for key in self.first_admissions if self.unblocked[key]]
            assert in_order == sorted(in_order), "somebody overtook under FCFS"
        for number, records in enumerate(self.files):
            lines = [json.dumps(record) for record in records]
            read = [decode_head(lines[0]), *map(decode_step, lines[1:])]
            trace = assemble(cast("list[TraceRecord]", read))
            difference = first_difference(trace)
            assert difference is None, f"file {number}: {difference}"

    def _run_to_the_end(self) -> None:
        self.set_pause(Pause.UNPAUSED)
        for key in range(self.num_added):
            for core in self.cores:
                core.mark_ready(f"r{key}")
            self._continue(key)
        for _ in range(1500):
            if not self.core.has_unfinished and not len(self.core.state.leases):
                break
            self.steps(1, throttle=False, mid="")
        while self.flights:
            self._update()
        if self.has_ties and self.config.policy != "fcfs":
            # Two that are equal in priority and arrival may take blocks from each other for ever,
            # as in vLLM 0.27.1: the victim is the first of equals.
            for key in range(self.num_added):
                self._abort(key)
        for core in self.cores:
            core.end_step()

    def _act_in_mid_step(self, action: str, key: int) -> None:
        if action == "abort":
            self._abort(key)
        else:
            self._pause(key)
            if action == "pause and continue":
                self._continue(key)

    def _pause(self, key: int) -> None:
        # One that comes back before its first admission is ahead of those it was behind.
        self.unblocked[key] = False
        num_free = self.core.num_free_blocks
        num_lost, other = (core.pause_request(key) for core in self.cores)
        assert num_lost == other
        assert self.core.num_free_blocks >= num_free

    def _continue(self, key: int) -> None:
        for core in self.cores:
            core.continue_request(key)

    def _record(self, record: TraceRecord) -> None:
        self.records[0].append(record)
        self.files[-1].append(record)

    def _abort(self, key: int) -> None:
        first, second = (core.abort(key) for core in self.cores)
        assert first == second
        if first is not None:
            self.ended.add(key)

    def _step(self, *, throttle: bool) -> None:
        # Rows that became free are told at once or with a later plan.
        self.now += 1.0 if self.random.random() < 0.7 else MAX_FREED_ROW_WAIT_S / 2
        plan, other = (c.schedule(self.now, throttle_prefills=throttle) for c in self.cores)
        check_book(self.core)
        self.worker.apply(plan)
        self.worker.check(self.core)
        assert plan.facts == other.facts
        assert plan.appended_block_rows.tolist() == other.appended_block_rows.tolist()
        assert plan.freed_rows.tolist() == other.freed_rows.tolist()
        assert plan.rows.tolist() == other.rows.tolist()
        num_tokens = plan.num_scheduled_tokens.tolist()
        assert sum(num_tokens) <= self.config.max_num_batched_tokens
        assert all(count > 0 for count in num_tokens)
        assert self.core.num_running <= self.config.max_num_seqs
        table = self.core.state.table
        keys = [table.request(row).key for row in plan.rows.tolist()]
        assert len(set(keys)) == len(keys)
        assert not set(keys) & set(plan.preempted_keys), "scheduled and preempted in one step"
        assert not set(keys) & set(self.core.state.queues.paused), "scheduled and paused"
        assert set(plan.appended_block_rows.tolist()) <= set(plan.rows.tolist())
        for victim in plan.facts.victims:
            assert victim.trigger_id, "a victim of nobody"
        if not plan.facts.victims and self.pause is Pause.UNPAUSED and not throttle:
            self._check_nobody_is_forgotten(plan, keys)
        self.first_admissions += [a.key for a in plan.admissions if not a.is_resumed]
        self.ended |= {one.key for one in plan.expired}
        flight = next((f for f in self.core.state.flights if f.step_id == plan.step_id), None)
        self.flights.append((plan, flight))
        self._end_transfers()

    def _end_transfers(self) -> None:
        """Some transfers end, most of them well."""
        for lease in list(self.core.state.leases):
            chance = self.random.random()
            if chance < 0.3 and lease.is_import and not self.core.state.leases.is_committed(lease):
                self.worker.receive(lease)
                for core in self.cores:
                    core.commit_lease(lease.lease_id)
            elif chance > 0.9:
                for core in self.cores:
                    core.end_lease(lease.lease_id)

    def _check_nobody_is_forgotten(self, plan: StepPlan, keys: list[int]) -> None:
        """Every waiting request has a reason: its own, or that of the head it is behind."""
        facts = plan.facts
        assert len(facts.passed_over) + facts.num_behind_head == self.core.num_waiting
        if facts.num_behind_head:
            assert facts.passed_over, "somebody waits behind nobody"

    def _update(self) -> None:
        plan, flight = self.flights.popleft()
        if flight is None:
            return
        drafts = plan.num_draft_tokens.tolist() or [0] * plan.num_reqs
        has_failed = self.random.random(plan.num_reqs) < 0.02
        counts = [
            0 if is_chunk or failed else int(self.random.integers(1, num_drafts + 2))
            for is_chunk, failed, num_drafts in zip(
                flight.is_prefill_chunk, has_failed, drafts, strict=True
            )
        ]
        proposed = np.zeros(0, np.int32)
        if self.config.num_spec_tokens:
            proposed = self.random.integers(0, self.config.num_spec_tokens + 1, plan.num_reqs)
        result = StepResult(
            step_id=plan.step_id,
            num_sampled_tokens=np.array(counts, dtype=np.int32),
            token_ids=self.random.integers(2, 9, sum(counts), dtype=np.int32),
            num_draft_tokens=proposed.astype(np.int32),
            draft_token_ids=self.random.integers(2, 9, int(proposed.sum()), dtype=np.int32),
            failed_rows=tuple(plan.rows[has_failed].tolist()),
        )
        output, other = (core.update(result, self.now) for core in self.cores)
        check_book(self.core)
        assert output.finished == other.finished
        assert output.token_ids.tolist() == other.token_ids.tolist()
        assert output.keys.tolist() == other.keys.tolist()
        self.ended |= {one.key for one in output.finished}


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(
    max_examples=60,
    stateful_step_count=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
