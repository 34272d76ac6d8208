"""Fixtures of every scheduler test: cores that are looked through for leaks when the test ends."""

from collections.abc import Callable, Iterator

import pytest

from scheduler.core.plan import SchedulerConfig
from scheduler.core.scheduler import SchedulerCore
from tests.scheduler.core.building import AuditedCore, check_book, scheduler_config


@pytest.fixture
def make_core() -> Iterator[Callable[..., SchedulerCore]]:
    """Builds cores from SchedulerConfig's fields; no step may lose a block or own it twice."""
    cores: list[SchedulerCore] = []

    def make(config: SchedulerConfig | None = None, **fields: object) -> SchedulerCore:
        core = AuditedCore(config or scheduler_config(**fields))
        cores.append(core)
        return core

    yield make
    for core in cores:
        check_book(core)
        for key in list(core.state.requests):
            core.abort(key)
        assert core.num_free_blocks == core.config.num_gpu_blocks - 1, "blocks leaked"
        assert not core.state._deadlines, "deadlines leaked"
        assert core.num_running == core.num_waiting == 0, "requests leaked"
