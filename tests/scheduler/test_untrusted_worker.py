"""Whatever a worker answers: its own requests are computed elsewhere, and nobody else notices."""

import logging
import random

import numpy as np
import pytest
from google.protobuf.message import DecodeError

from headrace.service.columns import pack_int32, unpack_int32
from headrace.v1 import common_pb2, gpuworker_pb2
from scheduler import build
from scheduler.config import PoolSettings, SchedulerSettings
from scheduler.in_flight import InFlight
from tests.scheduler.fake_gpuworker import VOCAB_SIZE, FakeGpuWorker, expected_tokens
from tests.scheduler.harness import router_to, running_scheduler, until

PROMPTS = [[20 + i, 30 + i, 40 + i, 50 + i] for i in range(3)]
LOGPROBS = common_pb2.SamplingParams(logprobs=2, prompt_logprobs=0)
Result = gpuworker_pb2.StepResult


def changed_column(field: str, change):
    """A change of one packed column, given as an array of int32."""

    def spoil(result: Result) -> None:
        column = unpack_int32(getattr(result, field), field)
        setattr(result, field, pack_int32(np.array(change(column.tolist()), dtype=np.int32)))

    return spoil


def set_bytes(field: str, data: bytes):
    return lambda result: setattr(result, field, data)


def one_token_more(result: Result) -> None:
    changed_column("num_sampled_tokens", lambda counts: [counts[0] + 1, *counts[1:]])(result)
    changed_column("token_ids", lambda ids: [5, *ids])(result)


def no_token(result: Result) -> None:
    changed_column("num_sampled_tokens", lambda counts: [0, *counts[1:]])(result)
    changed_column("token_ids", lambda ids: ids[1:])(result)


def drafts(result: Result) -> None:
    num_reqs = len(result.num_sampled_tokens) // 4
    result.num_draft_tokens = pack_int32(np.ones(num_reqs, dtype=np.int32))
    result.draft_token_ids = pack_int32(np.ones(num_reqs, dtype=np.int32))


def more_prompt_logprobs(result: Result) -> None:
    result.logprobs[0].prompt_tokens.extend([result.logprobs[0].tokens[0]] * 9)


SPOILS = {
    "another step": lambda result: setattr(result, "step_id", result.step_id + 1),
    "a negative count": changed_column("num_sampled_tokens", lambda c: [-1, *c[1:]]),
    "a negative count beside one too large": changed_column(
        "num_sampled_tokens", lambda c: [c[0] + c[1] + 1, -1, *c[2:]]
    ),
    "a count too few": changed_column("num_sampled_tokens", lambda c: c[1:]),
    "a count too many": changed_column("num_sampled_tokens", lambda c: [*c, 0]),
    "counts of odd bytes": set_bytes("num_sampled_tokens", b"abc"),
    "no counts": set_bytes("num_sampled_tokens", b""),
    "a token more than was due": one_token_more,
    "no token where one was due": no_token,
    "a negative token": changed_column("token_ids", lambda ids: [-1, *ids[1:]]),
    "a token past the vocabulary": changed_column("token_ids", lambda i: [VOCAB_SIZE, *i[1:]]),
    "a missing token": changed_column("token_ids", lambda ids: ids[1:]),
    "tokens of odd bytes": set_bytes("token_ids", b"abc"),
    "drafts that were not asked for": drafts,
    "counts of drafts only": changed_column("num_draft_tokens", lambda _: [1, 1, 1]),
    "drafts without counts": changed_column("draft_token_ids", lambda _: [1, 1]),
    "an error of an unknown row": lambda result: result.errors.add(row=15, message="?"),
    "an error of a row past every table": lambda result: result.errors.add(row=2**32 - 1),
    "an error of a row that has a token": lambda result: result.errors.add(row=0),
    "log probabilities of an unknown row": lambda result: result.logprobs.add(row=15),
    "log probabilities of a row twice": lambda r: r.logprobs.append(r.logprobs[0]),
    "no log probabilities": lambda result: result.ClearField("logprobs"),
    "log probabilities of two tokens": lambda r: r.logprobs[0].tokens.append(
        r.logprobs[0].tokens[0]
    ),
    "log probabilities of no token": lambda result: result.logprobs[0].ClearField("tokens"),
    "log probabilities of more than the prompt": more_prompt_logprobs,
    "a log probability that is no number": lambda r: setattr(
        r.logprobs[0].tokens[0], "logprob", np.nan
    ),
    "alternatives without numbers": lambda r: r.logprobs[0].tokens[0].top_token_ids.append(1),
    "an alternative past the vocabulary": lambda r: (
        r.logprobs[0].tokens[0].top_token_ids.__setitem__(0, 2**32 - 1)
    ),
}


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("name", SPOILS)
async def test_a_wrong_result_loses_its_worker_and_nothing_else(name, depth, caplog):
    bad, good = FakeGpuWorker("bad"), FakeGpuWorker("good")
    for worker in (bad, good):
        worker.hold()
        await worker.start()
    settings = SchedulerSettings(pipeline_depth=depth)
    async with (
        running_scheduler([bad, good], settings) as scheduler,
        router_to(scheduler) as router,
    ):
        await scheduler.ready(2)
        asks = [(prompt, 12) for prompt in PROMPTS]
        there = await router.submit_all(asks, worker_id="good")
        here = await router.submit_all(asks, worker_id="bad", sampling=LOGPROBS)
        await bad.release(4)
        await bad.step_begun(5)
        bad.spoil = SPOILS[name]
        await bad.release()
        await good.release()
        expected = [expected_tokens(prompt, 12) for prompt in PROMPTS]
        assert await router.finished(*here) == expected
        assert await router.finished(*there) == expected
        assert bad.spoil is None
        for handle, prompt in zip(here, PROMPTS, strict=True):
            received = router.received[handle]
            assert [entry.token_id for entry in received.logprobs] == expected_tokens(prompt, 12)
            assert [entry.token_id for entry in received.prompt_logprobs] == prompt[1:]
    assert "lost worker at " + bad.address in caplog.text
    assert good.address not in caplog.text


