"""A result must answer its plan, or its worker cannot be trusted any more."""

from dataclasses import replace

import numpy as np
import pytest

from scheduler.core.plan import EMPTY_INT32, NO_FACTS, StepOutput, StepPlan, StepResult
from scheduler.core.scheduler import SchedulerCore
from scheduler.in_flight import InFlight
from scheduler.worker import WorkerLostError, WorkerResult, WorkerSpec
from tests.scheduler.core.building import new_request, scheduler_config


def int32(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


PLAN = StepPlan(
    step_id=4,
    freed_rows=EMPTY_INT32,
    row_requests=(),
    appended_block_rows=EMPTY_INT32,
    appended_block_ids=EMPTY_INT32,
    rows=int32(0, 1),
    num_computed_tokens=int32(5, 6),
    num_scheduled_tokens=int32(1, 1),
    num_draft_tokens=EMPTY_INT32,
    draft_token_ids=EMPTY_INT32,
    is_prefill_chunk=np.zeros(2, dtype=np.bool_),
    admissions=(),
    preempted_keys=(),
    expired=(),
    facts=NO_FACTS,
)
RESULT = StepResult(step_id=4, num_sampled_tokens=int32(1, 1), token_ids=int32(7, 8))
DRAFTED = replace(RESULT, num_draft_tokens=int32(0, 2), draft_token_ids=int32(1, 1))


INFO = WorkerSpec(
    worker_id="w0",
    incarnation="1",
    model="fake",
    max_model_len=64,
    block_size=4,
    num_kv_blocks=16,
    max_num_seqs=2,
    max_num_batched_tokens=64,
    vocab_size=100,
)


def check(step: StepResult, num_spec_tokens: int = 0, plan: StepPlan = PLAN) -> None:
    flight = InFlight(plan, np.array([10, 11], dtype=np.int64))
    result = WorkerResult(step=step, logprobs=(), message_by_failed_row={})
    flight.check(result, replace(INFO, num_spec_tokens=num_spec_tokens))


@pytest.mark.parametrize(("step", "num_spec_tokens"), [(RESULT, 0), (RESULT, 2), (DRAFTED, 2)])
def test_a_result_that_answers_its_plan_is_taken(step: StepResult, num_spec_tokens: int) -> None:
    check(step, num_spec_tokens)


@pytest.mark.parametrize(
    ("step", "num_spec_tokens", "message"),
    [
        (replace(RESULT, step_id=5), 0, "step 5"),
        (replace(RESULT, num_sampled_tokens=int32(1)), 0, "1 requests of 2"),
        (DRAFTED, 1, "drafts"),
        (DRAFTED, 0, "drafts"),
        (replace(DRAFTED, num_draft_tokens=int32(2)), 2, "drafts"),
    ],
)
def test_any_other_result_means_that_the_worker_is_lost(
    step: StepResult, num_spec_tokens: int, message: str
) -> None:
    with pytest.raises(WorkerLostError, match=message):
        check(step, num_spec_tokens)


DRAFTS_DUE = replace(PLAN, num_draft_tokens=int32(2, 0), draft_token_ids=int32(1, 1))
CHUNK = replace(PLAN, is_prefill_chunk=np.array([True, False]))


@pytest.mark.parametrize(
    ("plan", "num_sampled", "failed_rows"),
    [
        (PLAN, (1, 1), ()),
        (PLAN, (0, 1), (0,)),
        (DRAFTS_DUE, (3, 1), ()),
        (DRAFTS_DUE, (1, 1), ()),
        (CHUNK, (0, 1), ()),
        (CHUNK, (0, 1), (0,)),
    ],
)
def test_each_request_gets_as_many_tokens_as_are_due(plan, num_sampled, failed_rows) -> None:
    check(sampled_step(num_sampled, failed_rows), plan=plan)


@pytest.mark.parametrize(
    ("plan", "num_sampled", "failed_rows"),
    [
        (PLAN, (0, 1), ()),
        (PLAN, (2, 1), ()),
        (PLAN, (1, 1), (0,)),
        (PLAN, (1, 1), (5,)),
        (DRAFTS_DUE, (4, 1), ()),
        (DRAFTS_DUE, (0, 1), ()),
        (DRAFTS_DUE, (1, 2), ()),
        (CHUNK, (1, 1), ()),
    ],
)
def test_more_or_fewer_tokens_lose_the_worker(plan, num_sampled, failed_rows) -> None:
    with pytest.raises(WorkerLostError):
        check(sampled_step(num_sampled, failed_rows), plan=plan)


def sampled_step(num_sampled, failed_rows) -> StepResult:
    return StepResult(
        step_id=4,
        num_sampled_tokens=int32(*num_sampled),
        token_ids=np.full(sum(num_sampled), 7, dtype=np.int32),
        failed_rows=failed_rows,
    )


def test_drafts_are_counted_for_those_that_got_tokens() -> None:
    plan = replace(PLAN, rows=int32(0, 1, 2, 3), num_draft_tokens=int32(3, 0, 2, 2))
    keys = np.array([10, 11, 12, 13], dtype=np.int64)
    # The third was cancelled on the way.
    output = StepOutput(
        step_id=4,
        keys=keys[[0, 1, 3]],
        num_new_tokens=int32(2, 1, 1),
        token_ids=int32(0, 1, 2, 6),
        finished=(),
    )
    counts = InFlight(plan, keys).draft_counts(output)
    assert counts.tolist() == [[3, 1], [0, 0], [2, 0]]
    assert counts.dtype == np.int32
    assert not len(InFlight(PLAN, keys[:2]).draft_counts(output))


@pytest.mark.parametrize(
    ("ends", "num_tokens", "num_accepted"),
    [
        ({"max_tokens": 2}, 2, 0),
        ({"max_tokens": 4}, 4, 2),
        ({"max_tokens": 7}, 7, 4),
        ({"eos_token_ids": (105,)}, 5, 3),
        ({"stop_token_ids": (107,)}, 7, 4),
    ],
)
def test_drafts_behind_the_end_are_not_accepted(ends, num_tokens, num_accepted) -> None:
    """Three drafts are right in every step; tokens are counted from 101."""
    core = SchedulerCore(scheduler_config(num_spec_tokens=3, spec_kind="ngram"))
    core.add_request(new_request(0, 10, **({"max_tokens": 50} | ends)), 0.0)
    totals, begin = np.zeros(2, np.int32), 101
    while core.has_unfinished:
        plan = core.schedule(0.0)
        end = begin + 1 + int(plan.num_draft_tokens.sum())
        result = StepResult(
            step_id=plan.step_id,
            num_sampled_tokens=int32(end - begin),
            token_ids=int32(*range(begin, end)),
            num_draft_tokens=int32(3),
            draft_token_ids=int32(0, 0, 0),
        )
        output = core.update(result, 0.0)
        totals += InFlight(plan, output.keys).draft_counts(output).sum(axis=0, dtype=np.int32)
        begin += len(output.token_ids)
    assert (begin - 101, totals[1]) == (num_tokens, num_accepted)
