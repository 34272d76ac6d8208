"""Reads and plays scheduling tables: a row per step, a column per request.

A cell is the number of tokens that the request advances, `.` for none, `x` when it is preempted;
`16(48)` is an admission of 16 tokens behind 48 from the prefix cache. `free` is the number of free
blocks after the step was planned. `3-7` stands for several equal steps.
"""

from collections.abc import Mapping
from typing import Any

from scheduler.core.plan import NewRequest, StepPlan
from scheduler.core.scheduler import SchedulerCore
from tests.scheduler.core.building import Driver, new_request

Arrivals = Mapping[int, list[NewRequest]]


def named(name: str, num_prompt_tokens: int, **fields: Any) -> NewRequest:
    """A request with a name; its key is its place in the alphabet, which is its age."""
    key = ord(name) - ord("A")
    return new_request(key, num_prompt_tokens, request_id=name, **fields)


def play(
    core: SchedulerCore,
    arrivals: Arrivals,
    table: str,
    sampled: Mapping[str, list[int]] | None = None,
) -> Driver:
    """Run the steps of a table, with requests arriving before theirs, and compare every cell.

    Args:
        sampled: tokens that a request gets at once, if not one.
    """
    driver = Driver(core)
    lines = [line.replace("|", " ").split() for line in table.strip().splitlines()]
    names = lines[0][1:]
    played: list[list[str]] = []
    for step, cells in _rows(lines[1:]):
        driver.add(*arrivals.get(step, ()))
        plan = driver.schedule()
        played.append([str(step), *_cells(driver, plan, names)])
        assert played[-1] == [str(step), *cells], _message(names, played, cells)
        driver.update(plan, dict(sampled or {}))
    return driver


def _rows(lines: list[list[str]]) -> list[tuple[int, list[str]]]:
    rows = []
    for label, *cells in lines:
        first, _, last = label.partition("-")
        rows += [(step, cells) for step in range(int(first), int(last or first) + 1)]
    assert [step for step, _ in rows] == list(range(len(rows))), "steps are missing"
    return rows


def _cells(driver: Driver, plan: StepPlan, names: list[str]) -> list[str]:
    scheduled = driver.scheduled(plan)
    cached = {one.request_id: one.num_cached_tokens for one in plan.admissions}
    preempted = {victim.request_id for victim in plan.facts.victims}
    cells = []
    for name in names:
        if name == "free":
            cells.append(str(driver.core.num_free_blocks))
        elif name in preempted:
            cells.append("x")
        elif name not in scheduled:
            cells.append(".")
        else:
            behind = f"({cached[name]})" if cached.get(name) else ""
            cells.append(f"{scheduled[name]}{behind}")
    return cells


def _message(names: list[str], played: list[list[str]], expected: list[str]) -> str:
    lines = [["step", *names], *played, ["expected:", *expected]]
    return "\n" + "\n".join("  ".join(f"{cell:>6}" for cell in line) for line in lines)
