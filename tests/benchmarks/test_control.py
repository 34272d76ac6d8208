"""The measurements of the control plane, a few tokens each: what they count, not how fast it is."""

import random

import pytest

from benchmarks.control import paced, short_requests, shown, streams
from benchmarks.deployment import bare_server, deployment
from benchmarks.soak import soak
from benchmarks.store import compare
from benchmarks.turns import median_of, quiet_difference

pytestmark = [pytest.mark.system]


@pytest.fixture(autouse=True)
def no_orphans(monkeypatch):
    monkeypatch.setenv("HEADRACE_PARENT_DEATH", "1")


async def test_streams_count_every_token_and_name_every_process():
    result = await streams(deployment(), 3, 20)
    assert result["tokens"] == 60
    assert result["cpu_us_per_token"].keys() == {"instant_worker", "scheduler", "router", "client"}


def test_a_measurement_is_shown_as_lines_that_hold_all_of_it():
    result = {"clients": 1, "tokens_per_s": 46, "latency_ms": {"p50": 1.71, "p99": 62.56}}
    assert shown("paced", result).splitlines() == [
        "paced: 1 clients, 46 tokens_per_s",
        "  latency_ms          p50 1.71, p99 62.56",
    ]


async def test_the_bare_server_answers_as_a_router_does():
    assert (await streams(bare_server(), 3, 20))["tokens"] == 60
    assert (await short_requests(bare_server(), 2, 10))["requests"] == 10


async def test_a_paced_token_is_as_old_as_its_way_was_long():
    result = await paced(deployment(step_ms=10.0, num_workers=2), 4, 30)
    assert result["tokens"] == 120
    assert 0 < result["latency_ms"]["p50"] < 5000


async def test_a_soak_aborts_one_in_twenty_and_weighs_the_store_too():
    result = await soak(200)
    assert result["aborted"] == 10
    assert {f"{name} memory" for name in ("store", "router", "scheduler")} <= result.keys()


async def test_turns_with_and_without_a_store_have_the_same_tokens():
    result = await compare(0.0, 5, 1)
    assert result["turns"] == 1
    assert result["tokens_per_s"].keys() == {"no store", "store"}
    assert "store" in result["cpu_us, store"]
    for name in ("rate_ratio", "cpu_ratio"):
        median, least, most = result[name]
        assert 0 < least <= median <= most
    assert "store" not in result["cpu_us, no store"]


def test_a_small_difference_is_found_among_turns_that_are_disturbed():
    chance = random.Random(3)
    pairs = [tuple(cost + chance.expovariate(1 / 6) for cost in (32.0, 30.0)) for _ in range(400)]
    for difference, least, most in (
        quiet_difference(pairs),
        median_of([with_it - without for with_it, without in pairs]),
    ):
        assert least < 2 < most
        assert least < difference < most
    assert quiet_difference(pairs)[1] > 0
    same = [(a, a) for a, _ in pairs]
    assert quiet_difference(same) == [0, 0, 0]
    assert median_of([5.0]) == [5, 5, 5]
