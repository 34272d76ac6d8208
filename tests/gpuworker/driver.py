"""A scheduler as small as can be: places requests, hands out blocks, keeps count.

It may launch a step before the last one is finished, as a scheduler of pipeline depth 2 has it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from gpuworker.core.plan import AssignedRequest, ExecutedStep, ReceivedPlan, SamplingSettings
from gpuworker.runner import ModelRunner, PendingStep

UNKNOWN = -1
GREEDY = SamplingSettings(temperature=0.0)


def int32(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


@dataclass
class Request:
    """What the driver knows of a request; tokens grows with each step, by UNKNOWN at launch."""

    row: int
    tokens: list[int]
    num_prompt_tokens: int
    sampling: SamplingSettings
    num_computed_tokens: int = 0
    blocks: list[int] = field(default_factory=list)

    @property
    def output(self) -> list[int]:
        return self.tokens[self.num_prompt_tokens :]


class Driver:
    """Drives a runner; block ids are handed out in a scattered order."""

    def __init__(self, runner: ModelRunner, seed: int = 0) -> None:
        self.runner = runner
        self.requests: dict[int, Request] = {}
        blocks = np.arange(1, runner.limits.num_kv_blocks)
        np.random.default_rng(seed).shuffle(blocks)
        self.free_blocks: list[int] = blocks.tolist()
        self.wants_audit = False
        self._placed: list[Request] = []
        self._freed: list[int] = []
        self._step_id = 0
        self._launched: list[tuple[PendingStep, list[Request], dict[int, int]]] = []

    def add(
        self,
        row: int,
        prompt: Sequence[int],
        sampling: SamplingSettings = GREEDY,
        output: Sequence[int] = (),
    ) -> Request:
        """Places a request with the next step."""
        request = Request(row, [*prompt, *output], len(prompt), sampling)
        self.requests[row] = request
        self._placed.append(request)
        return request

    def free(self, row: int) -> Request:
        """Frees a row with the next step; its blocks can be used again at once."""
        request = self.requests.pop(row)
        self.free_blocks += request.blocks
        self._freed.append(row)
        return request

    def step(
        self, scheduled: Mapping[int, int], drafts: Mapping[int, Sequence[int]] | None = None
    ) -> ExecutedStep:
        """Runs one step: `scheduled` tokens of each row, then its drafts."""
        drafts = drafts or {}
        plan = self._plan(scheduled, drafts)
        result = self.runner.execute(plan)
        self._apply(scheduled, drafts, result)
        return result

    def launch(self, scheduled: Mapping[int, int]) -> PendingStep:
        """Starts a step without drafts; every row that reaches its last token gets one more."""
        step = self.runner.launch(self._plan(scheduled, {}))
        requests, columns = [], {}
        for row, count in scheduled.items():
            request = self.requests[row]
            requests.append(request)
            request.num_computed_tokens += count
            if request.num_computed_tokens == len(request.tokens):
                columns[row] = len(request.tokens)
                request.tokens.append(UNKNOWN)
        self._launched.append((step, requests, columns))
        return step

    @property
    def num_launched(self) -> int:
        return len(self._launched)

    def rows_launched(self) -> set[int]:
        """Rows that have a token on its way."""
        return {row for _, _, columns in self._launched for row in columns}

    def finish_oldest(self) -> ExecutedStep:
        """Finishes the step launched first; its tokens go to those who were in its rows."""
        step, requests, columns = self._launched.pop(0)
        result = step.finish()
        assert result.num_sampled_tokens.tolist() == [int(r.row in columns) for r in requests]
        for request, token in zip(
            (r for r in requests if r.row in columns), result.token_ids.tolist(), strict=True
        ):
            request.tokens[columns[request.row]] = token
        return result

    def finish(self, row: int, num_output: int) -> list[int]:
        """Steps one row to its end: whatever is left of its prompt at once, then token by token."""
        request = self.requests[row]
        while len(request.output) < num_output:
            self.step({row: len(request.tokens) - request.num_computed_tokens})
        return request.output[:num_output]

    def _plan(
        self, scheduled: Mapping[int, int], drafts: Mapping[int, Sequence[int]]
    ) -> ReceivedPlan:
        appended = []
        num_scheduled = []
        num_drafts = [len(drafts.get(row, ())) for row in scheduled]
        for (row, count), num in zip(scheduled.items(), num_drafts, strict=True):
            request = self.requests[row]
            num_scheduled.append(count + num)
            end = request.num_computed_tokens + count + num
            while len(request.blocks) * self.runner.limits.block_size < end:
                request.blocks.append(self.free_blocks.pop())
                appended.append((row, request.blocks[-1]))
        plan = ReceivedPlan(
            step_id=self._step_id,
            freed_rows=int32(*self._freed),
            row_requests=tuple(
                AssignedRequest(
                    r.row, f"r{r.row}", int32(*r.tokens), r.num_prompt_tokens, r.sampling
                )
                for r in self._placed
            ),
            appended_block_rows=int32(*(row for row, _ in appended)),
            appended_block_ids=int32(*(block for _, block in appended)),
            rows=int32(*scheduled),
            num_computed_tokens=int32(*(self.requests[r].num_computed_tokens for r in scheduled)),
            num_scheduled_tokens=int32(*num_scheduled),
            num_draft_tokens=int32(*num_drafts) if drafts else int32(),
            draft_token_ids=int32(*(t for row in scheduled for t in drafts.get(row, ()))),
            wants_audit=self.wants_audit,
        )
        self._step_id += 1
        self._placed, self._freed = [], []
        return plan

    def _apply(
        self,
        scheduled: Mapping[int, int],
        drafts: Mapping[int, Sequence[int]],
        result: ExecutedStep,
    ) -> None:
        start = 0
        for (row, count), num in zip(
            scheduled.items(), result.num_sampled_tokens.tolist(), strict=True
        ):
            request = self.requests[row]
            request.tokens += result.token_ids[start : start + num].tolist()
            start += num
            rejected = len(drafts.get(row, ())) - (num - 1) if num and row in drafts else 0
            request.num_computed_tokens += count + len(drafts.get(row, ())) - rejected
