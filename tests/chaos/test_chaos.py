"""Short runs of the chaos harness: whatever is killed, each request ends and each token comes once.

`make chaos` runs the same for longer, with more clients and more kinds of disturbances.
"""

import asyncio

import pytest

from tests.chaos.cluster import Shape
from tests.chaos.run import Run, run
from tests.chaos.tally import Tally

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]
# So that a run that does not end says what it waits for, long before the test's own limit.
BOUNDS = {"request_s": 120.0, "patience_s": 60.0, "tail_s": 300.0}


def violations_of(plan: Run, folder) -> tuple[list[str], Tally]:
    tally = Tally()
    asyncio.run(run(plan, folder, tally))
    return tally.violations, tally


def test_whatever_is_killed_every_client_gets_every_token_once(tmp_path):
    kills = {"kill_router": 3, "kill_scheduler": 2, "kill_worker": 3, "power_cut": 1}
    cuts = {"refuse": 1, "reset": 1, "stop": 1}
    plan = Run(seed=1, run_s=12, num_clients=6, interval_s=1.5, weights=kills | cuts, **BOUNDS)
    violations, tally = violations_of(plan, tmp_path)
    assert not violations
    assert tally.num_sigkills
    assert tally.requests


@pytest.mark.parametrize(
    ("broken", "does", "says"),
    [
        ("position", "leave", "instead"),
        ("journal", "reread", "other tokens than undisturbed"),
        ("fencing", "read", "ended as FINISH_REASON_ABORTED"),
    ],
)
def test_the_checker_sees_what_is_broken_on_purpose(tmp_path, broken, does, says):
    plan = Run(
        seed=1,
        run_s=60,
        num_clients=6,
        interval_s=1.0,
        weights={"refuse": 1},
        behaviours=frozenset({does}),
        ends_at_violation=True,
        **(BOUNDS | {"patience_s": 2.0}),
        shape=Shape(
            wrapper=("tests.chaos.broken", broken),
            scheduler_of={"w0": "s0"},
            scheduler_flags=("--orphan-ttl-s", "1"),
        ),
    )
    violations, _ = violations_of(plan, tmp_path)
    assert any(says in violation for violation in violations), violations
