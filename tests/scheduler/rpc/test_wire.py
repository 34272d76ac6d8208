"""What the scheduler makes of messages that a gpuworker should not send."""

import numpy as np
import pytest

from headrace.service.columns import pack_int32
from headrace.service.errors import ServiceError
from headrace.v1 import common_pb2, gpuworker_pb2, scheduler_pb2
from headrace.vocabulary import RefusalReason, WorkerRole
from scheduler.core.plan import FinishedRequest, RequestStatus
from scheduler.requests import FirstAdmission
from scheduler.rpc import wire
from scheduler.updates import NewAdmission, NotTaken, RequestEnd, RouterUpdate
from tests.scheduler.test_updates import live_request


def column(*values: int) -> bytes:
    return pack_int32(np.array(values, dtype=np.int32))


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"num_sampled_tokens": column(1, 1), "token_ids": column(5)}, "num_sampled_tokens"),
        ({"num_sampled_tokens": b"123"}, "num_sampled_tokens"),
        ({"token_ids": b"123"}, "token_ids"),
        ({"num_draft_tokens": column(2), "draft_token_ids": column(5)}, "num_draft_tokens"),
    ],
)
def test_a_result_whose_columns_do_not_fit_is_an_error_that_names_the_column(fields, name):
    with pytest.raises(ServiceError) as error:
        wire.worker_result(gpuworker_pb2.StepResult(step_id=1, **fields))
    assert error.value.field == name


def test_a_result_keeps_rows_that_failed_and_their_messages():
    result = wire.worker_result(
        gpuworker_pb2.StepResult(
            step_id=4,
            num_sampled_tokens=column(0, 1),
            token_ids=column(9),
            errors=[gpuworker_pb2.RowError(row=3, message="not finite")],
        )
    )
    assert result.step.failed_rows == (3,)
    assert result.message_by_failed_row == {3: "not finite"}


def worker_message(**fields: object) -> common_pb2.Worker:
    limits = {
        "worker_id": "w",
        "block_size": 16,
        "num_kv_blocks": 8,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "max_model_len": 128,
        "vocab_size": 1000,
    }
    return common_pb2.Worker(**(limits | fields))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("worker_id", ""),
        ("num_spec_tokens", 10**6),
        *(
            (name, value)
            for name in ("block_size", "num_kv_blocks", "max_num_seqs", "max_model_len")
            for value in (0, 2**31, 2**32 - 1)
        ),
    ],
)
def test_a_worker_with_limits_that_nothing_can_be_planned_for_is_refused(field, value):
    assert wire.worker_info(worker_message()).num_kv_blocks == 8
    with pytest.raises(ServiceError) as error:
        wire.worker_info(worker_message(**{field: value}))
    assert error.value.field == field


def test_a_worker_of_a_later_version_may_have_a_role_of_its_own():
    assert wire.worker_info(worker_message(role=99)).role is WorkerRole.MIXED


def test_every_final_status_has_a_reason_on_the_wire():
    for status in RequestStatus:
        if status.is_finished:
            request = live_request(1)
            facts = FinishedRequest(request.key, "r1", status, None, num_preemptions=2)
            end = RequestEnd(request, facts, "m")
            message = wire.scheduler_message(RouterUpdate(ends=(end,)))
            (finished,) = message.step_update.finished
            assert finished.reason != common_pb2.FINISH_REASON_UNSPECIFIED
            assert (finished.message, finished.num_preemptions) == ("m", 2)
            assert not finished.HasField("stop_token_id")


def test_refusals_alone_make_no_step_update():
    refusals = (NotTaken(3, RefusalReason.NO_WORKER, "none"),)
    message = wire.scheduler_message(RouterUpdate(refusals=refusals))
    assert not message.HasField("step_update")
    assert message.refusals[0].reason == scheduler_pb2.REFUSAL_REASON_NO_WORKER


def test_columns_are_little_endian_whatever_the_machine():
    both = RouterUpdate(
        handles=np.array([1, 2**31], dtype=np.uint32),
        num_new_tokens=np.array([1, 1], dtype=np.int32),
        token_ids=np.array([258, 7], dtype=np.int32),
        admissions=(NewAdmission(1, FirstAdmission(16, 5.0, "w")),),
    )
    update = wire.scheduler_message(both).step_update
    assert update.handles == b"\x01\0\0\0\0\0\0\x80"
    assert update.token_ids == b"\x02\x01\0\0\x07\0\0\0"
    assert update.admitted[0].num_cached_tokens == 16
