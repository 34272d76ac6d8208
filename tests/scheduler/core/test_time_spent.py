from collections.abc import Callable

import pytest

from scheduler.core.explain import RequestExplanation
from scheduler.core.plan import WaitReason
from scheduler.core.scheduler import SchedulerCore
from scheduler.core.time_spent import Stage
from tests.scheduler.core.building import Driver, new_request

MakeCore = Callable[..., SchedulerCore]


class Ticking(Driver):
    """Planning happens a second after the last result, and a step takes a second."""

    def schedule(self):
        self.now += 1.0
        return super().schedule()

    def update(self, plan, tokens=None):
        self.now += 1.0
        return super().update(plan, tokens)


def told(core: SchedulerCore, name: str) -> RequestExplanation:
    explanation = core.explain(name)
    assert explanation is not None
    assert sum(explanation.spent_s.values()) == explanation.until - explanation.began
    return explanation


def test_a_request_waits_then_computes_its_prompt_then_decodes(make_core: MakeCore) -> None:
    core = make_core(max_num_seqs=1, max_num_batched_tokens=32)
    driver = Ticking(core)
    driver.add(new_request(0, max_tokens=3), new_request(1, 40, max_tokens=4))
    driver.run()
    assert told(core, "r0").spent_s == {
        Stage.NEXT_STEP: 1.0, Stage.PREFILL: 1.0, Stage.DECODE: 4.0,
    }  # fmt: skip
    assert told(core, "r1").spent_s == {
        Stage.NEXT_STEP: 1.0,
        WaitReason.SEQUENCE_SLOTS: 6.0,
        Stage.PREFILL: 3.0,
        Stage.DECODE: 6.0,
    }


def test_a_wait_behind_the_head_is_told_apart_from_a_wait_for_the_next_step(
    make_core: MakeCore,
) -> None:
    core = make_core(num_gpu_blocks=5)
    driver = Ticking(core)
    driver.add(new_request(0, 40), new_request(1, 40), new_request(2, 5))
    driver.steps(2)
    assert told(core, "r1").spent_s[WaitReason.BLOCKS] == 3.0
    assert told(core, "r2").spent_s == {WaitReason.BEHIND_HEAD: 4.0}


def test_a_preemption_lasts_until_the_next_token(make_core: MakeCore) -> None:
    """r1 is admitted again at once, and its 41 tokens take two steps."""
    core = make_core(max_num_batched_tokens=32)
    driver = Ticking(core)
    driver.add(new_request(1, 40, max_tokens=4))
    driver.steps(2)
    core.reset_prefix_cache(reset_running=True)
    driver.run()
    spent = told(core, "r1").spent_s
    assert spent[Stage.PREFILL] == 3.0
    assert spent[Stage.PREEMPTED] == 4.0
    assert spent[Stage.DECODE] == 4.0


@pytest.mark.parametrize("depth", [1, 2])
def test_a_pause_lasts_until_the_next_token(make_core: MakeCore, depth: int) -> None:
    core = make_core(pipeline_depth=depth)
    driver = Ticking(core)
    driver.add(new_request(0, 20, max_tokens=4))
    driver.steps(2)
    core.pause_request(0)
    driver.steps(3)
    assert told(core, "r0").spent_s[Stage.PAUSED] == 5.0
    core.continue_request(0)
    driver.run()
    assert told(core, "r0").spent_s[Stage.PAUSED] == 8.0


def test_what_follows_a_loss_is_recovery_until_the_next_token(make_core: MakeCore) -> None:
    core = make_core(max_num_seqs=1)
    driver = Ticking(core)
    driver.add(new_request(0, max_tokens=3), new_request(1, max_tokens=2, is_recovering=True))
    driver.run()
    assert told(core, "r1").spent_s == {Stage.RECOVERED: 8.0, Stage.DECODE: 2.0}


def test_a_live_request_is_told_up_to_now(make_core: MakeCore) -> None:
    core = make_core()
    driver = Ticking(core)
    driver.add(new_request(0))
    driver.step()
    explanation = core.explain("r0", 9.0)
    assert explanation is not None
    assert explanation.spent_s[Stage.DECODE] == 7.0
    assert [(e.time, e.duration_s) for e in explanation.events[-2:]] == [(1.0, 0.0), (1.0, 8.0)]
