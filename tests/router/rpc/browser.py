"""A real headless Chromium, driven over its DevTools protocol; nothing but aiohttp is needed."""

import asyncio
import base64
import contextlib
import itertools
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import aiohttp

_NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
PATIENCE_S = 40.0


def find_browser() -> str | None:
    """The path of a browser; HEADRACE_BROWSER names one."""
    named = os.environ.get("HEADRACE_BROWSER")
    return named or next(filter(None, map(shutil.which, _NAMES)), None)


class Page:
    """One page. `errors` has what the page's console and the browser complained of."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse, session_id: str) -> None:
        self._socket, self._session_id = socket, session_id
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self.errors: list[str] = []
        self.requests: list[str] = []
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for message in self._socket:
            found = message.json()
            if (number := found.get("id")) in self._waiting:
                answer = self._waiting.pop(number)
                if not answer.done():
                    answer.set_result(found)
                continue
            params = found.get("params", {})
            match found.get("method"):
                case "Runtime.exceptionThrown":
                    self.errors.append(str(params["exceptionDetails"]))
                case "Log.entryAdded":
                    self.errors.append(params["entry"]["text"])
                case "Runtime.consoleAPICalled" if params["type"] in {"error", "warning"}:
                    self.errors.append(str(params["args"]))
                case "Network.requestWillBeSent":
                    self.requests.append(params["request"]["url"])

    async def send(self, method: str, **params: Any) -> Any:
        """One command of the protocol, and its result."""
        number = next(self._numbers)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        message = {"id": number, "method": method, "params": params, "sessionId": self._session_id}
        await self._socket.send_json(message)
        found = await asyncio.wait_for(answer, PATIENCE_S)
        if "error" in found:
            raise RuntimeError(f"{method}: {found['error']}")
        return found["result"]

    async def js(self, expression: str) -> Any:
        """The value of an expression, awaited if it is a promise."""
        found = await self.send(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in found:
            raise RuntimeError(f"{expression}: {found['exceptionDetails']}")
        return found["result"].get("value")

    async def until(self, expression: str) -> None:
        """Wait until an expression is true."""
        async with asyncio.timeout(PATIENCE_S):
            while not (await self.js(f"Boolean({expression})")):  # noqa: ASYNC110 it is in another process
                await asyncio.sleep(0.05)

    async def open(self, url: str) -> None:
        """Go to a page."""
        await self.send("Page.navigate", url=url)
        await self.until(f"location.href.startsWith({url!r}) && document.readyState === 'complete'")

    async def key(self, key: str, *, shift: bool = False) -> None:
        """Press a key."""
        codes = {"Tab": 9, "Enter": 13, "Escape": 27, "ArrowDown": 40, "ArrowLeft": 37, "End": 35}
        text = {"Enter": "\r"}.get(key, key if len(key) == 1 else "")
        event = {"key": key, "windowsVirtualKeyCode": codes.get(key, 0), "modifiers": 8 * shift}
        event["code"] = key
        kind = "keyDown" if text else "rawKeyDown"
        await self.send("Input.dispatchKeyEvent", type=kind, text=text, **event)
        await self.send("Input.dispatchKeyEvent", type="keyUp", **event)

    async def resize(self, width: int, height: int) -> None:
        """The size of the window."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        await self.send("Emulation.setDeviceMetricsOverride", **size)

    async def heap_bytes(self) -> int:
        """The heap that is in use after a collection."""
        await self.send("HeapProfiler.collectGarbage")
        found = await self.send("Runtime.getHeapUsage")
        return int(found["usedSize"])

    async def picture(self, file: Path) -> None:
        """Write the whole page as PNG."""
        found = await self.send("Page.captureScreenshot", captureBeyondViewport=True)
        await asyncio.to_thread(file.write_bytes, base64.b64decode(found["data"]))


@contextlib.asynccontextmanager
async def browser_page(browser: str, folder: Path):
    """A page of a new browser with a profile of its own in the folder."""
    process = await asyncio.create_subprocess_exec(
        *(browser, "--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0"),
        *("--no-first-run", "--disable-background-networking", "--disable-dev-shm-usage"),
        *(f"--user-data-dir={folder}", "about:blank"),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        port_file = folder / "DevToolsActivePort"
        async with asyncio.timeout(PATIENCE_S):
            while not (port_file.exists() and len(port_file.read_text().split()) == 2):
                assert process.returncode is None, "the browser has ended"
                await asyncio.sleep(0.05)
        port, path = port_file.read_text().split()
        async with (
            aiohttp.ClientSession() as session,
            session.ws_connect(f"ws://127.0.0.1:{port}{path}", max_msg_size=0) as socket,
        ):
            yield await _page(socket)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


async def _page(socket: aiohttp.ClientWebSocketResponse) -> Page:
    async def ask(number: int, method: str, **params: Any) -> Any:
        await socket.send_json({"id": number, "method": method, "params": params})
        while (found := await socket.receive_json()).get("id") != number:
            pass
        return found["result"]

    target = await ask(1, "Target.createTarget", url="about:blank")
    attached = await ask(2, "Target.attachToTarget", targetId=target["targetId"], flatten=True)
    page = Page(socket, attached["sessionId"])
    page._numbers = itertools.count(3)
    for domain in ("Page", "Runtime", "Log", "Network"):
        await page.send(f"{domain}.enable")
    return page
