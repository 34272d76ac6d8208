import pytest

from headrace.cli.top.state import COLUMNS, TPOT, TTFT, View, bar
from headrace.steps import WaitingRequest, WorkerStep, WorkerSteps
from headrace.types import DurationCounts, PoolInfo, TenantLoad, WorkerStatus


def step(position_s=0.0, prefill=0, decode=0, drafts=0, idle=0, **fields):
    values = dict.fromkeys(WorkerStep.__slots__, 0)
    values |= {
        "position": int(position_s * 1e6),
        "prefill_tokens": prefill,
        "decode_tokens": decode,
        "speculative_tokens": drafts,
        "idle_tokens": idle,
        "num_waiting_by_reason": {},
    }
    return WorkerStep(**(values | fields))


def worker(name, **fields):
    values = dict.fromkeys(WorkerStatus.__slots__, 0)
    values |= dict.fromkeys(("worker_id", "model", "role", "device", "dtype"), "")
    return WorkerStatus(**(values | {"worker_id": name, "state": "ready"} | fields))


def pool(*workers, time_unix_s=0.0, ttft=(), **fields):
    bounds_s = (0.1, 4.0)
    counts = DurationCounts(metric=TTFT, model="m", bounds_s=bounds_s, counts=tuple(ttft))
    return PoolInfo(
        workers=workers,
        num_queued=0,
        num_in_flight=0,
        num_paused=0,
        time_unix_s=time_unix_s,
        durations=(counts,) if ttft else (),
        **fields,
    )


def steps_of(name, *steps):
    return [WorkerSteps(worker_id=name, scheduler_id="s", model="m", steps=steps, has_gap=False)]


@pytest.mark.parametrize(
    ("made", "drawn"),
    [
        (step(prefill=50, decode=25, drafts=5, idle=20), "PPPPPDDS.."),
        (step(prefill=1, decode=1, drafts=1, idle=997), "PDS......."),
        (step(prefill=999, decode=1), "PPPPPPPPPD"),
        (step(idle=100), ".........."),
        (step(), ""),
    ],
)
def test_a_bar_has_a_letter_for_each_use_of_the_budget(made, drawn):
    assert bar([made], 10) == drawn


def test_percentiles_are_of_the_last_minute():
    view = View()
    view.take_pool(pool(ttft=(0, 0, 100)), 0.0)
    assert view.percentiles(TTFT) == "p50 -  p90 -  p99 -"
    view.take_pool(pool(ttft=(10, 0, 100)), 50.0)
    assert view.percentiles(TTFT) == "p50 50 ms  p90 90 ms  p99 99 ms"
    view.take_pool(pool(ttft=(10, 20, 103)), 115.0)
    assert view.percentiles(TTFT) == "p50 2.3 s  p90 4.0 s  p99 4.0 s"
    assert view.percentiles(TPOT) == "p50 -  p90 -  p99 -"


def test_workers_are_sorted_by_what_is_asked_for():
    view = View()
    busy = worker("a", num_running=1, num_waiting=9, num_kv_blocks=10, num_free_kv_blocks=9)
    full = worker("b", num_running=5, num_waiting=0, num_kv_blocks=10, num_free_kv_blocks=2)
    view.take_pool(pool(busy, full), 0.0)

    def names(sort, is_reversed=False):
        return "".join(row[0] for row in view.workers(sort, is_reversed=is_reversed, width=80))

    assert [names(s) for s in ("worker", "running", "waiting", "kv used")] == [
        "ab",
        "ba",
        "ab",
        "ba",
    ]
    assert names("running", is_reversed=True) == "ab"


def test_a_worker_that_makes_no_steps_shows_none():
    view = View()
    view.take_pool(pool(worker("a", max_num_seqs=4)), 100.0)
    made = [step(at, decode=4, duration_s=0.02) for at in (9.5, 9.75, 10.0)]
    view.take_steps(steps_of("a", step(1.0, prefill=9, duration_s=9.0), *made), 100.0)
    (row,) = view.workers("worker", is_reversed=False, width=55)
    assert row == ("a", "ready", "0/4", "0", "0%", "20.0", "4", "DDDDDDDD")
    assert len(row) == len(COLUMNS)
    assert view.last_position() == {"a": 10_000_000}
    view.take_steps([], 103.0)
    (row,) = view.workers("worker", is_reversed=False, width=55)
    assert row[-3:] == ("", "", "")
    view.take_pool(pool(), 104.0)
    assert view.last_position() == {}


def test_the_queue_is_told_by_tenant_and_by_request():
    view = View()
    assert (view.tenants(), view.requests()) == ([], [])
    assert view.workers("worker", is_reversed=False, width=80) == []
    loads = (
        TenantLoad(tenant="", num_requests=2, num_tokens=90),
        TenantLoad(tenant="*", num_requests=1, num_tokens=5),
    )
    view.take_pool(pool(time_unix_s=12.0, queued_by_tenant=loads), 0.0)
    assert view.tenants() == [("(default)", "2", "90"), ("(others)", "1", "5")]
    request = WaitingRequest(
        request_id="r",
        tenant="t",
        model="m",
        num_tokens=7,
        priority=0,
        arrival_time_unix_s=10.0,
        worker_id="",
        reason="no_credit",
        num_needed_blocks=0,
        num_free_blocks=0,
    )
    view.queue = [request]
    assert view.requests() == [("r", "t", "7", "2.0", "router", "no credit")]
