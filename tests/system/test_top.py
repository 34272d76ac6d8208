"""`headrace top` before real services: by its keys, and in a terminal of 80 columns, 24 lines."""

import asyncio
import contextlib
import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable

import pytest

from headrace.cli.top.app import PoolScreen, RequestScreen, TopApp, WorkerScreen
from headrace.cli.top.state import View
from headrace.client import HeadraceClient, Sampling
from tests.headrace.tcp_proxy import TcpProxy
from tests.router.stack import running_stack
from tests.router.tiny_models import byte_level_model
from tests.scheduler.fake_gpuworker import FakeGpuWorker
from tests.scheduler.harness import running_scheduler

pytestmark = [pytest.mark.system, pytest.mark.timeout(120)]

LINES, COLUMNS = 24, 80
TENANT = "[acme]"  # not to be taken for markup
_ESCAPES = re.compile(rb"\x1b(\[[0-?]*[ -/]*[@-~]|[PX^_\]].*?(\x1b\\|\x07)|[ -/]*[0-~])", re.DOTALL)


@contextlib.asynccontextmanager
async def busy_services():
    """A client of services with two rows for four requests, which do not end by themselves."""
    worker = FakeGpuWorker(max_num_seqs=2, num_kv_blocks=2048, max_model_len=4096)
    worker.pace_s = 0.05
    await worker.start()
    async with running_scheduler([worker]) as scheduler:
        await scheduler.ready()
        async with (
            running_stack(schedulers=[scheduler], models={"fake": byte_level_model()}) as stack,
            HeadraceClient(stack.address) as client,
        ):

            def ask(name):
                sampling = Sampling(max_tokens=4000, ignore_eos=True)
                call = client.complete([21, 22], sampling=sampling, tenant=TENANT, request_id=name)
                asking.append(asyncio.create_task(call))

            asking = []
            ask("runs-0")
            ask("runs-1")
            await stack.until(lambda: stack.router.num_in_flight == 2)
            ask("waits-0")
            ask("waits-1")
            try:
                yield stack.address, client
            finally:
                await client.abort(tenant=TENANT)
                await asyncio.gather(*asking, return_exceptions=True)


def lines_of(app: TopApp) -> list[str]:
    """What the terminal shows."""
    strips = app.screen._compositor.render_strips()
    return ["".join(segment.text for segment in strip) for strip in strips]


async def shows(app: TopApp, pilot, what: Callable[[str], object]) -> str:
    """The picture, once it is as wanted."""
    text = ""
    try:
        while not what(text := "\n".join(lines_of(app))):
            await pilot.pause(0.05)
    except asyncio.CancelledError:
        print(text)  # pytest shows what was there instead
        raise
    return text


async def test_keys_lead_from_the_pool_to_a_worker_and_to_a_request():
    async with busy_services() as (_, client):
        view = View()
        view.take_pool(await client.pool(), time.monotonic())
        app = TopApp(client, view, 0.1)
        async with app.run_test(size=(COLUMNS, LINES)) as pilot:
            text = await shows(app, pilot, lambda t: "2/2" in t and "2 run" in t and "D..." in t)
            assert "by worker" in text
            assert all(len(line) == COLUMNS for line in lines_of(app))
            await pilot.press("s", "r")
            await shows(app, pilot, lambda t: "by running reversed" in t)
            await pilot.press("v")
            await shows(
                app, pilot, lambda t: "waits-1" in t and TENANT in t and "sequence slots" in t
            )
            await pilot.press("enter")
            await shows(app, pilot, lambda t: "BUDGET" in t and "runs-0" in t and "decode" in t)
            assert isinstance(app.screen, WorkerScreen)
            await pilot.press("enter")
            await shows(app, pilot, lambda t: "request runs-" in t and "prefill" in t)
            assert isinstance(app.screen, RequestScreen)
            await pilot.press("escape", "escape")
            assert isinstance(app.screen, PoolScreen)
            await pilot.press("tab", "enter")
            await shows(app, pilot, lambda t: "request waits-" in t and "wait " in t)
            await pilot.press("escape", "e", *"nobody", "enter")
            await shows(app, pilot, lambda t: "no scheduler has had 'nobody'" in t)
            await pilot.press("escape", "p")
            await shows(app, pilot, lambda t: "stands still" in t)


async def test_it_works_in_a_terminal_without_colour():
    async with busy_services() as (address, _), TcpProxy(address) as proxy:
        terminal = Terminal(proxy.address)
        await terminal.shows("2/2", "2 run", "BUDGET")
        await terminal.press("v")
        await terminal.shows("sequence slots")
        await proxy.refuse()
        await terminal.shows("trying again")
        await terminal.press("q")
        assert await terminal.end() == 0
        # The screen of before is back, with a cursor.
        assert b"\x1b[?1049l" in terminal.raw
        assert b"\x1b[?25h" in terminal.raw


class Terminal:
    """`headrace top` in a pseudo-terminal."""

    def __init__(self, address: str) -> None:
        self.raw = b""
        self._file, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "headrace", "top", "--server", address],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=os.environ | {"TERM": "xterm", "NO_COLOR": "1"},
            start_new_session=True,
        )
        os.close(theirs)

    async def shows(self, *texts: str) -> None:
        """Wait until all of these were written since the last call."""
        begin = len(self.raw)
        while not all(text.encode() in _ESCAPES.sub(b"", self.raw[begin:]) for text in texts):
            await self._read()

    async def press(self, key: str) -> None:
        os.write(self._file, key.encode())

    async def end(self) -> int:
        """The exit code, once the process has ended."""
        with contextlib.suppress(OSError):  # the other side is closed
            while True:
                await self._read()
        os.close(self._file)
        return await asyncio.to_thread(self._process.wait)

    async def _read(self) -> None:
        data = await asyncio.to_thread(os.read, self._file, 65536)
        if not data:
            raise OSError("the terminal is closed")
        self.raw += data
