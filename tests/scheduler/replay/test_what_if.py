from typing import Any

import pytest

from scheduler.replay.recorder import Recorder
from scheduler.replay.trace import trace_config
from scheduler.replay.what_if import changed, recorded_outcome, try_settings
from tests.scheduler.core.building import Driver, new_request, scheduler_config
from tests.scheduler.replay.assembling import assemble
from tests.scheduler.replay.test_replay import TRACE_BY_NAME


@pytest.mark.parametrize("name", ["t01_continuous_0", "t24_priority_0", "t61_async_0"])
def test_the_same_settings_give_the_same_outcome(name: str) -> None:
    trace = TRACE_BY_NAME[name]
    assert try_settings(trace, trace_config(trace)) == recorded_outcome(trace)


def test_drafts_are_accepted_at_about_the_recorded_rate() -> None:
    trace = TRACE_BY_NAME["t66_async_spec_0"]
    tried, recorded = try_settings(trace, trace_config(trace)), recorded_outcome(trace)
    assert abs(tried.num_steps - recorded.num_steps) <= recorded.num_steps // 10


def test_a_smaller_budget_takes_more_steps() -> None:
    trace = TRACE_BY_NAME["t03_chunked_0"]
    before = recorded_outcome(trace)
    after = try_settings(trace, changed(trace_config(trace), ["max_num_batched_tokens=4"]))
    assert after.num_steps > before.num_steps
    assert after.num_output_tokens == before.num_output_tokens


def test_priority_serves_the_urgent_first() -> None:
    trace = TRACE_BY_NAME["t24_priority_0"]
    fcfs = try_settings(trace, changed(trace_config(trace), ["policy=fcfs"]))
    assert fcfs != recorded_outcome(trace)
    assert fcfs.num_finished == recorded_outcome(trace).num_finished


def test_a_recording_that_begins_in_the_middle_can_be_tried() -> None:
    records: list[dict[str, Any]] = []
    recorder = Recorder(scheduler_config(), records.append)
    driver = Driver(recorder)
    driver.add(new_request(0, 40, max_tokens=9), new_request(1, 20, max_tokens=9))
    driver.steps(4)
    head = recorder.header("second")
    records.clear()
    driver.run()
    recorder.end_step()
    trace = assemble([head, *records])
    tried = try_settings(trace, trace_config(trace))
    assert (tried.num_finished, tried.num_output_tokens) == (2, 10)
    assert recorded_outcome(trace).num_finished == 2


def test_settings_are_parsed_by_their_kind() -> None:
    config = changed(
        scheduler_config(spec_kind="draft"),
        ["watermark=0.5", "enable_prefix_caching=False", "spec_kind=none", "policy=priority"],
    )
    assert (config.watermark, config.enable_prefix_caching) == (0.5, False)
    assert (config.spec_kind, config.policy) == (None, "priority")
    with pytest.raises(ValueError, match="expected true or false"):
        changed(config, ["enable_prefix_caching=1"])
