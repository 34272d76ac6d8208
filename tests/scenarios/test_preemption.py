"""What happens when KV blocks run out, step by step."""

from collections.abc import Callable

from scheduler.core.plan import WaitReason
from scheduler.core.scheduler import SchedulerCore
from tests.scenarios.tables import Arrivals, named, play
from tests.scheduler.core.building import Driver

MakeCore = Callable[..., SchedulerCore]


def four_requests() -> Arrivals:
    """A, B, C are about to need their second block when D comes with a prompt of 4 blocks."""
    return {
        0: [
            named("A", 15, max_tokens=40),
            named("B", 14, max_tokens=40),
            named("C", 14, max_tokens=40),
        ],
        1: [named("D", 60, max_tokens=40)],
    }


def test_with_7_free_blocks_the_youngest_falls_by_its_own_need(make_core: MakeCore) -> None:
    """The three others get their blocks; D preempts itself when it needs its fifth.

    It waits until A and B are done, and by then nothing of it is cached; C, which fell later,
    finds 32 of its 49 tokens.
    """
    core = make_core(num_gpu_blocks=11, max_model_len=160, max_num_batched_tokens=512)
    driver = play(
        core,
        four_requests(),
        """
         step |  A   B       C   D  free
            0 | 15  14      14   .    7
            1 |  1   1       1  60    3
            2 |  1   1       1   1    2
          3-5 |  1   1       1   1    0
            6 |  1   1       1   x    4
         7-17 |  1   1       1   .    4
           18 |  1   1       1   .    3
        19-33 |  1   1       1   .    1
           34 |  1   1       1   .    0
           35 |  1   1       x   .    2
        36-39 |  1   1       .   .    2
           40 |  .   .  17(32)  65    1
        41-44 |  .   .       1   1    1
           45 |  .   .       .   1    5
        """,
    )
    (victim,) = driver.plans[6].facts.victims
    assert (victim.request_id, victim.trigger_id) == ("D", "D")
    assert (victim.num_needed_blocks, victim.num_lost_tokens) == (1, 64)


def test_with_6_free_blocks_the_youngest_falls_for_an_older_one(make_core: MakeCore) -> None:
    """C needs a block in step 3; D loses its four, and does not fit again while C holds one."""
    core = make_core(num_gpu_blocks=10, max_model_len=144, max_num_batched_tokens=512)
    driver = play(
        core,
        four_requests(),
        """
         step |  A   B       C   D  free
            0 | 15  14      14   .    6
            1 |  1   1       1  60    2
            2 |  1   1       1   1    1
            3 |  1   1       1   x    3
         4-17 |  1   1       1   .    3
           18 |  1   1       1   .    2
        19-33 |  1   1       1   .    0
           34 |  1   1       x   .    2
        35-39 |  1   1       .   .    1
           40 |  .   .  32(16)  62    2
        """,
    )
    (victim,) = driver.plans[3].facts.victims
    assert (victim.request_id, victim.trigger_id) == ("D", "C")
    assert victim.num_lost_tokens == 61
    (fact,) = driver.plans[4].facts.passed_over
    assert (fact.request_id, fact.reason) == ("D", WaitReason.BLOCKS)
    assert (fact.num_needed_blocks, fact.num_free_blocks) == (4, 3)
    driver.run()
    explanation = core.explain("D")
    assert explanation is not None
    assert (explanation.num_preemptions, explanation.num_recomputed_tokens) == (1, 61)


def test_several_fall_in_one_step_and_return_in_the_order_of_their_age(
    make_core: MakeCore,
) -> None:
    core = make_core(
        num_gpu_blocks=9,
        max_model_len=128,
        max_num_batched_tokens=256,
        long_prefill_token_threshold=32,
        max_num_seqs=16,
    )
    driver = play(
        core,
        {
            0: [
                named("A", 100, max_tokens=6),
                named("B", 10, max_tokens=12),
                named("C", 10, max_tokens=12),
            ],
            1: [named("D", 10, max_tokens=12)],
        },
        """
        step |  A   B   C   D  free
           0 | 32  10  10   .    4
           1 | 32   1   1  10    1
           2 | 32   1   1   x    0
           3 |  4   1   x   .    0
         4-6 |  1   1   .   .    0
           7 |  1   x   .   .    1
           8 |  1   .   .   .    1
        """,
    )
    assert [request.request_id for request in core.state.queues] == ["B", "C", "D"]
    driver.run()


def test_the_watermark_prevents_the_thrash(make_core: MakeCore) -> None:
    """Two decodes grow by a block every 4 steps; a third that takes the last block falls again.

    Kept back by the watermark, it waits, and nothing is computed twice.
    """

    def run(watermark: float) -> Driver:
        core = make_core(
            block_size=4,
            num_gpu_blocks=14,
            max_model_len=40,
            watermark=watermark,
            enable_prefix_caching=False,
        )
        driver = Driver(core)
        driver.add(named("A", 7, max_tokens=18), named("B", 7, max_tokens=18))
        driver.step()
        driver.add(named("C", 34, max_tokens=4))
        driver.run()
        return driver

    def lost(driver: Driver) -> int:
        return sum(v.num_lost_tokens for plan in driver.plans for v in plan.facts.victims)

    thrashing, calm = run(watermark=0.0), run(watermark=0.3)
    assert lost(thrashing) >= 34
    assert lost(calm) == 0
    reasons = {fact.reason for plan in calm.plans for fact in plan.facts.passed_over}
    assert WaitReason.WATERMARK in reasons


def test_prefix_hits_shorten_the_recomputation(make_core: MakeCore) -> None:
    """A victim's full blocks stay findable until somebody takes them: it computes only the rest."""
    core = make_core(num_gpu_blocks=9, max_model_len=128, max_num_batched_tokens=256)
    play(
        core,
        {0: [named("A", 46, max_tokens=4), named("B", 63, max_tokens=30)]},
        """
        step |  A      B  free
           0 | 46     63    1
           1 |  1      1    1
           2 |  1      1    0
           3 |  1      x    4
           4 |  .  2(64)    3
           5 |  .      1    3
        """,
    )
    explanation = core.explain("B")
    assert explanation is not None
    assert explanation.num_recomputed_tokens == 65
    assert [event.detail for event in explanation.events][-2:] == [
        "resumed with 64 tokens from the prefix cache",
        "computed 3 tokens",
    ]


def test_identical_prompts_in_one_step_share_their_blocks(make_core: MakeCore) -> None:
    """B hits what A is only about to compute, but for its last block; C and D hit what they can."""
    core = make_core(num_gpu_blocks=40, max_model_len=256, max_num_batched_tokens=512)
    a = named("A", 65)
    prompts = {"A": 64, "B": 64, "C": 65, "D": 32}
    requests = [
        named(name, 1, prompt_token_ids=a.prompt_token_ids[:length], max_tokens=3)
        for name, length in prompts.items()
    ]
    play(
        core,
        {0: requests},
        """
        step |  A       B      C       D  free
           0 | 64  16(48)  1(64)  16(16)    32
           1 |  1       1      1       1    29
        """,
    )
