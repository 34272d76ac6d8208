"""`--record`: what a scheduler did can be replayed, and its files stay bounded."""

import random
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from scheduler.config import SchedulerSettings
from scheduler.replay import recording
from scheduler.replay.reader import read_traces
from scheduler.replay.recording import Recording, path_for
from scheduler.replay.replay import first_difference
from tests.scheduler.core.building import Driver, check_book, new_request, scheduler_config
from tests.scheduler.fake_gpuworker import FakeGpuWorker, expected_tokens
from tests.scheduler.harness import router_to, running_scheduler, until


async def run_some(
    settings: SchedulerSettings, num_rounds: int = 1, at_end: Callable | None = None
) -> FakeGpuWorker:
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
        if at_end is not None:
            await at_end(scheduler)
    return worker


@pytest.mark.parametrize("depth", [1, 2])
async def test_a_recording_replays_without_a_difference(tmp_path, depth):
    path = tmp_path / "run.jsonl"
    await run_some(SchedulerSettings(record=str(path), pipeline_depth=depth), 3)
    [(_, trace)] = read_traces(path)
    assert sum(len(step.get("add", ())) for step in trace["steps"]) == 3 * 40
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


class StuckDisk:
    """Takes nothing until it is released."""

    def __init__(self, monkeypatch):
        self.released = threading.Event()
        self._fresh = recording._fresh
        monkeypatch.setattr(recording, "_fresh", self._open)

    def _open(self, path):
        self.released.wait()
        return self._fresh(path)


async def test_no_request_waits_for_a_disk_that_is_stuck(tmp_path, monkeypatch):
    disk = StuckDisk(monkeypatch)
    monkeypatch.setattr(recording, "_CLOSE_TIMEOUT_S", 60.0)
    path = tmp_path / "run.jsonl"

    async def release_when_all_are_served(scheduler):
        assert not path.exists()
        disk.released.set()

    await run_some(SchedulerSettings(record=str(path)), at_end=release_when_all_are_served)
    [(_, trace)] = read_traces(path)
    assert sum(len(step.get("add", ())) for step in trace["steps"]) == 40
    assert first_difference(trace) is None


async def test_a_disk_that_stays_stuck_keeps_no_scheduler_from_stopping(
    tmp_path, monkeypatch, caplog
):
    disk = StuckDisk(monkeypatch)
    monkeypatch.setattr(recording, "_CLOSE_TIMEOUT_S", 0.01)
    await run_some(SchedulerSettings(record=str(tmp_path / "run.jsonl")))
    assert "is cut off" in caplog.text
    disk.released.set()


def record_to(path: Path, **limits: int) -> tuple[Recording, Driver]:
    config = scheduler_config(num_gpu_blocks=9)
    made = Recording(config, path, **({"max_bytes": 1 << 30} | limits))
    return made, Driver(made.recorder)


def run_requests(driver: Driver, first_key: int, count: int = 6) -> None:
    keys = range(first_key, first_key + count)
    driver.add(*(new_request(key, 20 + key % 7, max_tokens=20) for key in keys))
    driver.run()


async def test_a_slow_disk_costs_steps_and_says_so(tmp_path, monkeypatch, caplog):
    disk = StuckDisk(monkeypatch)
    path = tmp_path / "run.jsonl"
    made, driver = record_to(path, max_waiting_bytes=10_000)
    for number in range(5):
        run_requests(driver, 10 * number)
        # Only of live requests, and of those in what waits.
        assert len(made.recorder._names) < 12
    assert caplog.text.count("leaves out steps") == 1
    assert made.num_waiting_bytes < 20_000
    disk.released.set()
    driver.add(*(new_request(key, 20, max_tokens=20) for key in range(100, 106)))
    while driver.core.has_unfinished:
        await until(lambda: made.num_waiting_bytes == 0)
        driver.step()
    await made.close()
    assert caplog.text.count("goes on in a new file") == 1
    old, new = tmp_path / "run.jsonl.1", path
    traces = [trace for file in (old, new) for _, trace in read_traces(file)]
    assert [first_difference(trace) for trace in traces] == [None, None]
    assert "start" in traces[1]
    first, second = (list(trace["steps"]) for trace in traces)
    assert first[-1]["i"] + 1 < second[0]["i"]


async def test_a_full_disk_ends_the_recording_and_nothing_else(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(recording, "_fresh", lambda _: Path("/dev/full").open("wb"))  # noqa: SIM115
    made, driver = record_to(tmp_path / "run.jsonl")
    run_requests(driver, 0)
    await until(lambda: "No space left" in caplog.text)
    run_requests(driver, 10)
    assert not made.recorder._name_by_key, "it records on"
    driver.add(new_request(20, max_tokens=20))
    driver.steps(3)
    made.recorder.abort(20)
    check_book(made.recorder)
    await made.close()
    assert caplog.text.count("cannot record") == 1


async def test_requests_that_ended_are_not_remembered(tmp_path):
    made, driver = record_to(tmp_path / "run.jsonl", max_bytes=20_000)
    for number in range(10):
        run_requests(driver, 10 * number)
    recorder = made.recorder
    assert not recorder._first_cached
    assert not recorder._name_by_key
    assert len(recorder._names) < 20, "names of earlier files"
    await made.close()


RECORD_AND_HANG = """
import sys, time
from pathlib import Path
from tests.scheduler.replay.test_recording import record_to, run_requests
made, driver = record_to(Path(sys.argv[1]))
run_requests(driver, 0)
made.recorder.end_step()
while made.num_waiting_bytes:
    time.sleep(0.001)
print("written", flush=True)
time.sleep(600)
"""


def test_what_was_written_outlives_a_kill(tmp_path):
    path = tmp_path / "run.jsonl"
    process = subprocess.Popen(
        [sys.executable, "-c", RECORD_AND_HANG, str(path)],
        cwd=Path(__file__).parents[3],
        stdout=subprocess.PIPE,
    )
    try:
        assert process.stdout.readline() == b"written\n"
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    [(_, trace)] = read_traces(path)
    assert sum("finish" in out for out in outputs(trace)) == 6
    assert first_difference(trace) is None


def outputs(trace):
    return [out for step in trace["steps"] for out in step.get("update", {}).get("out", ())]


def test_each_of_several_workers_has_its_own_file():
    path = Path("/data/run.jsonl")
    assert path_for(path, "w/0", is_only_worker=True) == path
    assert path_for(path, "w/0", is_only_worker=False) == Path("/data/run-w_0.jsonl")
