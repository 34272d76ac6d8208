"""Starting and stopping real processes; the services are stand-ins, the store is real."""

import asyncio
import os
import re
import signal
import sys
from pathlib import Path

import psutil
import pytest

from headrace import local
from headrace.client import HeadraceClient
from headrace.local import LocalConfig, LocalError, Restarts, local_pool
from headrace.service.private_dir import private_dir
from tests.headrace.waiting import eventually, until

pytestmark = pytest.mark.system

NAMES = ("gpuworker", "scheduler", "router")


def config(**changed):
    return LocalConfig(
        model_path=Path("m.gguf"),
        model_name="fake",
        programs={n: (sys.executable, "-m", "tests.headrace.fake_service", n) for n in NAMES},
        **changed,
    )


@pytest.fixture
def lines():
    return []


@pytest.fixture(autouse=True)
def nothing_is_left():
    before = set(psutil.Process().children(recursive=True))
    yield
    left = set(psutil.Process().children(recursive=True)) - before
    assert not left


async def test_services_find_each_other_and_the_model_answers(lines):
    told = []
    async with local_pool(config(), tell=told.append, log=lines.append) as pool:
        async with HeadraceClient(pool.address) as client:
            assert (await client.complete("hi")).text == "hi"
        assert [child.name for child in pool.children] == ["gpuworker", "scheduler", "router"]
        text = "\n".join(lines)
    assert told == ["starting the status store", "loading fake", "reading the weights: 1 of 2"]
    assert "reading the weights" not in text
    assert re.search(r"\[scheduler\] pid .* --worker unix:/\S+/gpuworker\.sock", text)
    assert re.search(r"\[router\] pid .* --scheduler unix:/\S+/scheduler\.sock", text)
    assert re.search(r"\[router\] store unix:///.*password=", text)
    assert "password" not in "".join(line for line in lines if "pid" in line)


async def test_they_stop_in_reverse_order(lines):
    async with local_pool(config(store_url=""), log=lines.append):
        pass
    drained = [line for line in lines if "draining" in line]
    assert drained == ["[router] draining", "[scheduler] draining", "[gpuworker] draining"]


async def test_readiness_waits_for_the_model_and_not_only_for_the_port(lines, monkeypatch):
    monkeypatch.setenv("FAKE_ROUTER", "late")
    async with (
        local_pool(config(store_url=""), log=lines.append) as pool,
        HeadraceClient(pool.address) as client,
    ):
        assert await client.models()


async def test_several_workers_are_all_given_to_the_scheduler(lines, monkeypatch):
    monkeypatch.setenv("FAKE_READY_WORKERS", "2")
    told = []
    two = config(store_url="", num_workers=2, worker_flags=["--extra", "1"])
    async with local_pool(two, tell=told.append, log=lines.append):
        pass
    assert "loading fake on 2 workers" in told
    text = "\n".join(lines)
    assert re.search(r"\[gpuworker-0\] pid .* --worker-id worker-0 --extra 1", text)
    assert re.search(r"\[gpuworker-1\] pid .* --worker-id worker-1 --extra 1", text)
    assert re.search(r"\[scheduler\] pid .* --worker \S+ --worker ", text)


@pytest.mark.parametrize("name", NAMES)
async def test_a_service_that_does_not_start_says_why_and_the_others_go(monkeypatch, lines, name):
    monkeypatch.setenv(f"FAKE_{name.upper()}", "crash")
    with pytest.raises(LocalError, match=rf"{name} ended \(1\);.*\n.*\n.*\n.*out of memory, or so"):
        async with local_pool(config(store_url=""), log=lines.append):
            pytest.fail("started")


def pid_of(lines, name):
    """The process id that a service said last."""
    return [int(n) for line in lines for n in re.findall(rf"\[{name}\] pid (\d+)", line)][-1]


@pytest.mark.parametrize("name", NAMES)
async def test_a_service_that_is_killed_is_started_again_at_its_address(lines, name):
    async with (
        local_pool(config(store_url=""), log=lines.append) as pool,
        HeadraceClient(pool.address) as client,
    ):
        ids = {child.name: child.process.pid for child in pool.children}
        first = pid_of(lines, name)
        os.kill(first, signal.SIGKILL)
        await until(lambda: any(line.startswith(f"{name} is back after") for line in lines))
        assert f"{name} was killed by SIGKILL; starting it again" in lines
        assert pid_of(lines, name) != first
        now = {child.name: child.process.pid for child in pool.children}
        assert {other for other in NAMES if now[other] != ids[other]} == {name}
        assert (await client.complete("hi")).text == "hi", "the router's port is what it was"


