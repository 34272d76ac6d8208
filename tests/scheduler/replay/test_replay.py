import copy
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from scheduler.replay.replay import Replay, first_difference
from tests.scheduler.core.building import check_book

TRACES = Path(__file__).parents[2] / "data" / "traces.tar.xz"


def load_traces() -> dict[str, dict[str, Any]]:
    with tarfile.open(TRACES) as archive:
        files = ((member.name, archive.extractfile(member)) for member in archive)
        return {name.removesuffix(".json"): json.load(file) for name, file in files if file}


TRACE_BY_NAME = load_traces()
HANG = "w10_min_tokens_hang"


# Everything by columns, as shipped, everything request by request.
@pytest.mark.parametrize("name", sorted(TRACE_BY_NAME.keys() - {HANG}))
def test_decides_as_the_reference_did(name: str) -> None:
    assert first_difference(TRACE_BY_NAME[name]) is None


def test_ends_with_length_where_the_reference_hangs() -> None:
    difference = first_difference(TRACE_BY_NAME[HANG])
    assert difference is not None
    assert difference.is_on_purpose
    assert difference.got[0]["finish"] == "length"


@pytest.mark.parametrize("name", ["t46_spec_preempt_0", "t70_async_spec_preempt_0"])
def test_no_block_leaks_in_any_step_of_a_replay(name: str) -> None:
    replay = Replay(TRACE_BY_NAME[name])
    for _ in replay.steps():
        check_book(replay.core)


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
