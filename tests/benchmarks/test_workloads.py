"""Arrivals, lengths and prompts of loads; trace files as their publishers write them."""

import json
from itertools import islice, pairwise
from pathlib import Path

import pytest

from benchmarks.workloads import (
    Ask,
    Scale,
    WorkloadError,
    make_sample,
    poisson,
    prompt_of,
    read_trace,
    synthetic,
)

SAMPLE = Path(__file__).parents[2] / "benchmarks/data/sample_conversations.jsonl"


def test_poisson_arrivals_are_those_of_their_seed_and_rate():
    times = list(islice(poisson(50.0, seed=1), 5000))
    assert times == list(islice(poisson(50.0, seed=1), 5000))
    assert times != list(islice(poisson(50.0, seed=2), 5000))
    assert times == sorted(times)
    assert times[-1] == pytest.approx(100, rel=0.05)
    gaps = [b - a for a, b in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    assert variance == pytest.approx(mean**2, rel=0.15)  # as an exponential's


def test_synthetic_lengths_stay_within_their_spread():
    asks = list(synthetic([0.0] * 500, 100, 10, 0.5, seed=3))
    assert {50 <= ask.num_prompt_tokens <= 150 for ask in asks} == {True}
    assert {5 <= ask.num_output_tokens <= 15 for ask in asks} == {True}
    assert len({ask.num_prompt_tokens for ask in asks}) > 20
    assert {a.num_prompt_tokens for a in synthetic([0.0] * 9, 100, 10, 0.0, seed=3)} == {100}


def test_azure_traces_begin_at_zero_and_are_scaled(tmp_path):
    path = tmp_path / "azure.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:03.9799600,4808,10\n"
        "2023-11-16 18:17:05.9799600,3180,8\n"
    )
    asks = read_trace(path, Scale(), limit=10)
    assert asks == [Ask(0.0, 4808, 10), Ask(pytest.approx(2.0), 3180, 8)]
    scale = Scale(speed=4, tokens=0.1, max_prompt_tokens=400, max_output_tokens=1)
    fitted = read_trace(path, scale, limit=10)
    assert [(a.num_prompt_tokens, a.num_output_tokens) for a in fitted] == [(400, 1), (318, 1)]
    assert fitted[1].at_s == pytest.approx(0.5)
    assert len(read_trace(path, Scale(), limit=1)) == 1


def test_mooncake_prompts_share_the_blocks_that_have_equal_ids(tmp_path):
    path = tmp_path / "mooncake.jsonl"
    records = [
        {"timestamp": 3000, "input_length": 1200, "output_length": 5, "hash_ids": [4, 5, 6]},
        {"timestamp": 1000, "input_length": 1100, "output_length": 7, "hash_ids": [4, 5, 9]},
    ]
    path.write_text("\n".join(map(json.dumps, records)))
    first, second = read_trace(path, Scale(), limit=5)
    assert (first.at_s, second.at_s) == (0.0, 2.0)
    one, other = prompt_of(first, 0, 5000, seed=1), prompt_of(second, 1, 5000, seed=1)
    assert (len(one), len(other)) == (1100, 1200)
    assert one[:1024] == other[:1024]
    assert one[1024:1100] != other[1024:1100]
    small = read_trace(path, Scale(tokens=0.125), limit=5)
    assert [len(prompt_of(a, i, 5000, seed=1)) for i, a in enumerate(small)] == [138, 150]
    assert prompt_of(small[0], 0, 5000, 1)[:128] == prompt_of(small[1], 1, 5000, 1)[:128]


def test_prompts_without_shared_blocks_differ_and_stay_in_the_vocabulary():
    ask = Ask(0.0, 200, 5)
    one, other = prompt_of(ask, 0, 400, seed=1), prompt_of(ask, 1, 400, seed=1)
    assert one != other
    assert one == prompt_of(ask, 0, 400, seed=1)
    assert {300 <= token < 400 for token in one} == {True}
    assert set(prompt_of(ask, 0, 10, seed=1)) == {9}


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("t.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,2\n", "t.csv:2"),
        ("t.csv", "A,B\n1,2\n", "TIMESTAMP"),
        ("t.jsonl", '{"timestamp": 1}\n', "t.jsonl:1"),
        ("t.jsonl", "", "no requests"),
        ("t.txt", "", "must end in"),
    ],
)
def test_a_file_that_is_no_trace_is_named_with_its_line(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(WorkloadError, match=message):
        read_trace(tmp_path / name, Scale(), limit=5)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(WorkloadError, match=r"none\.csv"):
        read_trace(tmp_path / "none.csv", Scale(), limit=5)


def test_the_sample_is_what_its_seed_makes_and_can_be_read():
    lines = SAMPLE.read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == make_sample(24, 7)
    asks = read_trace(SAMPLE, Scale(), limit=1000)
    assert len(asks) == len(lines)
    assert max(ask.num_prompt_tokens + ask.num_output_tokens for ask in asks) < 512
