"""One number per request and step: how the token budget is shared out."""

from collections.abc import Callable

import pytest

from scheduler.core.plan import NewRequest, WaitReason
from scheduler.core.scheduler import SchedulerCore
from tests.scenarios.tables import named, play
from tests.scheduler.core.building import Driver, new_request

MakeCore = Callable[..., SchedulerCore]


def test_a_budget_of_512_serves_the_old_ones_first(make_core: MakeCore) -> None:
    """B and C decode, A has 400 tokens of its prompt left; D gets what remains of 512."""
    core = make_core(max_num_batched_tokens=512, num_gpu_blocks=400, max_model_len=2048)
    play(
        core,
        {
            0: [named("B", 1, max_tokens=5), named("C", 1, max_tokens=5), named("A", 910)],
            1: [named("D", 300)],
        },
        """
        step | B  C    A    D
           0 | 1  1  510    .
           1 | 1  1  400  110
           2 | 1  1    1  190
           3 | 1  1    1    1
        """,
    )


def test_a_long_prompt_is_cut_at_the_threshold(make_core: MakeCore) -> None:
    """2,050 tokens are four chunks of 512 and a last one of 2, though the budget is 8,192."""
    core = make_core(
        max_num_batched_tokens=8192,
        long_prefill_token_threshold=512,
        num_gpu_blocks=400,
        max_model_len=4096,
    )
    play(
        core,
        {0: [named("A", 2050)]},
        """
        step |   A  free
           0 | 512  367
           1 | 512  335
           2 | 512  303
           3 | 512  271
           4 |   2  270
           5 |   1  270
        """,
    )


def test_prefill_decode_and_drafts_share_a_step(make_core: MakeCore) -> None:
    """A is cut at the threshold, B decodes, C verifies four drafts, D starts with what is left."""
    core = make_core(
        max_num_batched_tokens=512,
        long_prefill_token_threshold=256,
        num_gpu_blocks=600,
        max_model_len=4096,
        num_spec_tokens=4,
        spec_kind="ngram",
    )
    driver = Driver(core)
    driver.add(named("A", 1000), named("B", 1, max_tokens=9), named("C", 1, max_tokens=20))
    rows = []
    for step in range(4):
        if step == 2:
            driver.add(named("D", 400))
        plan = driver.schedule()
        rows.append(driver.scheduled(plan))
        # The worker accepts two of C's drafts, and proposes four new ones.
        drafts = 2 if step else 0
        driver.update(plan, {"C": [7] * (1 + drafts)})
        driver.propose({"C": 4})
    assert rows == [
        {"A": 256, "B": 1, "C": 1},
        {"A": 256, "B": 1, "C": 5},
        {"A": 256, "B": 1, "C": 5, "D": 250},
        {"A": 232, "B": 1, "C": 5, "D": 150},
    ]


def test_four_prompts_of_1000_fill_a_budget_of_2048(make_core: MakeCore) -> None:
    core = make_core(
        max_num_batched_tokens=2048, max_num_seqs=256, num_gpu_blocks=2000, max_model_len=2048
    )
    requests = [named(name, 1000, max_tokens=2) for name in "ABCD"]
    driver = play(
        core,
        {0: requests},
        """
        step |    A     B    C     D
           0 | 1000  1000   48     .
           1 |    1     1  952  1000
        """,
    )
    (fact,) = driver.plans[0].facts.passed_over
    assert (fact.request_id, fact.reason) == ("D", WaitReason.BUDGET)


def test_the_257th_request_waits_for_a_slot(make_core: MakeCore) -> None:
    """256 decodes use a fraction of the budget; it is the number of slots that is used up."""
    core = make_core(
        max_num_batched_tokens=2048, max_num_seqs=256, num_gpu_blocks=2000, max_model_len=2048
    )
    driver = Driver(core)
    driver.add(*(new_request(key, 1, max_tokens=4) for key in range(256)))
    driver.step()
    driver.add(new_request(256, 20))
    for plan in driver.steps(3):
        assert plan.num_scheduled_tokens.tolist() == [1] * 256
        (fact,) = plan.facts.passed_over
        assert (fact.request_id, fact.reason) == ("r256", WaitReason.SEQUENCE_SLOTS)
    plan = driver.schedule()
    assert driver.scheduled(plan) == {"r256": 20}


def decodes(count: int) -> list[NewRequest]:
    return [new_request(key, 1, max_tokens=9) for key in range(count)]


@pytest.mark.parametrize(
    ("budget", "prompts", "first", "second"),
    [
        # 200 decodes and a prompt of 1,800 are 2,000 of 2,048: the next gets 48.
        (2048, {"P": 1800, "Q": 300}, {"P": 1800, "Q": 48}, {"P": 1, "Q": 252}),
        # 8,192 tokens are enough for 200 decodes and a prompt of 6,000 at once.
        (8192, {"N": 6000}, {"N": 6000}, {"N": 1}),
        # With 4,000 left beside the decodes it takes two steps, and nobody decodes later for it.
        (4200, {"N": 6000}, {"N": 4000}, {"N": 2000}),
    ],
)
def test_decodes_go_on_while_a_prompt_comes_in(
    make_core: MakeCore,
    budget: int,
    prompts: dict[str, int],
    first: dict[str, int],
    second: dict[str, int],
) -> None:
    core = make_core(
        max_num_batched_tokens=budget, max_num_seqs=256, num_gpu_blocks=4000, max_model_len=8192
    )
    driver = Driver(core)
    driver.add(*decodes(200))
    driver.step()
    driver.add(
        *(
            new_request(1000 + number, length, request_id=name)
            for number, (name, length) in enumerate(prompts.items())
        )
    )
    for expected in (first, second):
        plan = driver.schedule()
        counts = driver.scheduled(plan)
        assert {name: counts.pop(name) for name in prompts} == expected
        assert counts == {f"r{key}": 1 for key in range(200)}
        driver.update(plan)


def test_continuous_batching_leaves_no_slot_idle(make_core: MakeCore) -> None:
    """Four slots, eight requests of 2 to 9 tokens: who is done makes room at once.

    Static batching would hold each batch of four until its longest member is done.
    """
    lengths = [2, 9, 3, 4, 8, 2, 5, 3]
    core = make_core(max_num_seqs=4)
    driver = Driver(core)
    driver.add(*(new_request(key, 1, max_tokens=n) for key, n in enumerate(lengths)))
    num_steps = driver.run()
    used = sum(plan.num_reqs for plan in driver.plans)
    static_steps = max(lengths[:4]) + max(lengths[4:])
    assert used == sum(lengths) == 36
    assert (num_steps, 4 * num_steps - used) == (10, 4)
    assert (static_steps, 4 * static_steps - used) == (17, 32)
    # As long as anybody waits, all slots are used.
    is_waiting = [bool(plan.facts.passed_over) for plan in driver.plans]
    assert all(plan.num_reqs == 4 for plan, w in zip(driver.plans, is_waiting, strict=True) if w)
