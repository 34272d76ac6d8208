"""Workers that keep dying."""

from headrace.vocabulary import WorkerState
from scheduler.config import PoolSettings
from scheduler.quarantine import NUM_FREE_DEATHS, Quarantine
from tests.scheduler.fake_gpuworker import FakeGpuWorker, expected_tokens
from tests.scheduler.harness import router_to, running_scheduler, until

PROMPT = [11, 12, 13]


def test_each_death_in_a_row_doubles_the_quarantine_up_to_a_minute():
    quarantine = Quarantine(first_s=5.0)
    lengths = [quarantine.died(lived_s=1.0) for _ in range(NUM_FREE_DEATHS + 6)]
    assert lengths == [0.0] * NUM_FREE_DEATHS + [5.0, 10.0, 20.0, 40.0, 60.0, 60.0]


def test_a_worker_that_has_lived_long_is_as_good_as_new():
    quarantine = Quarantine(first_s=5.0)
    for _ in range(NUM_FREE_DEATHS + 3):
        quarantine.died(lived_s=1.0)
    assert [quarantine.died(lived_s) for lived_s in (3600.0, 1.0, 1.0, 1.0)] == [0, 0, 0, 5.0]


def test_there_is_no_quarantine_of_no_length():
    quarantine = Quarantine(first_s=0.0)
    assert {quarantine.died(lived_s=1.0) for _ in range(100)} == {0.0}


async def test_a_worker_that_keeps_dying_is_left_alone_and_used_again_later(caplog):
    worker = FakeGpuWorker()
    await worker.start()
    settings = PoolSettings(quarantine_s=0.5, max_num_losses=100)

    def lose(result):
        result.step_id += 1

    def state():
        (load,) = scheduler.pool.snapshot()
        return load.state

    async with running_scheduler([worker], None, settings) as scheduler:
        await scheduler.ready()
        async with router_to(scheduler) as router:
            handle = await router.submit(PROMPT, 20)
            for _ in range(NUM_FREE_DEATHS + 1):
                worker.spoil = lose
                await until(lambda: worker.spoil is None)
            await until(lambda: state() is WorkerState.QUARANTINED)
            assert await router.finished(handle) == [expected_tokens(PROMPT, 20)]
            assert state() is WorkerState.READY
    assert "has died 4 times in a row and is left alone for 0.5 s" in caplog.text
