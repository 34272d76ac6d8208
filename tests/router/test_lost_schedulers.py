"""Schedulers that die: their requests go on elsewhere, and what kills them is found."""

from array import array

import pytest

from headrace.vocabulary import RefusalReason
from router.core.suspects import TRIAL_TOKENS
from router.outputs import Logprobs, Refusal, StepOutputs
from tests.router.bench import Bench, report


class Cluster:
    """A bench whose scheduler `s` comes back at once whenever it is lost."""

    def __init__(self, **settings):
        self.bench = Bench(**{"max_num_seqs": 1000} | settings)
        self.num_lost = 0
        self.leaves = {}

    def enter(self, request_id, **fields):
        self.leaves[request_id], request = self.bench.enter(request_id, **fields)
        return request

    @property
    def running(self):
        """Requests by id, as the scheduler has them."""
        link = self.bench.links["s"]
        return {completion.request.spec.request_id: completion for completion in link.sent.values()}

    def lose(self, *, is_draining=False):
        self.num_lost += 1
        assert self.num_lost < 30, "schedulers are lost again and again"
        if is_draining:
            self.bench.router.live.on_report("s", [report("s", 1000)], is_draining=True)
        self.bench.router.live.on_lost(self.bench.links.pop("s"))
        self.bench.add("s", max_num_seqs=1000)

    def run(self, killer, *, num_tokens=0):
        """Steps until all but the killer have ended; the killer's last token kills."""
        got = 0
        while running := self.running:
            if killer in running and got == num_tokens:
                got = 0
                self.lose()
                continue
            got += killer in running
            self.bench.step(num_tokens=1)
            ends = [
                handle
                for handle, completion in self.bench.links["s"].sent.items()
                if len(completion.token_ids) >= 40 and completion.request_id != killer
            ]
            if ends:
                self.bench.step(ends=ends, handles=ends)

    def close(self):
        for leave in self.leaves.values():
            leave()
        self.bench.assert_empty()


