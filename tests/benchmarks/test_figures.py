"""The arithmetic of a load run."""

import json
import math

import pytest

from benchmarks.figures import Timing, as_json, figures_of, percentile, spread_of, table


def timing(due_s: float, times: list[tuple[float, int]], **fields) -> Timing:
    return Timing(due_s, sent_s=due_s, token_times=times, **fields)


def test_percentiles_interpolate_between_the_closest_ranks():
    values = [10.0, 20.0, 30.0, 40.0]
    assert percentile(values, 0) == 10
    assert percentile(values, 50) == 25
    assert percentile(values, 90) == pytest.approx(37)
    assert percentile(values, 100) == 40
    assert percentile([7.0], 99) == 7
    assert math.isnan(percentile([], 50))


def test_latencies_of_one_request():
    # Due at 1.0; tokens at 1.5, 1.7 (two in one message) and 2.1.
    figures = figures_of([timing(1.0, [(1.5, 1), (1.7, 2), (2.1, 1)])], duration_s=2.0)
    latencies = figures.latencies_ms
    assert latencies["TTFT"].mean == pytest.approx(500)
    assert latencies["E2E"].mean == pytest.approx(1100)
    assert latencies["TPOT"].mean == pytest.approx(200)  # (1100 - 500) / (4 - 1)
    assert latencies["ITL"].mean == pytest.approx(200)  # 200, 0, 400
    assert latencies["ITL"].max == pytest.approx(400)
    assert figures.output_tokens_per_s == 2


def test_a_late_generator_shows_in_ttft_and_in_lateness():
    late = Timing(1.0, sent_s=1.25, token_times=[(1.5, 1)])
    figures = figures_of([late], duration_s=1.0)
    assert figures.latencies_ms["TTFT"].mean == pytest.approx(500)
    assert figures.max_lateness_ms == pytest.approx(250)


def test_failed_requests_count_by_reason_and_in_no_latency():
    timings = [
        timing(0.0, [(1.0, 1)], num_prompt_tokens=10, num_cached_tokens=4),
        timing(0.0, [(9.0, 1)], num_prompt_tokens=99, error="QUEUE_FULL"),
        timing(0.0, [], error="UNFINISHED"),
        timing(0.0, [], error="QUEUE_FULL"),
    ]
    figures = figures_of(timings, duration_s=4.0)
    assert figures.errors == {"QUEUE_FULL": 2, "UNFINISHED": 1}
    assert (figures.num_requests, figures.num_ok) == (4, 1)
    assert figures.latencies_ms["E2E"].max == pytest.approx(1000)
    assert (figures.num_prompt_tokens, figures.num_output_tokens) == (10, 1)
    assert figures.requests_per_s == 0.25
    assert figures.total_tokens_per_s == 2.75


def test_one_token_requests_have_no_tpot_and_their_json_is_json():
    figures = figures_of([timing(0.0, [(1.0, 1)])], duration_s=1.0)
    assert math.isnan(figures.latencies_ms["TPOT"].mean)
    shown = json.loads(json.dumps(as_json(figures), allow_nan=False))
    assert shown["latencies_ms"]["TPOT"] == {"mean": None, "p50": None, "p90": None} | {
        "p99": None,
        "max": None,
    }
    assert shown["latencies_ms"]["TTFT"]["p50"] == 1000


def test_the_table_names_every_figure_and_every_failure():
    text = table(
        "a title", figures_of([timing(0.0, [(1.0, 2)]), timing(0.0, [], error="LATE")], 1.0)
    )
    for word in ("a title", "TTFT", "TPOT", "ITL", "E2E", "p99", "1 of 2", "failed: 1 x LATE"):
        assert word in text


def test_nothing_sent_is_no_division_by_zero():
    figures = figures_of([], duration_s=1.0)
    assert figures.requests_per_s == 0
    assert math.isnan(spread_of([]).mean)
    assert "0 of 0" in table("none", figures)