async def test_no_bytes_of_a_result_end_the_scheduler(caplog):
    """Results with random bytes changed; what still means something valid is taken as it is."""
    rng = random.Random(9)
    bad, good = FakeGpuWorker("bad"), FakeGpuWorker("good")
    await bad.start()
    await good.start()

    def spoil(result: Result) -> None:
        data = bytearray(result.SerializeToString())
        for _ in range(rng.randrange(1, 4)):
            data[rng.randrange(len(data))] = rng.choice([0, 1, 127, 128, 255, rng.randrange(256)])
        try:
            other = Result.FromString(bytes(data))
        except DecodeError:
            return
        other.draining = False
        result.CopyFrom(other)

    pool_settings = PoolSettings(max_num_losses=1000, quarantine_s=0)
    async with (
        running_scheduler([bad, good], None, pool_settings) as scheduler,
        router_to(scheduler) as router,
    ):
        for _ in range(50):
            await scheduler.ready(2)
            there = await router.submit_all([(PROMPTS[0], 5)], worker_id="good")
            here = await router.submit_all(
                [(prompt, 9) for prompt in PROMPTS], worker_id="bad", sampling=LOGPROBS
            )
            # A worker that is lost in its first step is not looked for again at once.
            await router.has_tokens(here[0], 1)
            bad.spoil = spoil
            tokens = await router.finished(*here)
            assert all(0 <= token < VOCAB_SIZE for ids in tokens for token in ids)
            assert await router.finished(*there) == [expected_tokens(PROMPTS[0], 5)]
    # It was lost for what it said, never for what we made of it.
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert good.address not in caplog.text
    bad.errors.clear()


async def test_a_step_that_fails_here_is_computed_again(monkeypatch):
    """A fault of our own in the middle of a step loses no token and not the scheduler."""
    worker = FakeGpuWorker()
    worker.hold()
    await worker.start()

    def fail(*_: object) -> None:
        monkeypatch.undo()
        raise RuntimeError("a fault")

    async with running_scheduler([worker]) as scheduler, router_to(scheduler) as router:
        await scheduler.ready()
        ending, lasting = await router.submit_all([(PROMPTS[0], 4), (PROMPTS[1], 9)])
        await worker.release(3)
        await worker.step_begun(4)
        monkeypatch.setattr(InFlight, "new_logprobs", fail)
        await worker.release()
        tokens = await router.finished(ending, lasting)
    assert tokens == [expected_tokens(PROMPTS[0], 3), expected_tokens(PROMPTS[1], 9)]
    assert router.received[ending].finished.reason == common_pb2.FINISH_REASON_ERROR
    assert router.received[lasting].finished.reason == common_pb2.FINISH_REASON_LENGTH


async def test_a_worker_that_no_engine_can_be_made_for_is_left_alone(caplog, monkeypatch):
    """As when its tables do not fit in memory; the other worker serves."""
    config_of = build.core_config

    def core_config(info, settings):
        if info.worker_id == "vast":
            raise MemoryError
        return config_of(info, settings)

    monkeypatch.setattr(build, "core_config", core_config)
    vast, good = FakeGpuWorker("vast"), FakeGpuWorker("good")
    await vast.start()
    await good.start()
    async with running_scheduler([vast, good]) as scheduler, router_to(scheduler) as router:
        await until(lambda: f"cannot use the worker at {vast.address}" in caplog.text)
        await scheduler.ready()
        assert scheduler.ready_workers() == ["good"]
        handle = await router.submit(PROMPTS[0], 3)
        assert await router.finished(handle) == [expected_tokens(PROMPTS[0], 3)]
