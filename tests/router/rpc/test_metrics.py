"""The router's metrics over real calls: sums hold at every scrape, and labels stay few."""

import asyncio
import itertools
import random
from collections import Counter
from types import SimpleNamespace

import grpc.aio
import pytest
from prometheus_client.parser import text_string_to_metric_families

from docs.generate import METRICS_BY_TITLE
from headrace.service import exposition
from headrace.v1 import inference_pb2
from headrace.vocabulary import FinishReason
from router import metrics
from router.request import Spec, Timeline
from tests.router.fake_scheduler import MODEL, FakeScheduler, Script, worker
from tests.router.stack import running_stack


def read(stack):
    """All series as a scrape gets them, by name and labels."""
    readings = metrics.read(stack.router, stack.services.models, stack.store)
    text = b"".join(map(exposition.text, readings)).decode()
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def total(series, name, **labels):
    wanted = set(labels.items())
    return sum(v for (n, found), v in series.items() if n == name and wanted <= found)


def check_sums(series):
    accepted = total(series, "headrace_requests_accepted_total")
    gone = total(series, "headrace_requests_ended_total")
    gone += total(series, "headrace_requests_released_total")
    assert accepted == gone + total(series, "headrace_requests_live")
    assert total(series, "gen_ai_server_request_duration_seconds_count") <= gone


async def test_tokens_in_metrics_are_tokens_in_usage(stack):
    usages = []
    for number in range(6):
        sampling = {"max_tokens": 3 + number, "n": 1 + number % 3}
        messages = await stack.answer("hello" * (number + 1), tenant="a", sampling=sampling)
        usages.append(messages[-1].usage)
    await stack.until(lambda: stack.is_empty)
    series = read(stack)
    labels = {"model": MODEL, "tenant": "a"}
    for name, field in (
        ("prompt", "prompt_tokens"),
        ("output", "completion_tokens"),
        ("cached", "cached_tokens"),
    ):
        expected = sum(getattr(usage, field) for usage in usages)
        assert total(series, f"headrace_tokens_{name}_total", **labels) == expected
    pool = await stack.stub.GetPool(inference_pb2.GetPoolRequest())
    counted = {d.metric: sum(d.counts) for d in pool.durations if d.model == MODEL}
    for name in ("request.duration", "time_to_first_token", "time_per_output_token"):
        metric = f"gen_ai.server.{name}"
        count = f"{metric.replace('.', '_')}_seconds_count"
        assert total(series, count, gen_ai_request_model=MODEL) == counted[metric] == 6
    assert counted["headrace.queue.time"] == 6
    assert all(len(d.counts) == len(d.bounds_s) + 1 for d in pool.durations)


async def test_sums_hold_at_every_scrape_while_requests_come_end_and_are_given_up():
    chance = random.Random(4)
    async with running_stack(
        scheduler=FakeScheduler(script=lambda _: Script(list(range(65, 85)))),
        max_queued_requests=40,
    ) as stack:

        async def one(number):
            call = stack.generate(
                tenant=f"t{number % 3}", sampling={"max_tokens": chance.randint(1, 20)}
            )
            try:
                async for _ in call:
                    if chance.random() < 0.1:
                        call.cancel()
            except (grpc.aio.AioRpcError, asyncio.CancelledError):
                pass

        async def scrape():
            while True:
                check_sums(read(stack))
                await asyncio.sleep(0.01)

        scraping = asyncio.create_task(scrape())
        try:
            async with asyncio.timeout(60):
                await asyncio.gather(*(one(number) for number in range(120)))
                await stack.until(lambda: stack.is_empty)
        finally:
            scraping.cancel()
            with pytest.raises(asyncio.CancelledError):
                await scraping
        series = read(stack)
        check_sums(series)
        assert total(series, "headrace_requests_live") == 0
        assert total(series, "headrace_requests_accepted_total") > 40


async def test_refusals_are_counted_by_the_reason_that_callers_see(stack):
    with pytest.raises(grpc.aio.AioRpcError):
        await stack.answer(sampling={"max_tokens": 10**6})
    with pytest.raises(grpc.aio.AioRpcError):
        await stack.answer("x" * 20_000)
    # Refused before admission is asked, or while the prompt is read.
    for options in ({"model": "other"}, {"sampling": {"temperature": -1}}, {"request_id": "a b"}):
        with pytest.raises(grpc.aio.AioRpcError):
            await stack.answer(**options)
    await stack.answer()
    series = read(stack)
    reasons = {
        dict(labels)["reason"]: value
        for (name, labels), value in series.items()
        if name == "headrace_requests_refused_total"
    }
    assert reasons == {
        "MAX_TOKENS_TOO_LARGE": 1,
        "PROMPT_TOO_LONG": 1,
        "UNKNOWN_MODEL": 1,
        "INVALID_FIELD": 2,
    }


