"""`headrace explain --why-slow`: what happened, and what a recording says would help."""

import json
from pathlib import Path

import pytest

from headrace.cli.why_slow import causes_of, lines
from headrace.messages import to_explanation
from headrace.types import ExplainEvent, RequestHistory, StageTime, TenantLoad
from scheduler.rpc.explain_wire import explain_response
from tests.scheduler.core.building import new_request
from tests.scheduler.replay.test_why_slow import recorded, recording


def event(kind, first=0, last=0, detail="", **fields):
    return ExplainEvent(
        kind=kind,
        first_step=first,
        last_step=last,
        detail=detail,
        num_tokens=0,
        queue_position=None,
        time_unix_s=0.0,
        **fields,
    )


EVENTS = (
    event("WAITED", 0, 33, num_needed_blocks=300, num_free_blocks=88),
    event("SCHEDULED", 34, 43, "computed 600 tokens, prefill in 3 steps"),
    event("PREEMPTED", 44, 44, "preempted: b needed 2 KV blocks; 600 computed tokens lost"),
    event("LOST", detail="its worker w0 was lost at step 50"),
)


def history(*parts, **fields):
    values = {
        "request_id": "r",
        "events": EVENTS,
        "steps_waited_by_cause": {"BLOCKS": 34, "SEQUENCE_SLOTS": 2},
        "recomputed_tokens": 600,
        "cached_tokens": 16,
        "num_preemptions": 1,
        "breakdown": tuple(StageTime(stage=s, cause=c, seconds=n) for s, c, n in parts),
        "total_s": sum(n for _, _, n in parts),
        "queued_with": (TenantLoad(tenant="b", num_requests=4, num_tokens=900),),
    }
    return RequestHistory(**(values | fields))


def test_the_three_largest_parts_are_told_the_largest_first():
    told = history(
        ("QUEUE", "", 2.0), ("WAIT", "BLOCKS", 4.0), ("PREFILL", "", 1.0), ("DECODE", "", 3.0)
    )
    causes = causes_of(told, ())
    assert [(c.stage, c.cause, c.share) for c in causes] == [
        ("WAIT", "BLOCKS", 0.4), ("DECODE", "", 0.3), ("QUEUE", "", 0.2),
    ]  # fmt: skip
    assert "no recording was given" in list(lines(told, causes, is_replayed=False))[-1]


@pytest.mark.parametrize(
    ("stage", "cause", "facts"),
    [
        ("WAIT", "BLOCKS", "needed 212 KV blocks more: 300 needed, 88 free; 34 steps"),
        ("WAIT", "SEQUENCE_SLOTS", "2 steps"),
        ("QUEUE", "", "4 requests, 900 tokens before: b 4 (900)"),
        (
            "PREFILL",
            "",
            "computed 600 tokens, prefill in 3 steps; 16 tokens from the prefix cache",
        ),
        ("DECODE", "", "10 steps of 150.0 ms"),
        (
            "PREEMPTED",
            "",
            f"1 times, 600 tokens again; the last time {EVENTS[2].detail}",
        ),
        ("RECOVERED", "", "its worker w0 was lost at step 50"),
        ("OTHER", "", ""),
    ],
)
def test_what_happened_comes_from_the_history(stage, cause, facts):
    (found,) = causes_of(history((stage, cause, 1.5)), ())
    assert found.facts == facts


@pytest.mark.parametrize(
    ("requests", "config", "largest", "facts", "advice"),
    [
        (
            [new_request(0, 40, max_tokens=20), new_request(1, 40, max_tokens=6)],
            {"num_gpu_blocks": 5},
            ("WAIT", "BLOCKS"),
            "needed 2 KV blocks more: 3 needed, 1 free; 20 steps",
            "2 KV blocks more (num_gpu_blocks 7) would have saved 20 steps of 26",
        ),
        (
            [new_request(0, 300, max_tokens=2), new_request(1, 60, max_tokens=2)],
            {"max_num_batched_tokens": 32},
            ("WAIT", "BUDGET"),
            "9 steps",
            "max_num_batched_tokens 512 would have saved",
        ),
        (
            [new_request(key, 10, max_tokens=30) for key in range(2)],
            {"max_num_seqs": 1},
            ("WAIT", "SEQUENCE_SLOTS"),
            "30 steps",
            "max_num_seqs 2 would have saved 30 steps of 60",
        ),
        (
            [new_request(0, 30, max_tokens=60), new_request(1, 30, max_tokens=24)],
            {"num_gpu_blocks": 8},
            ("PREEMPTED", ""),
            "1 times",
            "KV blocks more",
        ),
    ],
    ids=["pool", "budget", "slots", "preemptions"],
)
def test_the_cause_of_a_constructed_run_is_found(
    tmp_path: Path, requests, config, largest, facts, advice
):
    core = recorded(tmp_path / "run", requests, **config)
    told = to_explanation(explain_response(core.explain("r1")))
    first = causes_of(told, [tmp_path / "run"])[0]
    assert (first.stage, first.cause) == largest
    assert first.facts.startswith(facts)
    assert advice in first.advice


def test_what_would_have_helped_comes_from_a_recording(headrace, tmp_path: Path):
    requests = [new_request(0, 40, max_tokens=6), new_request(1, 40, max_tokens=6)]
    path = recording(tmp_path / "run", requests, num_gpu_blocks=5)
    text = headrace("explain", "--why-slow", "r1", "--recording", str(path)).stdout
    assert text.splitlines()[:3] == [
        "r1 took 10.0 ms",
        "1. router's queue                       6.0 ms   60%",
        "   3 requests, 50 tokens before: default 2 (20), b 1 (30)",
    ]
    advice = "2 KV blocks more (num_gpu_blocks 7) would have saved 6 steps of 12"
    assert f"   would change it: {advice}" in text.splitlines()
    asked = headrace("explain", "--why-slow", "r1", "--recording", str(path), "--json").stdout
    assert [cause["advice"] for cause in json.loads(asked)][1] == advice


def test_a_recording_without_the_request_is_said(headrace, tmp_path: Path):
    path = recording(tmp_path / "run", [new_request(0)])
    result = headrace("explain", "--why-slow", "r7", "--recording", str(path))
    assert result.exit_code == 1
    assert "no recording has the whole of r7" in result.stderr
    alone = headrace("explain", "r7", "--recording", str(path))
    assert alone.exit_code == 2
