"""The KV ledger of a real worker, on both sides, on a pool that is too small."""

from pathlib import Path

import pytest
import transformers

from tests.gpuworker.tiny import LLAMA, save_checkpoint
from tests.scheduler.harness import router_to, running_scheduler
from tests.system.real_worker import real_worker

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    save_checkpoint(folder, transformers.LlamaConfig(**LLAMA))
    return folder


async def test_a_real_worker_has_the_rows_of_the_book_through_preemptions_pauses_and_aborts(
    checkpoint: Path,
) -> None:
    num_compared = 0
    async with (
        real_worker(checkpoint, num_kv_blocks=18) as worker,
        running_scheduler([worker], has_company=True) as scheduler,
        router_to(scheduler) as router,
    ):
        await scheduler.ready()
        handles = []
        for number in range(24):
            prompt = [6 + number % 5, *range(10, 40 + number % 7)]
            handles.append(await router.submit(prompt, 60, model="tiny"))
            if number % 4 == 1:
                await router.pause(handles[number - 1])
            if number % 4 == 2:
                await router.cancel(handles[number - 2])
            for _ in range(3):
                (audit,) = await router.audit()
                assert list(audit.faults) == []
                num_compared += audit.num_compared_rows
        await router.pause(*handles, paused=False)
        await router.finished(*handles)
        (audit,) = await router.audit()
        assert list(audit.faults) == []
        assert (audit.num_owned_blocks, audit.num_compared_rows) == (0, 0)
    assert num_compared > 0
    assert any(router.received[h].finished.num_preemptions for h in handles)
