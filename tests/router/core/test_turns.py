"""Who goes next when not everybody can: nobody is held up for nothing, and nobody for ever."""

import pytest

from headrace.vocabulary import WorkerState
from router.core.credit import WorkerReport
from router.core.fairness import FairShare
from router.core.global_queue import GlobalQueue
from router.core.model_queue import ModelQueue
from router.core.placement import Need, WorkerPool
from router.core.policies import make_order
from router.core.policies.order import QueueEntry
from router.core.turns import MAX_PASSED_OVER, turns

NOW = 100.0


def worker(worker_id, num_tokens=1000, *, model="m", max_num_seqs=1):
    return WorkerReport(
        worker_id=worker_id,
        incarnation="1",
        model=model,
        state=WorkerState.READY,
        max_model_len=num_tokens,
        block_size=10,
        num_kv_blocks=10_000,
        max_num_seqs=max_num_seqs,
        vocab_size=100,
        num_free_kv_blocks=10_000,
        num_running=0,
        num_waiting=0,
    )


class Desk:
    """Lines before workers; requests are names, and known by what they need."""

    def __init__(self, *workers, policy="fcfs"):
        self.pool = WorkerPool(waiting_allowance=0)
        self.pool.report("s", workers, is_draining=False, now=NOW)
        self.queue = GlobalQueue(lambda: ModelQueue(make_order(policy), FairShare()))
        self.needs = {}
        self.sent = {}
        self.failed = []

    def come(self, name, num_tokens=10, *, model="m", tenant="", priority=0):
        self.needs[name] = Need(model, num_tokens, 1)
        key = len(self.needs)
        self.queue.push(
            QueueEntry(
                key=key,
                model=model,
                order=key,
                arrival=NOW,
                num_tokens=num_tokens,
                priority=priority,
                tenant=tenant,
                item=(key, name, tenant),
            )
        )

    def go(self):
        """The names of those who go now."""
        gone = []
        for _, queue in self.queue.by_model:
            for (key, name, tenant), need, worker in turns(queue, self.pool, self._need, NOW):
                self.queue.remove(key)
                if worker is None:
                    self.failed.append(name)
                    continue
                gone.append(name)
                queue.shares.account(tenant).charge_prompt(need.num_tokens)
                self.sent[name] = self.pool.send(worker, need)
        return gone

    def end(self, name):
        self.pool.finished(self.sent.pop(name), was_admitted=False)

    def _need(self, item):
        return self.needs[item[1]]


def test_one_model_does_not_wait_for_another():
    desk = Desk(worker("a", model="a"), worker("b", model="b"))
    for number in range(3):
        desk.come(f"a{number}", model="a")
    desk.come("b0", model="b")
    assert desk.go() == ["a0", "b0"]
    desk.come("c0", model="c")  # nobody serves it yet
    desk.come("b1", model="b")
    desk.end("b0")
    assert desk.go() == ["b1"]
    assert len(desk.queue) == 3


def test_a_small_one_goes_past_a_huge_one_only_where_the_huge_one_never_could():
    desk = Desk(worker("large", 1000), worker("small", 100, max_num_seqs=2))
    desk.come("first", 500)
    assert desk.go() == ["first"]
    desk.come("huge", 500)
    for number in range(3):
        desk.come(f"tiny{number}")
    assert desk.go() == ["tiny0", "tiny1"]
    desk.end("first")
    assert desk.go() == ["huge"]
    desk.end("tiny0")
    assert desk.go() == ["tiny2"]


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair"])
def test_a_huge_one_is_not_overtaken_for_ever(policy):
    desk = Desk(worker("a", max_num_seqs=3), policy=policy)
    for number in range(3):
        desk.come(f"t{number}", tenant="small")
    desk.go()
    desk.come("huge", 900, tenant="huge")
    for number in range(3, 30):
        desk.come(f"t{number}", tenant="small")
    order = []
    for _ in range(5):
        desk.end(next(iter(desk.sent)))
        order += desk.go()
    assert "huge" in order[:2]


def test_what_no_ready_worker_could_hold_fails_and_holds_up_nobody():
    desk = Desk(worker("a", 100))
    desk.come("lost", 500)
    desk.come("tiny")
    assert desk.go() == ["tiny"]
    assert desk.failed == ["lost"]


def test_without_ready_workers_everybody_waits():
    desk = Desk()
    desk.come("lost", 500)
    assert desk.go() == desk.failed == []
    assert len(desk.queue) == 1


def test_no_more_are_passed_over_than_a_turn_has_time_for():
    for num_huge, expected in ((MAX_PASSED_OVER, ["tiny"]), (MAX_PASSED_OVER + 1, [])):
        desk = Desk(worker("large", 1000), worker("small", 100))
        desk.come("first", 500)
        desk.go()
        for number in range(num_huge):
            desk.come(f"huge{number}", 500)
        desk.come("tiny")
        assert desk.go() == expected
        # Those passed over are where they were.
        desk.end("first")
        assert desk.go()[0] == "huge0"


def test_a_tenant_that_is_passed_over_keeps_its_turn():
    desk = Desk(worker("large", 1000), worker("small", 100), policy="fair")
    desk.come("first", 500, tenant="x")
    desk.go()
    for name in ("huge0", "huge1"):
        desk.come(name, 500, tenant="huge")
    for number in range(4):
        desk.come(f"t{number}", tenant="small")
    assert desk.go() == ["t0"]
    # Nobody was lifted above it meanwhile.
    desk.come("t4", tenant="later")
    account = desk.queue.of("m").shares.account
    assert account("later").virtual_tokens == account("huge").virtual_tokens < 10
    desk.end("t0")
    desk.end("first")
    assert desk.go() == ["huge0", "t4"]


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair"])
def test_a_failure_while_requests_are_sent_loses_none_of_those_skipped_before(policy):
    desk = Desk(worker("large", 1000), worker("small", 100, max_num_seqs=2), policy=policy)
    desk.come("first", 500, tenant="huge")
    desk.go()
    desk.come("huge", 500, tenant="huge")
    desk.come("tiny", tenant="small")
    send, desk.pool.send = desk.pool.send, lambda *_: 1 / 0
    with pytest.raises(ZeroDivisionError):
        desk.go()
    desk.pool.send = send
    desk.end("first")
    assert desk.go() == ["huge"]
