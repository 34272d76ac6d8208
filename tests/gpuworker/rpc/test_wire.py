"""Messages and columns say the same."""

from dataclasses import replace

import numpy as np
import pytest

from gpuworker.core.plan import (
    ExecutedStep,
    LogprobColumns,
    OccupiedRows,
    RowError,
    RowLogprobColumns,
    SamplingSettings,
)
from gpuworker.rpc.wire import step_plan, step_result
from headrace.service.columns import pack_int32, unpack_int32
from headrace.service.errors import ServiceError
from headrace.v1 import common_pb2, gpuworker_pb2
from tests.gpuworker.driver import int32


def sampling_of(**fields: object) -> SamplingSettings:
    message = gpuworker_pb2.StepPlan(
        row_requests=[
            gpuworker_pb2.RowRequest(
                row=1,
                request_id="a",
                token_ids=pack_int32(int32(5, 6)),
                num_prompt_tokens=2,
                sampling=common_pb2.SamplingParams(**fields),
            )
        ]
    )
    return step_plan(message).row_requests[0].sampling


def test_a_plan_keeps_its_columns() -> None:
    message = gpuworker_pb2.StepPlan(
        step_id=7,
        freed_rows=pack_int32(int32(3)),
        appended_block_rows=pack_int32(int32(1, 1)),
        appended_block_ids=pack_int32(int32(8, 9)),
        rows=pack_int32(int32(1, 2)),
        num_computed_tokens=pack_int32(int32(0, 4)),
        num_scheduled_tokens=pack_int32(int32(5, 3)),
        num_draft_tokens=pack_int32(int32(0, 2)),
        draft_token_ids=pack_int32(int32(11, -1)),
        traceparent="00-x",
        audit=True,
    )
    plan = step_plan(message)
    assert plan.step_id == 7
    assert plan.freed_rows.tolist() == [3]
    assert plan.appended_block_rows.tolist() == [1, 1]
    assert plan.appended_block_ids.tolist() == [8, 9]
    assert plan.rows.tolist() == [1, 2]
    assert plan.num_computed_tokens.tolist() == [0, 4]
    assert plan.num_scheduled_tokens.tolist() == [5, 3]
    assert plan.num_draft_tokens.tolist() == [0, 2]
    assert plan.draft_token_ids.tolist() == [11, -1]
    assert plan.traceparent == "00-x"
    assert plan.wants_audit
    assert not step_plan(gpuworker_pb2.StepPlan()).wants_audit


def test_unset_sampling_fields_change_nothing() -> None:
    assert sampling_of() == SamplingSettings()


def test_set_sampling_fields_arrive() -> None:
    settings = sampling_of(
        temperature=0.0,
        top_p=0.5,
        top_k=2**32 - 1,
        min_p=0.25,
        seed=2**64 - 1,
        repetition_penalty=1.5,
        presence_penalty=-1.0,
        frequency_penalty=2.0,
        logit_bias={9: 4.0, 3: -100.0},
        min_tokens=6,
        stop_token_ids=[8, 7],
        ignore_eos=True,
        bad_token_ids=[{"ids": [4, 5]}, {"ids": [6]}],
        logprobs=0,
        prompt_logprobs=20,
    )
    assert settings == SamplingSettings(
        temperature=0.0,
        top_p=0.5,
        top_k=2**31 - 1,
        min_p=0.25,
        seed=2**64 - 1,
        repetition_penalty=1.5,
        presence_penalty=-1.0,
        frequency_penalty=2.0,
        logit_bias=((3, -100.0), (9, 4.0)),
        min_tokens=6,
        stop_token_ids=(8, 7),
        ignore_eos=True,
        bad_token_ids=((4, 5), (6,)),
        num_logprobs=0,
        num_prompt_logprobs=20,
    )


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": -0.5},
        {"temperature": float("nan")},
        {"top_p": 1.5},
        {"min_p": -0.1},
        {"repetition_penalty": 0.0},
        {"presence_penalty": float("inf")},
        {"logit_bias": {4: float("nan")}},
    ],
    ids=str,
)
def test_settings_that_would_spoil_logits_are_refused_by_name(fields: dict[str, object]) -> None:
    with pytest.raises(ServiceError, match=next(iter(fields))):
        sampling_of(**fields)


def test_a_column_of_odd_size_is_refused_by_name() -> None:
    with pytest.raises(ServiceError, match="rows"):
        step_plan(gpuworker_pb2.StepPlan(rows=b"123"))


def test_a_result_keeps_its_columns_and_logprobs() -> None:
    columns = LogprobColumns(
        int32(4),
        np.array([-0.5], dtype=np.float32),
        int32(2),
        np.array([[6, 4]], dtype=np.int32),
        np.array([[-0.25, -0.5]], dtype=np.float32),
    )
    message = step_result(
        ExecutedStep(
            step_id=3,
            num_sampled_tokens=int32(1, 0),
            token_ids=int32(4),
            num_draft_tokens=int32(2, 0),
            draft_token_ids=int32(8, 9),
            logprobs=(RowLogprobColumns(5, columns, None),),
            errors=(RowError(6, "bad"),),
            elapsed_s=0.5,
        )
    )
    assert message.step_id == 3
    assert unpack_int32(message.num_sampled_tokens, "").tolist() == [1, 0]
    assert unpack_int32(message.token_ids, "").tolist() == [4]
    assert unpack_int32(message.num_draft_tokens, "").tolist() == [2, 0]
    assert unpack_int32(message.draft_token_ids, "").tolist() == [8, 9]
    assert message.elapsed_s == 0.5
    assert [(e.row, e.message) for e in message.errors] == [(6, "bad")]
    (row,) = message.logprobs
    assert row.row == 5
    assert not row.prompt_tokens
    (token,) = row.tokens
    assert (token.token_id, token.logprob, token.rank) == (4, -0.5, 2)
    assert list(token.top_token_ids) == [6, 4]
    assert list(token.top_logprobs) == [-0.25, -0.5]


def test_a_result_keeps_the_rows_that_the_plan_asked_for() -> None:
    nothing = ExecutedStep(step_id=3, num_sampled_tokens=int32(), token_ids=int32())
    assert not step_result(nothing).HasField("audit")
    rows = OccupiedRows(int32(1, 4), int32(2, 1), int32(5, 3, 8))
    audit = step_result(replace(nothing, audit=rows)).audit
    assert unpack_int32(audit.rows, "").tolist() == [1, 4]
    assert unpack_int32(audit.num_blocks, "").tolist() == [2, 1]
    assert unpack_int32(audit.block_ids, "").tolist() == [5, 3, 8]
