"""Fixtures of every scheduler test."""

import pytest

from tests.scheduler.core.building import AuditedCore


@pytest.fixture(autouse=True)
def audits_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that are built in this process look through the book of KV blocks in each step."""
    monkeypatch.setattr("scheduler.build.SchedulerCore", AuditedCore)