def test_ten_thousand_tenants_and_a_hundred_thousand_requests_make_few_series():
    meters = metrics.Meters("fair", ["gold"])
    num_tokens = Counter()
    timeline = Timeline(arrived=0.0, admitted=1.0, first_token=2.0, ended=3.0)
    for number in range(100_000):
        tenant = "gold" if number % 10 == 0 else f"tenant-{number % 10_000}"
        request = SimpleNamespace(
            spec=Spec(request_id=f"request-{number}", model="m", sampling=None, tenant=tenant),
            traffic=meters.traffic("m", tenant),
            timeline=timeline,
            prompt_token_ids=(1, 2),
            completions=(SimpleNamespace(token_ids=(1, 2)),),
            error=None,
            is_taken_up=False,
            num_tokens_before=0,
        )
        meters.accepted(request)
        meters.admitted(request, 1)
        meters.got_first_token(request)
        meters.ended(request, FinishReason.DEADLINE)
        request.traffic.num_output_tokens += number
        num_tokens[meters.tenant_label(tenant)] += number
    assert len(meters.traffic_by_labels) == metrics._MAX_TENANTS + 2
    found = {tenant: t.num_output_tokens for (_, tenant), t in meters.traffic_by_labels.items()}
    assert found == num_tokens
    assert found["gold"] > 0
    assert sum(found.values()) == sum(range(100_000))
    assert meters.num_accepted == 100_000
    for metric, points in meters.histograms():
        most = metrics._MAX_TENANTS + 2 if "tenant" in metric.labels else 1
        assert len(points) == most, metric.name
        assert sum(found.count for found in points.values()) == 100_000


def test_no_metric_has_a_label_with_a_value_for_each_request_or_caller():
    few = {"model", "policy", "tenant", "worker", "reason", "by", "use", "owner", "cause"}
    few |= {"status", "state", "error.type", "gen_ai.operation.name", "gen_ai.provider.name"}
    few |= {"gen_ai.request.model"}
    every = list(itertools.chain.from_iterable(METRICS_BY_TITLE.values()))
    assert len(every) > 40
    assert {label for metric in every for label in metric.labels} <= few


async def test_the_queue_is_counted_by_model_policy_and_tenant():
    scheduler = FakeScheduler(is_paced=False)
    scheduler.workers = [worker(max_num_seqs=1)]
    settings = {"policy": "priority", "waiting_allowance": 0}
    async with running_stack(scheduler=scheduler, **settings) as stack:
        calls = [stack.generate("hello", tenant=tenant) for tenant in ("a", "b", "b", "b")]
        await stack.until(lambda: stack.router.num_queued == 3)
        series = read(stack)
        labels = {"model": MODEL, "policy": "priority"}
        assert total(series, "headrace_queue_requests", **labels) == 3
        assert total(series, "headrace_queue_requests", tenant="a", **labels) in {0, 1}
        assert total(series, "headrace_queue_tokens", **labels) == 3
        assert total(series, "headrace_queue_time_seconds_count") == 0
        for call in calls:
            call.cancel()
        await stack.until(lambda: stack.is_empty)
        assert total(read(stack), "headrace_queue_requests") == 0
        check_sums(read(stack))


async def test_the_first_token_counts_once_however_often_a_request_is_taken_up():
    scheduler = FakeScheduler()
    scheduler.limit = 3
    async with running_stack(scheduler=scheduler) as stack:
        first = stack.generate(request_id="r", keep_on_disconnect=True)
        num_read = 0
        while num_read < 3:
            num_read += len((await first.read()).outputs[0].token_ids)
        again = stack.generate(request_id="r", keep_on_disconnect=True)
        reading = asyncio.ensure_future(stack.rest(again))
        await stack.until(lambda: stack.router.meters.num_released == 1)
        scheduler.limit = 10**9
        scheduler.resume()
        async with asyncio.timeout(20):
            (*_, last) = await reading
        await stack.until(lambda: stack.is_empty)
        series = read(stack)
        check_sums(series)
        assert total(series, "headrace_requests_taken_up_total", by="caller") == 1
        assert total(series, "gen_ai_server_time_to_first_token_seconds_count") == 1
        assert total(series, "headrace_tokens_prompt_total") == last.usage.prompt_tokens
        assert total(series, "headrace_tokens_output_total") == last.usage.completion_tokens
