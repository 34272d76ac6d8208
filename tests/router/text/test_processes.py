"""Children that work on texts: bounded, replaced when they die, gone when the router is."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys

import psutil
import pytest

from router.text.child import Task
from router.text.errors import TextProcessError
from router.text.jobs import Done, Encode, JobFailed, Prepare, Refused, Render
from router.text.processes import TextProcesses
from tests.router.text import hostile
from tests.router.tiny_models import byte_level_model


@pytest.fixture
def processes():
    with running({"m": byte_level_model()}) as processes:
        yield processes


@contextlib.contextmanager
def running(models):
    others = set(psutil.Process().children(recursive=True))
    processes = TextProcesses(models)
    try:
        yield processes
    finally:
        processes.close()
        assert set(psutil.Process().children(recursive=True)) <= others


def server_of(processes):
    return psutil.Process(processes._pid)


def living_children(server):
    """Process ids. A dead child may stay unreaped until the fork server hears of the next one."""
    pids = set()
    for process in server.children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                pids.add(process.pid)
    return pids


def task(job, cpu_s=5.0, memory_bytes=200 << 20):
    return Task(job, cpu_s=cpu_s, memory_bytes=memory_bytes)


def encode(text="hello"):
    return task(Encode(model="m", text=text, add_special_tokens=False))


def render(content="boom", **limits):
    messages = [{"role": "user", "content": content}]
    return task(Render(model="m", messages=messages, add_generation_prompt=True), **limits)


async def test_a_child_does_one_job_after_the_other(processes):
    child = await processes.start()
    for text in ("hello", "w" * 1_000_000):
        answer = await child.call(encode(text))
        model = byte_level_model().tokenizer
        assert answer == Done(model.encode(text, add_special_tokens=False).tobytes())


async def test_what_takes_too_long_is_ended_and_a_new_child_is_as_good():
    with running({"m": hostile.model_with_template(hostile.template("nested loops"))}) as processes:
        child = await processes.start()
        with pytest.raises(TextProcessError):
            await child.call(render(cpu_s=0.2))
        child = await processes.start()
        assert isinstance(await child.call(render("hi")), Done)


@pytest.mark.parametrize("name", ["memory", "doubling"])
async def test_what_takes_too_much_memory_is_refused_by_its_own_error(name):
    with running({"m": hostile.model_with_template(hostile.template(name))}) as processes:
        child = await processes.start()
        answer = await child.call(render())
        assert isinstance(answer, Refused)
        assert "MemoryError" in answer.message
        assert isinstance(await child.call(render("hi")), Done)


async def test_a_panic_is_an_answer():
    with running({"m": hostile.model_with_pattern("(a+)+$")}) as processes:
        child = await processes.start()
        answer = await child.call(encode("a" * 60 + "b"))
        assert isinstance(answer, JobFailed)
        assert "PanicException" in answer.message
        assert isinstance(await child.call(encode()), Done)


async def test_a_broken_template_is_told():
    with running({"m": hostile.model_with_template("{% for %}")}) as processes:
        answer = await (await processes.start()).call(task(Prepare(model="m")))
        assert isinstance(answer, Refused)
        assert "chat template is broken" in answer.message


async def test_a_call_that_is_cancelled_ends_its_child():
    with running({"m": hostile.model_with_template(hostile.template("nested loops"))}) as processes:
        child = await processes.start()
        server = server_of(processes)
        calling = asyncio.create_task(child.call(render(cpu_s=60.0)))
        await asyncio.sleep(0)
        calling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await calling
        while living_children(server):  # noqa: ASYNC110 processes set no event
            await asyncio.sleep(0.01)


async def test_starts_that_are_cancelled_leave_no_process(processes):
    child = await processes.start()
    server = server_of(processes)
    for _ in range(20):
        starting = asyncio.create_task(processes.start())
        await asyncio.sleep(0)
        starting.cancel()
    # Forks happen in their order: by now all of those have.
    last = await processes.start()
    while living_children(server) != {child._pid, last._pid}:  # noqa: ASYNC110 processes set no event
        await asyncio.sleep(0.01)
    assert isinstance(await child.call(encode()), Done)


async def test_a_child_that_died_idle_is_known_to_be_dead(processes):
    child = await processes.start()
    assert child.is_alive()
    server = server_of(processes)
    [process] = server.children()
    process.kill()
    psutil.wait_procs([process], timeout=30)
    assert not child.is_alive()


async def test_the_fork_server_is_started_again_when_it_has_died(processes):
    child = await processes.start()
    server = server_of(processes)
    server.kill()
    with pytest.raises(TextProcessError):
        while True:
            await child.call(encode())
    child = await processes.start()
    assert isinstance(await child.call(encode()), Done)


async def test_a_child_lives_through_the_signals_of_the_process_group(processes):
    child = await processes.start()
    server = server_of(processes)
    for process in (server, *server.children()):
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGTERM)
    assert isinstance(await child.call(encode()), Done)
    assert isinstance(await (await processes.start()).call(encode()), Done)


PROGRAM = """
import asyncio, sys
from router.text.processes import TextProcesses
from tests.router.tiny_models import byte_level_model
from tests.router.text.test_processes import render
from tests.router.text import hostile

processes = TextProcesses({"m": hostile.model_with_template(hostile.template("nested loops"))})
if sys.argv[1] == "fork":
    processes.fork()

async def main():
    child = await processes.start()
    print("ready", flush=True)
    await child.call(render(cpu_s=600.0))

asyncio.run(main())
"""


@pytest.mark.system
@pytest.mark.parametrize("how", ["fork", "program"])
def test_nothing_outlives_a_router_that_is_killed(how):
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, how],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    ) as process:
        assert process.stdout.readline() == b"ready\n"
        left = psutil.Process(process.pid).children(recursive=True)
        assert len(left) == 2
        process.kill()
        _, alive = psutil.wait_procs(left, timeout=30)
        assert not alive
