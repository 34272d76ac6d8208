"""What it costs to be let in or refused, however much waits."""

import statistics
import time

import numpy as np
import pytest

from headrace.service.errors import ServiceError
from router.core.admission import Limits
from router.request import Spec
from tests.router.bench import TOKENIZER, Bench

FEW_WAITING, MANY_WAITING = 50, 5_000
NUM_WORKERS = 32
# A hundred times as many wait. Measured is 1.0; a look at each of them would be far more.
MAX_RATIO = 3
LONG_PROMPT = np.ones(1_000_000, np.int32)


def crowded(policy, num_waiting) -> Bench:
    """A router with so many requests in its queue and none of them served."""
    limits = Limits(max_queued_requests=20_000, max_live_requests=20_000)
    bench = Bench(limits=limits, policy=policy)
    bench.stays = []  # as long as they are kept, the callers stay
    for number in range(NUM_WORKERS):
        bench.add(f"w{number}")
    number = 0
    while bench.router.num_queued < num_waiting:
        bench.stays.append(enter(bench, number))
        number += 1
    return bench


def enter(bench, number, kind="waits"):
    return bench.enter(f"{kind}{number}", tenant=f"t{number % 50}", priority=number % 7)


def be_let_in(bench, number):
    bench.stays.append(enter(bench, number, "late"))


def be_refused(bench, number):
    spec = Spec(request_id=f"long{number}", model="m", sampling=None, tenant="t")
    with (
        bench.router.reserve(spec.request_id, "t") as reservation,
        pytest.raises(ServiceError, match="tokens"),
    ):
        bench.router.submit(reservation, spec, LONG_PROMPT, "", TOKENIZER)


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair"])
@pytest.mark.parametrize("action", [be_let_in, be_refused])
def test_the_verdict_costs_the_same_behind_few_and_behind_thousands(policy, action) -> None:
    benches = [crowded(policy, FEW_WAITING), crowded(policy, MANY_WAITING)]
    times = [[], []]
    for number in range(200):
        for bench, taken in zip(benches, times, strict=True):
            began = time.process_time()
            action(bench, number)
            taken.append(time.process_time() - began)
    few, many = map(statistics.median, times)
    assert many < MAX_RATIO * few
