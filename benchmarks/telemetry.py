"""`make bench-telemetry`: what metrics and traces cost.

First counting alone, which is always on: the time of all the counting of one step and of one
value; and the spans of a sampled request in the scheduler. Then 64 streams through all services:
two stacks that differ in nothing but telemetry run side by side and take turns of a second or
two (see `turns`). One exports nothing. Router and scheduler of the other are scraped every 5
s, and send their metrics every 10 s and a tenth of the traces to a collector. Processor time
compares better than rates, because load on the machine lowers rates much more than it raises
processor time: on a machine with other work, read `cpu_ratio` (of which at most 1.02 is to come)
and `cpu_us_more` (at most 3).
"""

import asyncio
import contextlib
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np
import uvloop

from benchmarks.control import shown
from benchmarks.deployment import Deployment, deployment
from benchmarks.turns import take_turns
from headrace.service import telemetry
from headrace.service.metrics import Recorder
from headrace.v1 import inference_pb2
from router.metrics import DURATION
from router.rpc import spans
from scheduler.core.plan import (
    EMPTY_INT32,
    NO_FACTS,
    FinishedRequest,
    RequestStatus,
    SchedulerConfig,
    StepPlan,
)
from scheduler.core.scheduler import SchedulerCore
from scheduler.in_flight import InFlight
from scheduler.metrics import WorkerMeter
from scheduler.requests import LiveRequest, Submission
from scheduler.traces import RequestTraces
from scheduler.updates import NO_DRAFTS

_NUM_STREAMS = 64
_NUM_TIMED = 20_000
_NUM_TRACED = 100
_TRACED = {
    "OTEL_TRACES_SAMPLER": "parentbased_traceidratio",
    "OTEL_TRACES_SAMPLER_ARG": "0.1",
    "OTEL_METRIC_EXPORT_INTERVAL": "10000",
}

Result = dict[str, Any]


def counting() -> Result:
    """CPU microseconds of what is counted in one step of 64 decodes, and of one histogram value."""
    plan = _plan()
    meter, recorder = WorkerMeter(), Recorder(DURATION)
    config = SchedulerConfig(
        block_size=16,
        num_gpu_blocks=1024,
        max_model_len=1024,
        max_num_batched_tokens=512,
        max_num_seqs=_NUM_STREAMS,
    )
    core, keys = SchedulerCore(config), np.arange(_NUM_STREAMS)
    request_ids = [f"request {key}" for key in keys]
    flight = InFlight(plan, keys, 1.0, step=meter.sent(plan, core, 0, request_ids, 1.0))

    def step() -> None:
        meter.planned(plan)
        meter.sent(plan, core, 0, request_ids, 1.0)
        meter.got_result(flight, 1.02, _NUM_STREAMS, NO_DRAFTS, 1e9, is_dry=True)

    labels = ("chat", "headrace", "model", "")
    us_per_step = _us_each(step)
    return {
        "us_per_step": round(us_per_step, 2),
        "us_per_token_of_64": round(us_per_step / _NUM_STREAMS, 3),
        "us_per_histogram_value": round(_us_each(lambda: recorder.record(0.3, labels)), 2),
    }


def tracing() -> Result:
    """CPU microseconds of a request's spans in router and scheduler, sampled or not.

    The scheduler's are those of a request that waits, is admitted in a step of 64 and ends. The
    exporter's thread counts, too; a collector gets what is exported.
    """
    scheduler, call = _SchedulerSpans(), inference_pb2.GenerateRequest(text="hello")

    def one(traceparent: str) -> None:
        with spans.generation(call, "request 0", "model", _Call(traceparent)) as span:
            with telemetry.start_span("admission"), telemetry.start_span("tokenize"):
                pass
            if span.is_recording():
                for stage in ("queue", "prefill", "decode", "detokenize"):
                    telemetry.record_span(stage, span, 1.0, 2.0)
            scheduler.run(telemetry.current_traceparent())

    def some(exporting: telemetry.Telemetry) -> None:
        # No more than the exporter's queue holds.
        for _ in range(_NUM_TRACED):
            one(f"00-{'a' * 32}-{'b' * 16}-01")
        assert exporting.provider is not None, "an endpoint is given"
        exporting.provider.force_flush()

    with tempfile.TemporaryDirectory() as folder:
        collector = Deployment(Path(folder))
        address = collector.start("benchmarks.collector")
        exporting = telemetry.setup("benchmark", f"http://{address}")
        try:
            unsampled = _us_each(lambda: one(f"00-{'a' * 32}-{'b' * 16}-00"), 2_000)
            sampled = _us_each(lambda: some(exporting), 20) / _NUM_TRACED
        finally:
            exporting.shutdown()
            asyncio.run(collector.stop())
    return {
        "us_per_sampled_request": round(sampled),
        "us_per_other_request": round(unsampled),
        "us_per_token_of_100_with_a_tenth": round((0.1 * sampled + 0.9 * unsampled) / 100, 2),
    }


