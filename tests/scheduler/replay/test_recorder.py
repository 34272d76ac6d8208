"""What a core is given and decides is recorded so that it replays, wherever a file begins."""

import json
from collections.abc import Callable
from typing import Any, cast

import pytest

from scheduler.replay.recorder import Recorder
from scheduler.replay.replay import first_difference
from scheduler.replay.schema import decode_head, decode_step
from scheduler.replay.trace import TraceRecord, header, trace_config
from scheduler.replay.what_if import recorded_outcome, try_settings
from tests.scheduler.core.building import Driver, new_request, scheduler_config
from tests.scheduler.replay.assembling import assemble


def record_run(act: Callable[[Recorder, Driver], None], **fields: Any) -> dict[str, Any]:
    config = scheduler_config(**fields)
    records = [header(config, "recorded")]
    recorder = Recorder(config, records.append)
    act(recorder, Driver(recorder))
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
    config = scheduler_config(num_gpu_blocks=9, pipeline_depth=pipeline_depth)
    files: list[list[dict[str, Any]]] = []

    def emit(record: dict[str, Any]) -> None:
        files[-1].append(record)
        if len(files[-1]) > 4:
            files.append([recorder.header("next")])

    recorder = Recorder(config, emit)
    files.append([recorder.header("first")])
    driver = Driver(recorder)
    driver.add(*(new_request(key, 20 + key, max_tokens=20) for key in range(6)))
    flights = []
    while recorder.has_unfinished:
        flights.append(driver.schedule())
        if len(flights) == pipeline_depth:
            driver.update(flights.pop(0))
    recorder.end_step()
    assert len(files) > 5
    assert any(step["sched"].get("preempted") for file in files for step in file[1:])
    for file in files:
        assert first_difference(assemble(json.loads(json.dumps(file)))) is None


def run_with_pauses(records_a_file: int) -> list[TraceRecord]:
    """Requests that are paused and go on, in files that each begin where the one before ended."""
    files: list[list[TraceRecord]] = []

    def emit(record: TraceRecord) -> None:
        files[-1].append(record)
        if len(files[-1]) > records_a_file:
            files.append([recorder.header("next")])

    recorder = Recorder(scheduler_config(), emit)
    files.append([recorder.header("first")])
    driver = Driver(recorder)
    driver.add(*(new_request(key, 20 + key, max_tokens=8) for key in range(4)))
    for number in range(40):
        plan = driver.schedule()
        if number % 3 == 0:
            recorder.pause_request(number % 4)
        driver.update(plan)
        if number % 4 == 0:
            recorder.continue_request((number + 1) % 4)
    for key in range(4):
        recorder.continue_request(key)
    driver.run()
    recorder.end_step()
    return [assemble(json.loads(json.dumps(file))) for file in files]


def test_a_recording_with_pauses_replays_from_wherever_it_begins() -> None:
    traces = run_with_pauses(records_a_file=4)
    assert len(traces) > 5
    assert any(trace.get("start", {}).get("state", {}).get("paused") for trace in traces)
    assert [first_difference(trace) for trace in traces] == [None] * len(traces)
    # The comparison looks at who is paused.
    step = next(step for trace in traces for step in trace["steps"] if "paused" in step["state"])
    del step["state"]["paused"]
    assert any(first_difference(trace) is not None for trace in traces)


def test_other_settings_are_tried_with_the_recordings_pauses() -> None:
    for trace in run_with_pauses(records_a_file=20):
        tried, recorded = try_settings(trace, trace_config(trace)), recorded_outcome(trace)
        assert tried.num_output_tokens >= recorded.num_output_tokens
        assert tried.num_finished >= recorded.num_finished


def test_a_file_that_begins_while_long_prompts_are_held_replays() -> None:
    config = scheduler_config(long_prefill_token_threshold=64, long_prefill_share=0.5)
    records: list[TraceRecord] = []
    recorder = Recorder(config, records.append)
    driver = Driver(recorder)
    driver.add(*(new_request(key, 300, max_tokens=2) for key in range(4)))
    for key in range(10, 13):
        driver.add(new_request(key, 20, max_tokens=40))
        driver.step()
    head = recorder.header("from here")
    records.clear()
    state = head["start"]["state"]
    assert state["held"]
    assert any(request.get("is_long") for request in state["requests"].values())
    for key in range(20, 25):
        driver.add(new_request(key, 20, max_tokens=3))
        driver.step()
    driver.run()
    recorder.end_step()
    lines = [json.dumps(record) for record in (head, *records)]
    read = [decode_head(lines[0]), *map(decode_step, lines[1:])]
    assert first_difference(assemble(cast("list[TraceRecord]", read))) is None
    assert any(step["state"].get("held") for step in read[1:])
