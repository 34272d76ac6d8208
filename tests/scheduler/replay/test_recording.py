"""`--record`: what a scheduler did can be replayed, and its files stay bounded."""

import random
from pathlib import Path

import pytest

from scheduler.config import SchedulerSettings
from scheduler.replay.reader import read_traces
from scheduler.replay.recording import path_for
from scheduler.replay.replay import first_difference
from tests.scheduler.fake_gpuworker import FakeGpuWorker, expected_tokens
from tests.scheduler.harness import router_to, running_scheduler


async def run_some(settings: SchedulerSettings, num_rounds: int = 1) -> FakeGpuWorker:
    """Rounds of 40 requests with preemptions and aborts; each round uses the same ids again."""
    worker = FakeGpuWorker(num_kv_blocks=20, max_num_batched_tokens=32)
    await worker.start()
    rng = random.Random(4)
    async with running_scheduler([worker], settings) as scheduler:
        await scheduler.ready()
        async with router_to(scheduler) as router:
            for _ in range(num_rounds):
                prompts = [[rng.randrange(10, 40) for _ in range(9)] for _ in range(40)]
                submissions = [
                    router.submission(prompt, 12, request_id=f"r{number}")
                    for number, prompt in enumerate(prompts)
                ]
                await router.send(submissions=submissions)
                handles = [submission.handle for submission in submissions]
                await router.cancel(*handles[30:35])
                tokens = await router.finished(*handles)
                for prompt, got in zip(prompts, tokens, strict=True):
                    assert got == expected_tokens(prompt, 12)[: len(got)]
    return worker


@pytest.mark.parametrize("depth", [1, 2])
async def test_a_recording_replays_without_a_difference(tmp_path, depth):
    path = tmp_path / "run.jsonl"
    await run_some(SchedulerSettings(record=str(path), pipeline_depth=depth), 3)
    [(_, trace)] = read_traces(path)
    assert len(trace["requests"]) == 3 * 40
    assert any("preempted" in step.get("sched", {}) for step in trace["steps"])
    assert first_difference(trace) is None


@pytest.mark.parametrize("depth", [1, 2])
async def test_a_full_file_is_followed_by_the_next_in_the_middle_of_a_run(tmp_path, depth):
    path = tmp_path / "run.jsonl"
    settings = SchedulerSettings(record=str(path), record_max_bytes=20_000, pipeline_depth=depth)
    worker = await run_some(settings, 6)
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == [
        *("run.jsonl", "run.jsonl.1", "run.jsonl.2", "run.jsonl.3"),
    ]
    traces = [trace for file in files for _, trace in read_traces(file)]
    assert sum(bool(trace["start"]["state"]["running"]) for trace in traces) > 0
    for file, trace in zip(files, traces, strict=True):
        assert file.stat().st_size < 60_000
        assert first_difference(trace) is None
    step_ids = [plan.step_id for plan in worker.plans]
    assert step_ids == sorted(set(step_ids)), "serving goes on in the same stream"


async def test_a_file_that_cannot_be_written_stops_no_request(tmp_path, caplog):
    await run_some(SchedulerSettings(record=str(tmp_path / "no" / "such" / "folder")))
    assert "cannot record" in caplog.text


def test_each_of_several_workers_has_its_own_file():
    path = Path("/data/run.jsonl")
    assert path_for(path, "w/0", is_only_worker=True) == path
    assert path_for(path, "w/0", is_only_worker=False) == Path("/data/run-w_0.jsonl")
