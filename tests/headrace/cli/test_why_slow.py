"""`headrace explain --why-slow`: what happened, and what a recording says would help."""

import json
from pathlib import Path

import pytest

from headrace.cli.why_slow import causes_of, lines
from headrace.types import ExplainEvent, RequestHistory, StageTime, TenantLoad
from tests.scheduler.core.building import new_request
from tests.scheduler.replay.test_why_slow import recording


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
