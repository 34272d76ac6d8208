"""What the store is given of the requests' tokens."""

import numpy as np
import pytest

from headrace.service.columns import pack_int32
from headrace.status.records import Superseded
from headrace.status.states import State
from headrace.v1 import common_pb2
from scheduler.config import SchedulerSettings
from scheduler.core.plan import RequestStatus
from tests.scheduler.fake_gpuworker import FakeGpuWorker, expected_tokens
from tests.scheduler.fake_store import FakeStore, states_of
from tests.scheduler.harness import router_to, running_scheduler, until

PROMPT = [11, 12, 13, 14, 15]
DEPTHS = pytest.mark.parametrize("depth", [1, 2])


@pytest.fixture
async def worker():
    worker = FakeGpuWorker()
    await worker.start()
    yield worker
    await worker.kill()


@DEPTHS
async def test_each_token_is_written_once_and_the_end_after_them(worker, depth):
    store = FakeStore()
    settings = SchedulerSettings(pipeline_depth=depth)
    async with running_scheduler([worker], settings, store=store) as scheduler:
        await scheduler.ready()
        async with router_to(scheduler) as router:
            prompts = [[20 + i, 30 + i] for i in range(5)]
            handles = await router.submit_all([(prompt, 60) for prompt in prompts])
            while not all(router.received[handle].finished for handle in handles):
                store.write()
                async with router.changed:
                    await router.changed.wait()
        store.write_all()
    for number, prompt in enumerate(prompts):
        assert store.token_ids[f"r0-{number}"] == expected_tokens(prompt, 60)
        final = store.finals[f"r0-{number}"]
        assert (final.state, final.completion_tokens) == ("LENGTH_CAPPED", 60)
    assert store.num_gaps == 0


async def test_nothing_is_written_twice_while_nothing_happens(worker):
    store = FakeStore()
    async with running_scheduler([worker], store=store) as scheduler:
        await scheduler.ready()
        async with router_to(scheduler) as router:
            handle = await router.submit(PROMPT, 200)
            await router.has_tokens(handle, 5)
            worker.hold()
            await worker.held()
            store.write_all()
            assert store.write() == 0
            kept = store.token_ids["r0-0"]
            assert kept == expected_tokens(PROMPT, len(kept))
            await worker.release()
            await router.cancel(handle)
            await router.finished(handle)
        store.write_all()
        assert store.finals["r0-0"].state == "ABORTED"


async def test_a_bounded_number_of_requests_is_written_at_once_and_each_has_its_turn(worker):
    store = FakeStore()
    async with running_scheduler([worker], store=store) as scheduler:
        await scheduler.ready()
        async with router_to(scheduler) as router:
            handles = await router.submit_all([([20 + i], 3) for i in range(300)])
            await router.finished(*handles)
        assert 128 <= store.write() <= 2 * 128
        store.write_all()
    assert all(len(tokens) == 3 for tokens in store.token_ids.values())
    assert len(store.finals) == 300


async def test_log_probabilities_are_kept_with_the_tokens(worker):
    store = FakeStore()
    sampling = common_pb2.SamplingParams(logprobs=2, prompt_logprobs=1)
    async with running_scheduler([worker], store=store) as scheduler:
        await scheduler.ready()
        async with router_to(scheduler) as router:
            handle = await router.submit(PROMPT, 20, sampling=sampling)
            await router.has_tokens(handle, 3)
            store.write()
            await router.finished(handle)
            store.write_all()
            received = router.received[handle]
            assert store.logprobs["r0-0"] == [p.SerializeToString() for p in received.logprobs]
            assert store.prompt_logprobs["r0-0"] == [
                p.SerializeToString() for p in received.prompt_logprobs
            ]


async def test_what_the_store_has_lost_is_written_again_for_live_and_ended_requests(worker):
    store = FakeStore()
    async with running_scheduler([worker], store=store) as scheduler:
        await scheduler.ready()
        async with router_to(scheduler) as router:
            handle = await router.submit(PROMPT, 60)
            await router.has_tokens(handle, 9)
            store.write_all()
            store.lose("r0-0", 4)
            await router.has_tokens(handle, 20)
            store.write_all()
            assert store.token_ids["r0-0"] == expected_tokens(PROMPT, len(store.token_ids["r0-0"]))
            await router.finished(handle)
            store.lose("r0-0", 2)
            store.write_all()
    assert store.token_ids["r0-0"] == expected_tokens(PROMPT, 60)
    assert store.num_gaps == 2


async def test_what_the_store_lacks_is_written_before_the_end_of_a_request_without_new_tokens(
    worker,
):
    store = FakeStore()
    generated = pack_int32(np.array(expected_tokens(PROMPT, 20), dtype=np.int32))
    async with running_scheduler([worker], store=store) as scheduler:
        await scheduler.ready()
        async with router_to(scheduler) as router:
            handle = await router.submit(PROMPT, 20, epoch=2, generated_token_ids=generated)
            assert await router.finished(handle) == [[]]
            store.write_all()
    assert store.token_ids["r0-0"] == expected_tokens(PROMPT, 20)
    assert store.num_gaps == 1


