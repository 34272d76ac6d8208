"""Fixtures of every scheduler test: cores that are looked through for leaks when the test ends."""

from collections.abc import Callable, Iterator

import pytest

from scheduler.core.plan import SchedulerConfig
from scheduler.core.scheduler import SchedulerCore
from tests.scheduler.core.building import scheduler_config


@pytest.fixture
def make_core() -> Iterator[Callable[..., SchedulerCore]]:
    """Builds cores from SchedulerConfig's fields; afterwards no block may be lost or held twice."""
    cores: list[SchedulerCore] = []

    def make(config: SchedulerConfig | None = None, **fields: object) -> SchedulerCore:
        core = SchedulerCore(config or scheduler_config(**fields))
        cores.append(core)
        return core

    yield make
    for core in cores:
        core.check_invariants()
        for key in list(core.state.requests):
            core.abort(key)
        core.check_invariants()
        assert core.num_free_blocks == core.config.num_gpu_blocks - 1, "blocks leaked"
        assert not core.state._deadlines, "deadlines leaked"
        assert core.num_running == core.num_waiting == 0, "requests leaked"