class _Call:
    """A call's context with the caller's trace."""

    def __init__(self, traceparent: str) -> None:
        self._metadata = (("traceparent", traceparent),)

    def invocation_metadata(self) -> Any:
        return self._metadata

    def code(self) -> None:
        return None


class _SchedulerSpans:
    """What the scheduler does for the traces of one request after the other."""

    def __init__(self) -> None:
        self._traces = RequestTraces()
        self._plan, self._keys = _plan(), np.arange(_NUM_STREAMS)
        self._facts = FinishedRequest(0, "request 0", RequestStatus.LENGTH_CAPPED, None, 0)

    def run(self, traceparent: str) -> None:
        submission = Submission(
            handle=0,
            request_id="request 0",
            prompt_token_ids=EMPTY_INT32,
            max_tokens=1,
            sampling=None,
            traceparent=traceparent,
        )
        owner: Any = None
        request = LiveRequest(0, 1, submission, owner, submission.generated_token_ids)
        self._traces.submitted(request, "worker")
        self._traces.admitted(request, 0, "worker", 1)
        step = self._traces.begin_step(self._plan, self._keys, [request])
        if step is not None:
            step.end()
        self._traces.finished(request, self._facts, "", 100)


def _us_each(work: Callable[[], None], num_times: int = _NUM_TIMED) -> float:
    work()
    began = time.process_time()
    for _ in range(num_times):
        work()
    return (time.process_time() - began) / num_times * 1e6


def _plan() -> StepPlan:
    rows = np.arange(_NUM_STREAMS, dtype=np.int32)
    none = np.empty(0, dtype=np.int32)
    return StepPlan(
        step_id=0,
        freed_rows=none,
        row_requests=(),
        appended_block_rows=none,
        appended_block_ids=none,
        rows=rows,
        num_computed_tokens=rows + 100,
        num_scheduled_tokens=np.ones_like(rows),
        num_draft_tokens=none,
        draft_token_ids=none,
        is_prefill_chunk=np.zeros(_NUM_STREAMS, dtype=np.bool_),
        admissions=(),
        preempted_keys=(),
        expired=(),
        facts=NO_FACTS,
    )


async def compare(step_ms: float, num_tokens: int, num_turns: int) -> Result:
    """Turns with and without telemetry."""
    async with contextlib.AsyncExitStack() as stack:
        stacks = {
            "off": await stack.enter_async_context(deployment(step_ms)),
            "on": await stack.enter_async_context(deployment(step_ms, is_observed=True)),
        }
        return await take_turns(stacks, num_tokens, num_turns)


async def run(num_turns: int, *, is_paced: bool) -> Result:
    """Runs every measurement and prints each result at once."""
    results: Result = {}
    for title, measure in (("counting", counting), ("tracing", tracing)):
        results[title] = await asyncio.to_thread(measure)
        click.echo(shown(title, results[title]))
    for title, step_ms, num_tokens in (
        ("64 streams, steps at once", 0.0, 300),
        ("64 streams, a step every 20 ms", 20.0, 100),
    ):
        if step_ms and not is_paced:
            continue
        results[title] = await compare(step_ms, num_tokens, num_turns)
        click.echo(shown(title, results[title]))
    return results


@click.command(context_settings={"show_default": True})
@click.option("--turns", default=60, help="Turns of each stack.")
@click.option("--paced/--no-paced", "is_paced", default=True, help="Also with steps of 20 ms.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Figures as JSON.")
def main(turns: int, json_file: Path | None, *, is_paced: bool) -> None:
    """Measure what metrics and traces cost on this machine."""
    os.environ["HEADRACE_PARENT_DEATH"] = "1"
    os.environ.update(_TRACED)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        results = runner.run(run(turns, is_paced=is_paced))
    if json_file is not None:
        json_file.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
