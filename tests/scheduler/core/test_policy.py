"""A policy is one object; the core asks it, and nothing else, for an order."""

from collections.abc import Callable

import pytest

from scheduler.core.policy import POLICIES, Priority, policy_name
from scheduler.core.request import Request
from scheduler.core.scheduler import SchedulerCore
from tests.scheduler.core.building import Driver, new_request

MakeCore = Callable[..., SchedulerCore]


class ShortestPromptFirst(Priority):
    """A policy that nobody else knows: few prompt tokens are urgent."""

    name = "shortest"

    def rank(self, request: Request, _place: int, /) -> tuple[int, int]:
        return (request.num_prompt_tokens, request.key)

    def may_displace(self, waiting: Request, running: Request, /) -> bool:
        return self.rank(waiting, 0) < self.rank(running, 0)


@pytest.fixture
def _shortest(monkeypatch: pytest.MonkeyPatch) -> None:
    added = {**POLICIES, "shortest": ShortestPromptFirst(displaces=True)}
    monkeypatch.setattr("scheduler.core.state.POLICIES", added)


@pytest.mark.usefixtures("_shortest")
def test_a_new_policy_is_one_class(make_core: MakeCore) -> None:
    driver = Driver(make_core(policy="shortest", max_num_seqs=1))
    driver.add(*(new_request(key, 40 - key) for key in range(3)))
    driver.step()
    assert [admission.key for admission in driver.plans[0].admissions] == [2]
    driver.add(new_request(9, 5))
    plan = driver.step()
    assert [victim.key for victim in plan.facts.victims] == [2]
    driver.run()
    ended = [one.key for output in driver.outputs for one in output.finished]
    assert ended == [9, 2, 1, 0]


def test_names_and_displacement_make_a_policy() -> None:
    assert policy_name("fcfs", displaces=True) == "fcfs"
    assert policy_name("priority", displaces=False) == "priority"
    assert policy_name("priority", displaces=True) == "preemptive_priority"
    assert [POLICIES[name].displaces for name in POLICIES] == [False, False, True]