@pytest.mark.parametrize("num_tokens", [0, 3])
@pytest.mark.parametrize("num_innocents", [0, 1, 20])
def test_a_request_that_kills_schedulers_fails_and_those_beside_it_do_not(
    num_innocents, num_tokens
):
    cluster = Cluster()
    innocents = [cluster.enter(f"i-{n}") for n in range(num_innocents // 2)]
    killer = cluster.enter("killer")
    innocents += [cluster.enter(f"j-{n}") for n in range(num_innocents - num_innocents // 2)]
    cluster.run("killer", num_tokens=num_tokens)
    assert killer.error.reason == "SCHEDULERS_LOST"
    assert all(request.error is None and request.is_finished for request in innocents)
    assert cluster.num_lost <= 4
    cluster.close()


def test_a_request_that_always_gets_far_before_it_kills_is_not_sent_for_ever():
    cluster = Cluster()
    killer = cluster.enter("killer", max_tokens=10_000)
    cluster.run("killer", num_tokens=TRIAL_TOKENS + 1)
    assert killer.error.reason == "SCHEDULERS_LOST"
    assert cluster.num_lost == 16
    cluster.close()


def test_a_request_that_runs_well_is_not_blamed_for_schedulers_that_are_lost_beside_it():
    cluster = Cluster()
    request = cluster.enter("alone", max_tokens=1000)
    for _ in range(8):
        for _ in range(TRIAL_TOKENS):
            cluster.bench.step()
        cluster.lose()
    assert request.error is None
    assert set(cluster.running) == {"alone"}
    cluster.close()


def test_the_completions_of_a_killer_fail_together():
    cluster = Cluster()
    killer = cluster.enter("killer", n=4)
    cluster.run("killer")
    assert killer.error.reason == "SCHEDULERS_LOST"
    assert killer.is_finished
    cluster.close()


def test_schedulers_that_shut_down_blame_no_request():
    cluster = Cluster()
    request = cluster.enter("r")
    for _ in range(5):
        cluster.lose(is_draining=True)
    assert set(cluster.running) == {"r"}
    assert request.error is None
    cluster.lose()
    cluster.enter("new")
    assert set(cluster.running) == {"r", "new"}
    cluster.close()


def test_new_requests_do_not_wait_for_a_trial():
    cluster = Cluster()
    for name in ("a", "b"):
        cluster.enter(name)
    for _ in range(2):
        cluster.lose()
    assert set(cluster.running) == {"a"}
    assert cluster.bench.router.num_queued == 1
    cluster.enter("new")
    assert set(cluster.running) == {"a", "new"}
    cluster.bench.step(num_tokens=TRIAL_TOKENS)
    assert set(cluster.running) == {"a", "b", "new"}
    cluster.close()


@pytest.mark.parametrize("end", ["abort", "leave", "deadline", "pause"])
@pytest.mark.parametrize("who", ["a", "b"])
def test_a_suspect_that_ends_or_is_paused_holds_up_no_other(end, who):
    cluster = Cluster()
    for name in ("a", "b"):
        cluster.enter(name, deadline_unix_s=1010.0 if (name, end) == (who, "deadline") else None)
    for _ in range(2):
        cluster.lose()
    assert set(cluster.running) == {"a"}
    match end:
        case "abort":
            cluster.bench.router.abort(who)
        case "leave":
            cluster.leaves.pop(who)()
        case "deadline":
            cluster.bench.time = 1011.0
            cluster.bench.router.expire()
        case "pause":
            completion = cluster.running["a"]
            completion.max_unread_tokens = 1
            cluster.bench.step(num_tokens=2)
    if end == "pause":
        assert set(cluster.running) == {"a", "b"}
    else:
        assert set(cluster.running) == {"a", "b"} - {who}
    cluster.close()


def test_a_suspect_that_is_refused_stays_on_trial():
    cluster = Cluster()
    for name in ("a", "b"):
        cluster.enter(name)
    for _ in range(2):
        cluster.lose()
    [handle] = cluster.bench.links["s"].sent
    del cluster.bench.links["s"].sent[handle]
    cluster.bench.router.live.on_refusal(Refusal(handle, RefusalReason.WORKER_LOST, ""))
    cluster.bench.router.live.on_report("s", [report("s", 1000)], is_draining=False)
    assert set(cluster.running) == {"a"}
    cluster.close()


def give(bench, link, token_ids):
    """Give the completion that a link has tokens and their log probabilities."""
    (handle,) = bench.links[link].sent
    bench.router.live.on_step(
        StepOutputs(
            handles=[handle],
            num_new_tokens=[len(token_ids)],
            token_ids=array("i", token_ids),
            logprobs=[Logprobs(handle, [b"%d" % token_id for token_id in token_ids], ())],
        )
    )


def test_tokens_whose_log_probabilities_may_not_be_in_the_store_are_generated_again():
    bench = Bench()
    leave, request = bench.enter("x", num_logprobs=1)
    (completion,) = request.completions
    bench.add("s2")
    (first,) = [name for name, link in bench.links.items() if link.sent]
    for token_ids, seconds in [([1, 2, 3], 6.0), ([4, 5], 6.0), ([6, 7, 8, 9], 0.0)]:
        give(bench, first, token_ids)
        bench.time += seconds
    bench.router.live.on_lost(bench.links[first])
    (other,) = [name for name, link in bench.links.items() if link.sent and name != first]
    assert completion.known_token_ids.tolist() == [1, 2, 3]
    # They come in several steps, the last of which has a new token.
    give(bench, other, [4, 5, 6])
    assert completion.known_token_ids.tolist() == [1, 2, 3, 4, 5, 6]
    give(bench, other, [7, 8, 9, 10])
    give(bench, other, [11])
    assert completion.token_ids.tolist() == list(range(1, 12))
    assert completion.logprobs == [b"%d" % token_id for token_id in range(1, 12)]
    bench.links[first].sent.clear()
    leave()


def test_without_log_probabilities_no_token_is_generated_again():
    bench = Bench()
    leave, request = bench.enter("x")
    bench.step(num_tokens=4)
    bench.router.live.on_lost(bench.links["s"])
    bench.links["s"].sent.clear()
    assert len(request.completions[0].known_token_ids) == 4
    leave()
