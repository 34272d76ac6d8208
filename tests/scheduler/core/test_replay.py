import copy
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scheduler.core.recording import Recorder
from scheduler.core.replay import Replay, first_difference
from scheduler.core.scheduler import SchedulerCore
from scheduler.core.state import MAX_WALKED_ROWS
from scheduler.core.trace import assemble, header
from tests.scheduler.core.building import Driver, new_request, scheduler_config

TRACES = Path(__file__).parents[2] / "data" / "traces.tar.xz"


def load_traces() -> dict[str, dict[str, Any]]:
    with tarfile.open(TRACES) as archive:
        files = ((member.name, archive.extractfile(member)) for member in archive)
        return {name.removesuffix(".json"): json.load(file) for name, file in files if file}


TRACE_BY_NAME = load_traces()
HANG = "w10_min_tokens_hang"


# Everything by columns, as shipped, everything request by request.
@pytest.mark.parametrize("max_walked_rows", [0, MAX_WALKED_ROWS, 10_000])
@pytest.mark.parametrize("name", sorted(TRACE_BY_NAME.keys() - {HANG}))
def test_decides_as_the_reference_did(name: str, max_walked_rows: int) -> None:
    assert first_difference(TRACE_BY_NAME[name], max_walked_rows=max_walked_rows) is None


def test_ends_with_length_where_the_reference_hangs() -> None:
    difference = first_difference(TRACE_BY_NAME[HANG])
    assert difference is not None
    assert difference.is_on_purpose
    assert difference.got[0]["finish"] == "length"


@pytest.mark.parametrize("name", ["t46_spec_preempt_0", "t70_async_spec_preempt_0"])
def test_no_block_leaks_in_any_step_of_a_replay(name: str) -> None:
    replay = Replay(TRACE_BY_NAME[name])
    for _ in replay.steps():
        replay.core.check_invariants()


@pytest.mark.parametrize(
    ("part", "field", "value"),
    [("sched", "free", 1), ("state", "free_crc", 1), ("state", "waiting", ["r0"])],
)
def test_says_where_a_replay_first_differs(part: str, field: str, value: object) -> None:
    trace = copy.deepcopy(TRACE_BY_NAME["t10_preempt_prefix_0"])
    trace["steps"][9][part][field] = value
    difference = first_difference(trace)
    assert difference is not None
    assert (difference.step, difference.field) == (9, f"{part}.{field}")
    assert difference.expected == value
    assert str(difference).startswith(f"t10_preempt_prefix_0: step 9, {part}.{field}: expected")


def test_the_order_of_tokens_counts() -> None:
    trace = copy.deepcopy(TRACE_BY_NAME["w01_budget512"])
    tokens = trace["steps"][0]["sched"]["tokens"]
    trace["steps"][0]["sched"]["tokens"] = dict(reversed(tokens.items()))
    difference = first_difference(trace)
    assert difference is not None
    assert difference.field == "sched.tokens"


def record_run(act: Callable[[Recorder, Driver], None], **fields: Any) -> dict[str, Any]:
    config = scheduler_config(**fields)
    core = SchedulerCore(config)
    records = [header(config, "recorded")]
    recorder = Recorder(core, records.append)
    driver = Driver(core)
    driver.core = recorder  # type: ignore[assignment]
    act(recorder, driver)
    recorder.end_step()
    return assemble(json.loads(json.dumps(records)))


def test_a_recording_replays() -> None:
    def act(recorder: Recorder, driver: Driver) -> None:
        driver.add(new_request(1, 100), new_request(2, 40, needs_grammar=True))
        driver.steps(2)
        driver.add(new_request(3, 30, deadline=5.0))
        recorder.mark_ready("r2")
        driver.steps(3)
        recorder.abort(1)
        driver.now = 6.0
        plan = driver.schedule()
        assert [one.key for one in plan.expired] == [3]
        recorder.abort(2)
        driver.update(plan)

    trace = record_run(act)
    assert len(trace["steps"]) == 6
    assert first_difference(trace) is None


def test_inputs_in_an_unusual_order_are_recorded_apart() -> None:
    def act(recorder: Recorder, driver: Driver) -> None:
        driver.add(new_request(1))
        recorder.abort(1)
        driver.add(new_request(2))
        recorder.reset_prefix_cache(reset_running=True)
        driver.run()

    trace = record_run(act)
    assert ["sched" in step for step in trace["steps"]][:3] == [False, False, True]
    assert first_difference(trace) is None


def test_a_second_request_of_the_same_id_is_recorded_under_a_name_of_its_own() -> None:
    def act(recorder: Recorder, driver: Driver) -> None:
        driver.add(new_request(1, request_id="same"))
        driver.run()
        driver.add(new_request(2, request_id="same"))
        driver.run()

    trace = record_run(act)
    assert set(trace["requests"]) == {"same", "same~2"}
    assert first_difference(trace) is None


@pytest.mark.parametrize("pipeline_depth", [1, 2])
def test_a_recording_may_begin_in_the_middle_of_a_run(pipeline_depth: int) -> None:
    """Each file of a rotating recording replays by itself: it holds the state to begin from."""
    core = SchedulerCore(scheduler_config(num_gpu_blocks=9, pipeline_depth=pipeline_depth))
    files: list[list[dict[str, Any]]] = []

    def emit(record: dict[str, Any]) -> None:
        files[-1].append(record)
        if len(files[-1]) > 4:
            files.append([recorder.header("next")])

    recorder = Recorder(core, emit)
    files.append([recorder.header("first")])
    driver = Driver(core)
    driver.core = recorder  # type: ignore[assignment]
    driver.add(*(new_request(key, 20 + key, max_tokens=20) for key in range(6)))
    flights = []
    while core.has_unfinished:
        flights.append(driver.schedule())
        if len(flights) == pipeline_depth:
            driver.update(flights.pop(0))
    recorder.end_step()
    assert len(files) > 5
    assert any(step["sched"].get("preempted") for file in files for step in file[1:])
    for file in files:
        assert first_difference(assemble(json.loads(json.dumps(file)))) is None