async def test_lost_log_probabilities_are_not_written_and_the_tokens_are(worker):
    store = FakeStore()
    sampling = common_pb2.SamplingParams(logprobs=1)
    async with running_scheduler([worker], store=store) as scheduler:
        await scheduler.ready()
        async with router_to(scheduler) as router:
            handle = await router.submit(PROMPT, 60, sampling=sampling)
            await router.has_tokens(handle, 9)
            store.write_all()
            store.lose("r0-0", 4)
            await router.finished(handle)
            store.write_all()
    assert store.token_ids["r0-0"] == expected_tokens(PROMPT, 60)
    assert len(store.logprobs["r0-0"]) < 60


async def test_a_request_taken_up_elsewhere_leaves_its_router_and_no_record(worker):
    store = FakeStore()
    async with running_scheduler([worker], store=store) as scheduler:
        await scheduler.ready()
        async with router_to(scheduler) as router:
            # The worker makes few tokens at a time, so that the request has not ended before.
            worker.hold()
            handle = await router.submit(PROMPT, 200)
            await worker.release(4)
            await router.has_tokens(handle, 3)
            store.write_all()
            store.claim("r0-0")
            await worker.release(4)
            await router.has_tokens(handle, len(router.received[handle].token_ids) + 1)
            store.write_all()
            await router.wait_for(lambda: router.received[handle].has_moved)
            await worker.release()
            (request,) = scheduler.switchboard.requests
            assert request.is_superseded
            # Nobody takes the request over here.
            request.owner.cancel(request, RequestStatus.ABORTED)
            await until(lambda: not len(scheduler.switchboard.requests))
            assert store.write() == 0
    assert not store.finals


async def test_a_request_that_its_router_lets_go_leaves_no_record(worker):
    store = FakeStore()
    async with running_scheduler([worker], store=store) as scheduler:
        await scheduler.ready()
        async with router_to(scheduler) as router:
            handle = await router.submit(PROMPT, 200)
            await router.has_tokens(handle, 3)
            await router.send(released=[handle])
            await router.wait_for(lambda: router.received[handle].has_moved)
            (request,) = scheduler.switchboard.requests
            assert request.is_superseded
            request.owner.cancel(request, RequestStatus.ABORTED)
            await until(lambda: not len(scheduler.switchboard.requests))
            store.write_all()
    assert not store.finals


async def test_a_request_that_the_store_has_as_aborted_ends_for_its_router(worker):
    store = FakeStore()
    async with running_scheduler([worker], store=store) as scheduler:
        await scheduler.ready()
        async with router_to(scheduler) as router:
            handle = await router.submit(PROMPT, 200)
            await router.has_tokens(handle, 3)
            store.claim("r0-0", State.ABORTED)
            store.write_all()
            await router.finished(handle)
            finished = router.received[handle].finished
            assert finished.reason == common_pb2.FINISH_REASON_ABORTED
            assert store.write() == 0
    assert not store.finals


async def test_a_request_set_aside_goes_on_for_the_router_that_has_claimed_it(worker):
    store = FakeStore()
    async with running_scheduler([worker], store=store) as scheduler:
        await scheduler.ready()
        async with router_to(scheduler, "a") as one, router_to(scheduler, "b") as other:
            worker.hold()
            first = await one.submit(PROMPT, 200, request_id="x")
            await worker.release(4)
            await one.has_tokens(first, 3)
            store.write_all()
            epoch = store.claim("x")
            await worker.release(4)
            await one.has_tokens(first, len(one.received[first].token_ids) + 1)
            store.write_all()
            await one.wait_for(lambda: one.received[first].has_moved)
            await worker.release()
            taken = await other.submit(PROMPT, 200, request_id="x", epoch=epoch)
            assert await other.finished(taken) == [expected_tokens(PROMPT, 200)]
            store.write_all()
    assert store.token_ids["x"] == expected_tokens(PROMPT, 200)
    assert store.finals["x"].epoch == epoch
    placed = [r.request_id for plan in worker.plans for r in plan.row_requests]
    assert placed == ["x"]
    assert states_of(store.updates, "x") == ["RUNNING", "RUNNING"]


async def test_a_refusal_of_an_earlier_epoch_concerns_no_request_that_was_taken_over(worker):
    store = FakeStore()
    async with running_scheduler([worker], store=store) as scheduler:
        await scheduler.ready()
        async with router_to(scheduler) as router:
            first = await router.submit(PROMPT, 100, request_id="x")
            await router.has_tokens(first, 3)
            again = await router.submit(PROMPT, 100, request_id="x", epoch=2)
            await router.has_tokens(again, 3)
            queued = State.QUEUED
            store.on_superseded([Superseded("x", 1, queued), Superseded("unknown", 7, queued)])
            assert await router.finished(again) == [expected_tokens(PROMPT, 100)]
            store.write_all()
    assert store.token_ids["x"] == expected_tokens(PROMPT, 100)
