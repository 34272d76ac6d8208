"""Builders and a fake worker for scheduler tests."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from scheduler.core.plan import (
    FinishedRequest,
    NewRequest,
    RequestStatus,
    SchedulerConfig,
    StepOutput,
    StepPlan,
    StepResult,
)
from scheduler.core.scheduler import SchedulerCore


def scheduler_config(**fields: Any) -> SchedulerConfig:
    """Small limits, unless given."""
    defaults: dict[str, Any] = {
        "block_size": 16,
        "num_gpu_blocks": 101,
        "max_model_len": 512,
        "max_num_batched_tokens": 128,
        "max_num_seqs": 8,
    }
    return SchedulerConfig(**(defaults | fields))


def check_book(core: SchedulerCore) -> None:
    """Every KV block has one owner, and every request is in one place."""
    assert not (faults := core.audit().faults), "\n".join(faults)


class AuditedCore(SchedulerCore):
    """Looks through its book of KV blocks after each call that moves blocks."""

    def schedule(self, now: float, *, throttle_prefills: bool = False) -> StepPlan:
        plan = super().schedule(now, throttle_prefills=throttle_prefills)
        check_book(self)
        return plan

    def update(self, result: StepResult, now: float) -> StepOutput:
        output = super().update(result, now)
        check_book(self)
        return output

    def pause_request(self, key: int) -> int | None:
        num_lost = super().pause_request(key)
        check_book(self)
        return num_lost

    def abort(
        self, key: int, status: RequestStatus = RequestStatus.ABORTED
    ) -> FinishedRequest | None:
        ended = super().abort(key, status)
        check_book(self)
        return ended


def new_request(key: int, num_prompt_tokens: int = 10, **fields: Any) -> NewRequest:
    """A request whose prompt is its own, unless tokens are given."""
    tokens = np.arange(num_prompt_tokens, dtype=np.int32) + 1000 * key
    defaults: dict[str, Any] = {
        "request_id": f"r{key}",
        "prompt_token_ids": tokens,
        "max_tokens": 16,
        "arrival_time": float(key),
    }
    return NewRequest(key=key, **(defaults | fields))


@dataclass
class Driver:
    """Runs a core against a fake worker that samples one known token for everybody."""

    core: SchedulerCore
    token_id: int = 7
    plans: list[StepPlan] = field(default_factory=list)
    outputs: list[StepOutput] = field(default_factory=list)
    now: float = 0.0

    def add(self, *requests: NewRequest) -> None:
        for request in requests:
            assert self.core.refusal(len(request.prompt_token_ids), request.max_tokens) is None
            self.core.add_request(request, self.now)

    def schedule(self) -> StepPlan:
        """Plan a step and keep the plan."""
        plan = self.core.schedule(self.now)
        self.plans.append(plan)
        return plan

    def update(self, plan: StepPlan, tokens: dict[str, list[int]] | None = None) -> StepOutput:
        """Answer a plan; tokens by request id, else one token each."""
        output = self.core.update(self.result(plan, tokens or {}), self.now)
        self.outputs.append(output)
        return output

    def step(self, tokens: dict[str, list[int]] | None = None) -> StepPlan:
        """Plan and answer."""
        plan = self.schedule()
        self.update(plan, tokens)
        return plan

    def steps(self, count: int) -> list[StepPlan]:
        """Plan and answer several times."""
        return [self.step() for _ in range(count)]

    def run(self, max_steps: int = 10_000) -> int:
        """Until every request has ended; how many steps that took."""
        for number in range(max_steps):
            if not self.core.has_unfinished:
                return number
            self.step()
        raise AssertionError("requests do not end")

    def result(self, plan: StepPlan, tokens: dict[str, list[int]]) -> StepResult:
        """What the worker makes of a plan that is the oldest in flight."""
        table = self.core.state.table
        sampled: list[list[int]] = []
        flights = [f for f in self.core.state.flights if f.step_id == plan.step_id]
        is_chunk = flights[0].is_prefill_chunk if flights else []
        for row, chunk in zip(plan.rows.tolist(), is_chunk, strict=True):
            request = table.requests[row]
            name = request.request_id if request else ""
            sampled.append([] if chunk else tokens.get(name, [self.token_id]))
        return StepResult(
            step_id=plan.step_id,
            num_sampled_tokens=np.array([len(ids) for ids in sampled], dtype=np.int32),
            token_ids=np.array([i for ids in sampled for i in ids], dtype=np.int32),
        )

    def propose(self, num_drafts: dict[str, int]) -> None:
        """Attach drafts, all of token 7."""
        keys = {request.request_id: key for key, request in self.core.state.requests.items()}
        counts = np.array(list(num_drafts.values()), dtype=np.int32)
        self.core.update_drafts(
            [keys[name] for name in num_drafts], counts, np.full(counts.sum(), 7, np.int32)
        )

    def scheduled(self, plan: StepPlan) -> dict[str, int]:
        """Tokens by request id, of a plan that is not answered yet or whose requests live on."""
        table = self.core.state.table
        counts = plan.num_scheduled_tokens.tolist()
        return {
            table.request(row).request_id: count
            for row, count in zip(plan.rows.tolist(), counts, strict=True)
        }
