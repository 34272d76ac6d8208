"""Constructed runs in which the cause of a slow request is known."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from scheduler.core.plan import NewRequest, WaitReason
from scheduler.replay.recorder import Recorder
from scheduler.replay.trace import trace_config
from scheduler.replay.why_slow import advise, run_of
from tests.scheduler.core.building import Driver, new_request, scheduler_config
from tests.scheduler.core.test_time_spent import Ticking
from tests.scheduler.replay.assembling import assemble
from tests.scheduler.replay.test_replay import TRACE_BY_NAME


def recording(path: Path, requests: Sequence[NewRequest], **config: Any) -> Path:
    """A run of requests that come together, to its end, as a file."""
    recorded(path, requests, **config)
    return path


def recorded(path: Path, requests: Sequence[NewRequest], **config: Any) -> Recorder:
    """The same; the core, which can explain its requests. A step takes two seconds."""
    records: list[dict[str, Any]] = []
    recorder = Recorder(scheduler_config(**config), records.append)
    head = recorder.header("made")
    driver = Ticking(recorder)
    driver.add(*requests)
    driver.run()
    recorder.end_step()
    path.write_bytes(b"".join(msgspec.json.encode(record) + b"\n" for record in [head, *records]))
    return recorder


def test_a_pool_that_is_too_small(tmp_path: Path) -> None:
    """r0 has 3 of 4 blocks until it ends; r1 needs 3, so 2 more would have let it in at once."""
    requests = [new_request(0, 40, max_tokens=6), new_request(1, 40, max_tokens=6)]
    path = recording(tmp_path / "run", requests, num_gpu_blocks=5)
    advice = advise([path], "r1", ["BLOCKS", "DECODE"])
    assert advice == {
        "BLOCKS": "2 KV blocks more (num_gpu_blocks 7) would have saved 6 steps of 12"
    }


def test_a_budget_that_is_too_small(tmp_path: Path) -> None:
    requests = [new_request(0, 100, max_tokens=4), new_request(1, 100, max_tokens=4)]
    path = recording(tmp_path / "run", requests, max_num_batched_tokens=32)
    advice = advise([path], "r1", ["BUDGET", "PREFILL"])
    assert advice["BUDGET"] == advice["PREFILL"]
    assert advice["BUDGET"] == "max_num_batched_tokens 256 would have saved 6 steps of 10"


def test_a_queue_behind_another_tenant(tmp_path: Path) -> None:
    """r0 to r3 fill the slots; r4 waits behind them and is at the head itself only later."""
    others = [new_request(key, 10, max_tokens=8, cache_salt="a") for key in range(4)]
    requests = [*others, new_request(4, 10, max_tokens=2, cache_salt="b")]
    path = recording(tmp_path / "run", requests, max_num_seqs=1)
    advice = advise([path], "r4", ["BEHIND_HEAD"])
    assert advice == {"BEHIND_HEAD": "max_num_seqs 5 would have saved 32 steps of 34"}


def test_a_preemption_storm(tmp_path: Path) -> None:
    requests = [new_request(key, 30, max_tokens=60) for key in range(4)]
    path = recording(tmp_path / "run", requests, num_gpu_blocks=13)
    advice = advise([path], "r3", ["PREEMPTED"])["PREEMPTED"]
    assert "KV blocks more (num_gpu_blocks 25)" in advice
    assert "with 0 preemptions for" in advice


def test_more_of_what_was_not_short_brings_nothing(tmp_path: Path) -> None:
    path = recording(tmp_path / "run", [new_request(0, 10, max_tokens=4)])
    assert advise([path], "r0", ["BLOCKS"]) == {
        "BLOCKS": "up to num_gpu_blocks 1616, no step would have been saved"
    }
    assert "nothing was short" in advise([path], "r0", ["NEXT_STEP"])["NEXT_STEP"]


def test_a_request_that_no_recording_has_is_refused(tmp_path: Path) -> None:
    path = recording(tmp_path / "run", [new_request(0)])
    with pytest.raises(ValueError, match="no recording has the whole of r9"):
        advise([path], "r9", ["BLOCKS"])


@pytest.mark.parametrize("name", ["t01_continuous_0", "t61_async_0"])
def test_the_same_settings_give_a_request_the_recorded_steps(name: str) -> None:
    trace = TRACE_BY_NAME[name]
    first, last = {}, {}
    for step in trace["steps"]:
        first |= dict.fromkeys(step.get("add", ()), step["i"])
        last |= {output["id"]: step["i"] for output in step.get("update", {}).get("out", ())}
    for request_id, end in last.items():
        run = run_of(trace, trace_config(trace), request_id)
        assert run is not None
        assert run.num_steps == end - first[request_id] + 1


def test_a_request_that_ran_as_the_recording_began_is_found() -> None:
    records: list[dict[str, Any]] = []
    recorder = Recorder(scheduler_config(max_num_seqs=1), records.append)
    driver = Driver(recorder)
    driver.add(new_request(0, 40, max_tokens=9), new_request(1, 20, max_tokens=3))
    driver.steps(4)
    head = recorder.header("second")
    records.clear()
    driver.run()
    recorder.end_step()
    trace = assemble([head, *records])
    run = run_of(trace, trace_config(trace), "r1")
    assert run is not None
    assert run.reasons == {WaitReason.SEQUENCE_SLOTS: 5}
