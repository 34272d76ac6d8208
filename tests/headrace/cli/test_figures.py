"""Figures of an answer, on a scripted clock."""

from headrace.cli.figures import Stopwatch
from headrace.types import Delta


def watch(*times_and_tokens):
    times = iter([10.0, *(time for time, _ in times_and_tokens)])
    stopwatch = Stopwatch(lambda: next(times))
    for _, num_tokens in times_and_tokens:
        stopwatch.see(Delta(request_id="r", token_ids=(1,) * num_tokens))
    return stopwatch.figures()


def test_ttft_is_to_the_first_token_and_tpot_the_mean_gap_after_it():
    figures = watch((10.1, 0), (10.5, 1), (11.0, 2), (11.5, 1))
    assert figures.num_tokens == 4
    assert figures.ttft_s == 0.5
    assert figures.e2e_s == 1.5
    assert figures.tpot_s is not None
    assert abs(figures.tpot_s - 1 / 3) < 1e-9
    assert str(figures) == "4 tokens in 1.50 s: TTFT 500 ms, TPOT 333.3 ms, 2.7 tokens/s"


def test_one_token_has_no_gap():
    assert watch((10.5, 1)).tpot_s is None
    assert "TPOT -" in str(watch((10.5, 1)))


def test_nothing_came():
    figures = watch()
    assert (figures.ttft_s, figures.tokens_per_s) == (None, 0.0)
