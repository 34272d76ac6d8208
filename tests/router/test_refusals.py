"""What a refusal of a scheduler means for its worker."""

import pytest

from headrace.vocabulary import RefusalReason
from router.outputs import Refusal
from tests.router.bench import Bench, report

# Refusals that are the worker's affair, and those that are the request's own.
NOT_NOW = {RefusalReason.NO_WORKER, RefusalReason.WORKER_LOST, RefusalReason.DRAINING}
NEVER = [reason for reason in RefusalReason if reason not in NOT_NOW]


def refuse(bench, reason):
    """Have the scheduler refuse the one request that it has."""
    [handle] = bench.links["s"].sent
    del bench.links["s"].sent[handle]
    bench.router.live.on_refusal(Refusal(handle, reason, "why"))


@pytest.mark.parametrize("reason", [*NEVER, None])
def test_a_refusal_for_the_request_s_own_sake_holds_up_no_other(reason):
    bench = Bench(max_num_seqs=1, waiting_allowance=0)
    leave_refused, refused = bench.enter("refused")
    leave_innocent, innocent = bench.enter("innocent")
    refuse(bench, reason)
    assert refused.error is not None
    # No report of the worker came meanwhile.
    assert list(bench.links["s"].sent.values()) == innocent.completions
    bench.step(ends=list(bench.links["s"].sent))
    leave_refused()
    leave_innocent()
    bench.assert_empty()


def test_a_request_that_another_router_has_under_its_epoch_is_left_to_be_resumed():
    bench = Bench()
    leave, request = bench.enter("r")
    refuse(bench, RefusalReason.WORKER_LOST)
    bench.router.live.on_report("s", [report("s", 4)], is_draining=False)
    refuse(bench, RefusalReason.DUPLICATE)
    assert request.error.reason == "CONTESTED"
    assert not bench.links["s"].cancelled
    leave()
    bench.assert_empty()


@pytest.mark.parametrize("reason", sorted(NOT_NOW))
def test_a_worker_that_takes_nothing_is_passed_over_until_it_is_reported_again(reason):
    bench = Bench()
    leave, request = bench.enter("r")
    refuse(bench, reason)
    assert request.error is None
    assert not bench.links["s"].sent
    bench.router.live.on_report("s", [report("s", 4)], is_draining=False)
    assert list(bench.links["s"].sent.values()) == request.completions
    bench.step(ends=list(bench.links["s"].sent))
    leave()
    bench.assert_empty()
