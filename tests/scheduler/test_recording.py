"""`--record`: what a scheduler did can be replayed, and its files stay bounded."""

import random
from pathlib import Path

import pytest

from headrace.cli.replay import read_traces
from scheduler.config import SchedulerSettings
from scheduler.core.replay import first_difference
from scheduler.recording import path_for
from tests.scheduler.fake_gpuworker import FakeGpuWorker, expected_tokens
from tests.scheduler.harness import router_to, running_scheduler, until


async def run_some(settings: SchedulerSettings, num_rounds: int = 1) -> FakeGpuWorker:
    """Rounds of 40 requests with preemptions and aborts; idle between them."""
    worker = FakeGpuWorker(num_kv_blocks=20, max_num_batched_tokens=32)
    await worker.start()
    rng = random.Random(4)
    async with running_scheduler([worker], settings) as scheduler:
        await scheduler.ready()
        async with router_to(scheduler) as router:
            for _ in range(num_rounds):
                prompts = [[rng.randrange(10, 40) for _ in range(9)] for _ in range(40)]
                handles = await router.submit_all([(prompt, 12) for prompt in prompts])
                await router.cancel(*handles[30:35])
                tokens = await router.finished(*handles)
                for prompt, got in zip(prompts, tokens, strict=True):
                    assert got == expected_tokens(prompt, 12)[: len(got)]
                await until(lambda: scheduler.pool._workers[0].engine._is_idle)
    return worker


@pytest.mark.parametrize("depth", [1, 2])
async def test_a_recording_replays_without_a_difference(tmp_path, depth):
    path = tmp_path / "run.jsonl"
    await run_some(SchedulerSettings(record=str(path), pipeline_depth=depth))
    [(_, trace)] = read_traces(path)
    assert len(trace["requests"]) == 40
    assert any("preempted" in step.get("sched", {}) for step in trace["steps"])
    assert first_difference(trace) is None


async def test_a_full_recording_stops_and_a_new_one_begins_when_nothing_runs(tmp_path):
    path = tmp_path / "run.jsonl"
    worker = await run_some(SchedulerSettings(record=str(path), record_max_bytes=20_000), 6)
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == [
        *("run.jsonl", "run.jsonl.1", "run.jsonl.2", "run.jsonl.3"),
    ]
    for file in files:
        assert file.stat().st_size < 40_000
        [(_, trace)] = read_traces(file)
        assert first_difference(trace) is None
    # A new recording is a new stream: steps count from the beginning.
    assert sum(plan.step_id <= 1 for plan in worker.plans) >= 4


async def test_a_file_that_cannot_be_written_stops_no_request(tmp_path, caplog):
    await run_some(SchedulerSettings(record=str(tmp_path / "no" / "such" / "folder")))
    assert "cannot record" in caplog.text


def test_each_of_several_workers_has_its_own_file():
    path = Path("/data/run.jsonl")
    assert path_for(path, "w/0", is_only_worker=True) == path
    assert path_for(path, "w/0", is_only_worker=False) == Path("/data/run-w_0.jsonl")