async def test_a_service_that_ends_by_itself_is_started_again_too(lines):
    async with local_pool(config(store_url=""), log=lines.append):
        os.kill(pid_of(lines, "scheduler"), signal.SIGTERM)
        await until(lambda: any(line.startswith("scheduler is back after") for line in lines))
    assert "scheduler ended (0); starting it again" in lines


@pytest.mark.parametrize("name", NAMES)
async def test_stopping_while_a_service_is_dead_leaves_nothing(lines, name):
    slow = Restarts(first_backoff_s=1e6)
    async with local_pool(config(store_url="", restarts=slow), log=lines.append):
        os.kill(pid_of(lines, name), signal.SIGKILL)
        await until(lambda: f"{name} was killed by SIGKILL; starting it again" in lines)
    drained = {line for line in lines if "draining" in line}
    assert drained == {f"[{other}] draining" for other in NAMES if other != name}


async def test_a_service_that_keeps_dying_is_given_up_with_the_reason(lines):
    restarts = Restarts(max_num_deaths=3, well_after_s=1e6)
    async with local_pool(config(store_url="", restarts=restarts), log=lines.append) as pool:
        failed = asyncio.create_task(pool.wait_failed())
        for number in range(1, 4):
            await until(lambda n=number: len(re.findall(r"\[gpuworker\] pid", str(lines))) == n)
            os.kill(pid_of(lines, "gpuworker"), signal.SIGKILL)
        error = await failed
    assert error.summary == (
        "gpuworker was killed by SIGKILL; started 3 times, it always ended within 1e+06 s"
    )
    assert lines.count("gpuworker was killed by SIGKILL; starting it again") == 2


async def test_a_service_that_was_well_in_between_is_not_given_up(lines):
    restarts = Restarts(max_num_deaths=2, well_after_s=0)
    async with local_pool(config(store_url="", restarts=restarts), log=lines.append):
        for number in range(1, 4):
            await until(lambda n=number: len(re.findall(r"\[gpuworker\] pid", str(lines))) == n)
            os.kill(pid_of(lines, "gpuworker"), signal.SIGKILL)
        await until(lambda: len(re.findall(r"\[gpuworker\] pid", str(lines))) == 4)


async def test_a_service_that_ignores_sigterm_is_killed(monkeypatch, lines):
    monkeypatch.setenv("FAKE_SCHEDULER", "stubborn")
    monkeypatch.setattr(local, "_STOP_SLACK_S", 0.2)
    async with local_pool(config(store_url="", drain_timeout_s=0.1), log=lines.append):
        pass
    assert "[scheduler] does not stop, killing it" in lines


async def test_an_embedded_store_keeps_its_data_where_it_is_told(lines, tmp_path):
    async with local_pool(config(data_dir=tmp_path / "data"), log=lines.append):
        assert (tmp_path / "data").is_dir()
    assert (tmp_path / "data" / "appendonlydir").is_dir()


async def test_with_a_router_that_cannot_be_asked_its_port_is_enough(lines):
    async with local_pool(config(store_url="", channel=None)) as pool:
        assert pool.address


PARENT = """
import asyncio
from tests.headrace import test_local

async def main():
    async with test_local.local_pool(test_local.config(), log=lambda line: print(line, flush=True)):
        print("READY", flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


async def test_kill_of_the_parent_leaves_no_process_and_no_folder():
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PARENT, stdout=asyncio.subprocess.PIPE
    )
    assert parent.stdout is not None
    said = ""
    while "READY" not in said:
        said += (await parent.stdout.readline()).decode()
    folder = re.search(r"unix://(\S+)/store\.sock", said).group(1)
    children = psutil.Process(parent.pid).children(recursive=True)
    assert len(children) == 4
    parent.kill()
    await parent.wait()

    async def all_gone():
        return not [c for c in children if c.is_running() and c.status() != "zombie"]

    await eventually(all_gone)
    with private_dir() as another:
        assert folder not in map(str, another.parent.iterdir()), "the next start clears up"
