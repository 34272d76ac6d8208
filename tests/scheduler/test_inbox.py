"""Messages to an engine, read between two steps or never."""

import time

import numpy as np
import pytest

from headrace.status.states import Writer
from headrace.status.store import StatusStore
from scheduler.core.plan import RequestStatus
from scheduler.core.scheduler import SchedulerCore
from scheduler.inbox import Cancel, Inbox, Pausing
from scheduler.request_log import RequestLog
from scheduler.requests import LiveRequest, Submission
from scheduler.switchboard import Switchboard
from scheduler.worker import WorkerSpec
from tests.scheduler.core.building import scheduler_config

INFO = WorkerSpec(
    worker_id="w0",
    incarnation="1",
    model="fake",
    max_model_len=100_000,
    block_size=4,
    num_kv_blocks=30_000,
    max_num_seqs=4,
    max_num_batched_tokens=64,
    vocab_size=100,
)


class Nowhere:
    def cancel(self, request, status):
        raise AssertionError("nobody cancels here")

    def set_paused(self, request, *, is_paused):
        raise AssertionError("nobody pauses here")


def live(key: int, num_prompt_tokens: int = 3) -> LiveRequest:
    submission = Submission(
        handle=key,
        request_id=f"r{key}",
        prompt_token_ids=np.ones(num_prompt_tokens, dtype=np.int32),
        max_tokens=4,
        sampling=None,
    )
    return LiveRequest(key, 0, submission, Nowhere(), np.empty(0, dtype=np.int32))


@pytest.fixture
def core() -> SchedulerCore:
    return SchedulerCore(
        scheduler_config(block_size=4, num_gpu_blocks=30_001, max_model_len=INFO.max_model_len)
    )


@pytest.fixture
def inbox(core: SchedulerCore) -> Inbox:
    switchboard = Switchboard(RequestLog(StatusStore("", Writer.SCHEDULER), "s0", clock=time.time))
    return Inbox(core, INFO, switchboard, clock=time.time, hashes_ahead=True)


def test_messages_are_read_in_the_order_of_their_coming(core, inbox) -> None:
    assert inbox.read() is None
    first, second = live(0), live(1)
    for message in (first, second, Cancel(first, RequestStatus.ABORTED)):
        inbox.tell(message)
    assert [(facts.key, facts.status) for facts in inbox.read()] == [(0, RequestStatus.ABORTED)]
    assert (core.num_waiting, inbox.read()) == (1, None)


def test_a_long_prompt_is_hashed_in_slices_and_then_in_the_core(core, inbox) -> None:
    inbox.tell(live(0, num_prompt_tokens=90_000))
    assert inbox.read() == []
    num_slices = 1
    while not inbox.hash_slice():
        assert core.num_waiting == 0
        num_slices += 1
    assert num_slices > 1
    assert (core.num_waiting, inbox.is_hashing) == (1, False)


def test_who_is_paused_while_hashed_is_paused_in_the_core(core, inbox) -> None:
    request = live(0, num_prompt_tokens=90_000)
    inbox.tell(request)
    inbox.read()
    request.is_paused = True
    inbox.tell(Pausing(request))
    assert inbox.read() == []
    while not inbox.hash_slice():
        pass
    assert (core.num_waiting, core.num_paused) == (0, 1)


def test_given_up_it_says_whom_the_core_never_had_and_who_was_cancelled_once(core, inbox) -> None:
    known, hashing, new = live(0), live(1, num_prompt_tokens=90_000), live(2)
    inbox.tell(known)
    inbox.tell(hashing)
    inbox.read()
    for message in (
        new,
        Cancel(known, RequestStatus.DEADLINE),
        Cancel(known, RequestStatus.ABORTED),
    ):
        inbox.tell(message)
    not_in_core, ended = inbox.give_up()
    assert not_in_core == {1, 2}
    assert [(facts.key, facts.status) for facts in ended] == [(0, RequestStatus.DEADLINE)]
    assert inbox.read() is None
