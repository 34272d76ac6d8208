"""Where requests go: ready workers with credit, and credit that a burst cannot overshoot."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headrace.vocabulary import WorkerRole, WorkerState
from router.core.credit import WorkerReport
from router.core.placement import Need, WorkerPool
from router.core.prefix_index import prefix_of

NOW = 100.0


def report(worker_id="a", **changes):
    values = {
        "worker_id": worker_id,
        "incarnation": "1",
        "model": "m",
        "state": WorkerState.READY,
        "max_model_len": 1000,
        "block_size": 10,
        "num_kv_blocks": 100,
        "max_num_seqs": 4,
        "vocab_size": 100,
        "num_free_kv_blocks": 100,
        "num_running": 0,
        "num_waiting": 0,
    }
    return WorkerReport(**(values | changes))


def pool_of(*reports, waiting_allowance=2, is_draining=False, scheduler="s"):
    pool = WorkerPool(waiting_allowance=waiting_allowance, max_report_age_s=5.0)
    pool.report(scheduler, reports, is_draining=is_draining, now=NOW)
    return pool


def choose(pool, num_tokens=10, *, max_tokens=1, model="m", now=NOW, prefix=(), closed=()):
    return pool.choose(Need(model, num_tokens, max_tokens, prefix), now, closed)


def send(pool, num_tokens=10, prefix=(), urgency=0):
    """The request as sent to the worker chosen for it; None when there is none."""
    need = Need("m", num_tokens, 1, prefix, urgency)
    key = pool.choose(need, NOW)
    return None if key is None else pool.send(key, need)


def send_all(pool, num_tokens=10, urgency=0):
    found = []
    while (sent := send(pool, num_tokens, urgency=urgency)) is not None:
        found.append(sent)
    return found


def test_a_burst_inside_one_report_stops_at_the_slots_and_the_allowance():
    assert len(send_all(pool_of(report()))) == 4 + 2


def test_requests_of_other_routers_take_slots():
    assert len(send_all(pool_of(report(num_running=3, num_waiting=1)))) == 2


def test_our_own_requests_in_a_report_are_not_counted_twice():
    pool = pool_of(report())
    for _ in range(4):
        pool.admitted(send(pool), 0)
    pool.report("s", [report(num_running=4)], is_draining=False, now=NOW)
    assert len(send_all(pool)) == 2


def test_a_finished_request_gives_its_slot_back_before_the_next_report():
    pool = pool_of(report())
    sent = send_all(pool)
    pool.report("s", [report(num_running=4, num_waiting=2)], is_draining=False, now=NOW)
    assert send(pool) is None
    pool.finished(sent[0], was_admitted=False)
    assert send(pool) is not None


def test_prompts_not_admitted_yet_hold_their_blocks_but_a_few_may_wait_for_some():
    pool = pool_of(report(num_free_kv_blocks=10, max_num_seqs=50))
    assert len(send_all(pool, 40)) == 2  # 4 blocks each; two may wait for blocks in any case
    pool = pool_of(report(num_free_kv_blocks=20, max_num_seqs=50))
    assert len(send_all(pool, 40)) == 5


def test_admitted_prompts_hold_their_blocks_until_a_report_shows_them():
    pool = pool_of(report(num_free_kv_blocks=20, max_num_seqs=50))
    pool.admitted(send(pool, 200), 0)
    assert len(send_all(pool, 40)) == 2
    pool.report("s", [report(num_free_kv_blocks=80, max_num_seqs=50)], is_draining=False, now=NOW)
    assert len(send_all(pool, 40)) == 18


def urgent_pool(**changes):
    return pool_of(report(displaces_by_priority=True, **changes))


def test_a_more_urgent_request_is_sent_though_the_slots_are_full_of_others():
    pool = urgent_pool()
    assert len(send_all(pool, urgency=5)) == 6
    assert send(pool, urgency=5) is None
    # As many as can give way, whatever is more urgent yet.
    assert len(send_all(pool, urgency=4)) == 4
    assert send(pool, urgency=3) is None
    assert pool.num_in_flight() == 10


def test_a_more_urgent_request_waits_for_those_that_are_as_urgent():
    pool = urgent_pool()
    lower = [send(pool, urgency=5) for _ in range(2)]
    assert len(send_all(pool, urgency=1)) == 6
    assert send(pool, urgency=0) is not None
    for sent in lower:
        pool.finished(sent, was_admitted=False)
    assert send(pool, urgency=1) is None


def test_those_less_urgent_hold_no_place_among_the_waiting_before_it():
    pool = urgent_pool(num_free_kv_blocks=0)
    assert len(send_all(pool, urgency=5)) == 2
    assert len(send_all(pool, urgency=1)) == 2
    assert len(send_all(pool, urgency=1)) == 0
    pool = pool_of(report(num_free_kv_blocks=0, displaces_by_priority=True), waiting_allowance=0)
    assert send(pool, urgency=5) is None


def test_requests_of_other_routers_do_not_give_way():
    pool = urgent_pool(num_running=4, num_waiting=1)
    assert len(send_all(pool, urgency=5)) == 1
    assert len(send_all(pool, urgency=1)) == 1


def test_nobody_gives_way_where_the_scheduler_does_not_displace():
    pool = pool_of(report())
    assert len(send_all(pool, urgency=5)) == 6
    assert send(pool, urgency=1) is None


def test_closed_workers_are_left_out():
    pool = pool_of(report("a"), report("b"))
    a, b = sorted(pool.holders(Need("m", 10, 1), NOW), key=lambda key: key.worker_id)
    assert choose(pool, closed={a}) == b
    assert choose(pool, closed={a, b}) is None


def test_holders_are_the_workers_that_could_serve_it_when_empty():
    pool = pool_of(report("a", max_model_len=50), report("b", state=WorkerState.STARTING))
    assert {key.worker_id for key in pool.holders(Need("m", 49, 1), NOW)} == {"a"}
    assert pool.holders(Need("m", 50, 1), NOW) == set()


def test_the_worker_with_the_smallest_share_taken_is_chosen():
    pool = pool_of(report("a", max_num_seqs=4), report("b", max_num_seqs=8))
    chosen = [send(pool).worker.worker_id for _ in range(6)]
    assert chosen == ["a", "b", "b", "a", "b", "b"]


def test_of_equally_loaded_workers_the_one_with_more_free_blocks_is_chosen():
    pool = pool_of(report("a", num_free_kv_blocks=50), report("b"))
    assert choose(pool).worker_id == "b"


def test_workers_that_cannot_hold_the_whole_request_are_left_out():
    pool = pool_of(report("a", max_model_len=50), report("b", num_kv_blocks=5), report("c"))
    assert choose(pool, 40, max_tokens=11).worker_id == "b"
    assert choose(pool, 40, max_tokens=12).worker_id == "c"
    assert choose(pool, 990, max_tokens=11) is None


def test_only_ready_workers_of_the_model_are_chosen():
    for state in set(WorkerState) - {WorkerState.READY}:
        assert choose(pool_of(report(state=state))) is None
    assert choose(pool_of(report()), model="other") is None
    assert choose(pool_of(report(), is_draining=True)) is None


def test_a_silent_schedulers_workers_are_left_out_in_time():
    pool = pool_of(report())
    assert choose(pool, now=NOW + 5.0) is not None
    assert choose(pool, now=NOW + 5.1) is None
    pool.report("s", [report()], is_draining=False, now=NOW + 6.0)
    assert choose(pool, now=NOW + 6.0) is not None


def test_a_restarted_worker_begins_with_all_its_credit():
    pool = pool_of(report())
    old = send_all(pool)
    pool.report("s", [report(incarnation="2")], is_draining=False, now=NOW)
    pool.finished(old[0], was_admitted=False)
    assert pool.num_in_flight() == 0
    assert len(send_all(pool)) == 6


def test_a_worker_that_refused_is_passed_over_until_its_next_report():
    pool = pool_of(report())
    pool.refused(choose(pool))
    assert choose(pool) is None
    pool.report("s", [report()], is_draining=False, now=NOW)
    assert choose(pool) is not None


def test_a_forgotten_scheduler_takes_its_workers_along():
    pool = pool_of(report())
    sent = send(pool)
    pool.forget("s")
    pool.finished(sent, was_admitted=False)
    assert (choose(pool), pool.reports(), pool.num_in_flight()) == (None, [], 0)


moves = st.lists(
    st.tuples(st.sampled_from(["send", "admit", "finish", "report"]), st.integers(1, 300)),
    max_size=80,
)


@given(moves=moves)
def test_credit_is_whole_again_when_all_is_done(moves):
    pool = pool_of(report("a", displaces_by_priority=True), report("b", max_num_seqs=8))
    live = []
    for action, size in moves:
        urgent = size % 3
        if action == "send" and (sent := send(pool, size, urgency=urgent)) is not None:
            live.append([sent, False])
        elif action == "admit" and live and not live[size % len(live)][1]:
            live[size % len(live)][1] = True
            pool.admitted(live[size % len(live)][0], size)
        elif action == "finish" and live:
            sent, was_admitted = live.pop(size % len(live))
            pool.finished(sent, was_admitted=was_admitted)
        elif action == "report":
            again = [report("a", displaces_by_priority=True), report("b", max_num_seqs=8)]
            pool.report("s", again, is_draining=False, now=NOW)
        assert pool.num_in_flight() == len(live)
    for sent, was_admitted in live:
        pool.finished(sent, was_admitted=was_admitted)
    for worker in pool._schedulers["s"].workers.values():
        credit = worker.credit
        assert (credit.num_in_flight, credit._waiting_urgencies) == (0, [])
        assert (credit.num_waiting_tokens, credit._num_waiting_blocks) == (0, 0)


ROOMY = {"max_num_seqs": 10, "num_kv_blocks": 10_000, "num_free_kv_blocks": 10_000}


def roomy(worker_id, **changes):
    return report(
        worker_id, **(ROOMY | {"max_model_len": 10**5, "max_num_batched_tokens": 1000} | changes)
    )


def prompt(number, num_tokens=2000):
    return prefix_of(np.full(num_tokens, number, np.int32))


def admit(pool, sent, num_cached_tokens=0):
    pool.admitted(sent, num_cached_tokens)
    return sent


def test_a_prompt_goes_where_its_prefix_is():
    pool = pool_of(roomy("a"), roomy("b"))
    first = admit(pool, send(pool, 2000, prompt(1)))
    other = admit(pool, send(pool, 2000, prompt(2)))
    assert {first.worker.worker_id, other.worker.worker_id} == {"a", "b"}
    for sent, number in ((first, 1), (other, 2)):
        assert choose(pool, 2000, prefix=prompt(number)) == sent.worker


def test_a_hot_prefix_spreads_when_its_worker_fills_up():
    pool = pool_of(roomy("a"), roomy("b"))
    homes = [admit(pool, send(pool, 2000, prompt(1)), 1900).worker.worker_id for _ in range(16)]
    assert homes[:4] == ["a"] * 4
    assert 5 <= homes.count("b") <= 8


def test_prompts_that_wait_for_admission_count_as_work_ahead():
    pool = pool_of(roomy("a", max_num_seqs=1000), roomy("b", max_num_seqs=1000))
    assert [send(pool, 3000).worker.worker_id for _ in range(4)] == ["a", "b", "a", "b"]


def test_what_a_worker_turns_out_not_to_have_is_forgotten_with_all_that_is_older():
    pool = pool_of(roomy("a"))
    for number in (1, 2, 3):
        pool.finished(admit(pool, send(pool, 2000, prompt(number))), was_admitted=True)
    index = pool._schedulers["s"].workers["a"].prefixes
    pool.finished(admit(pool, send(pool, 2000, prompt(2)), 64), was_admitted=True)
    assert [index.num_matched(prompt(number)) for number in (1, 2, 3)] == [0, 31, 31]


def test_another_salt_is_another_prefix():
    tokens = np.ones(200, np.int32)
    assert not set(prefix_of(tokens, "one")) & set(prefix_of(tokens, "two"))


def test_decode_workers_get_prompts_only_when_there_are_no_others():
    prefill, decode = (
        roomy("a", role=WorkerRole.PREFILL, num_running=9),
        roomy("b", role=WorkerRole.DECODE),
    )
    assert choose(pool_of(prefill, decode)).worker_id == "a"
    assert choose(pool_of(decode)).worker_id == "b"


def test_a_model_counts_as_served_for_a_while_after_its_last_worker():
    pool = pool_of(report())
    (capacity,) = pool.capacities("m", NOW)
    pool.forget("s")
    assert pool.capacities("m", NOW + 30.0) == [capacity]
    assert pool.capacities("m", NOW + 30.1) == []
    assert pool.ready("m", NOW) == []
    assert pool.capacities("another", NOW) == []
