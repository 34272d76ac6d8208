"""The console: who may read what, and the page in a real browser over a large pool."""

import asyncio
import contextlib
import json
import re
from importlib.resources import files

import aiohttp
import pytest
from yarl import URL

from headrace.client import HeadraceClient
from headrace.service.admin import AdminConfig, AdminServer
from headrace.service.keys import make_key, section, watch_keys
from router.rpc.console import Console
from router.rpc.inference import InferenceService
from scheduler.replay.recorder import Recorder
from scheduler.replay.trace import header
from tests.router.fake_scheduler import FakeScheduler
from tests.router.rpc.browser import browser_page, find_browser
from tests.router.rpc.busy_scheduler import BusyScheduler
from tests.router.stack import running_stack
from tests.scheduler.core.building import Driver, new_request, scheduler_config

MAX_BYTES = 150_000
ASSETS = {file.name: file.read_bytes() for file in (files("router") / "console").iterdir()}
# An element more than these for each row of two lists would be an element for each request.
MAX_ELEMENTS = 1000

needs_browser = pytest.mark.skipif(
    find_browser() is None, reason="no Chromium: install chromium-headless-shell"
)


@contextlib.asynccontextmanager
async def console(scheduler, keys=None, **admin):
    """A router with an admin port; gives its URL and the router's stack."""
    async with running_stack(scheduler=scheduler) as stack:
        page = Console(InferenceService(stack.services), keys)
        config = AdminConfig(**{"listen": "127.0.0.1:0"} | admin)
        server = AdminServer(config, list, lambda: True, page)
        url = await server.start()
        try:
            async with asyncio.timeout(90):
                yield url, stack, server
        finally:
            await server.stop()


@contextlib.asynccontextmanager
async def browsing(tmp_path, scheduler, **admin):
    """The page of a console, open in a browser."""
    async with (
        console(scheduler, **admin) as (url, stack, server),
        browser_page(find_browser(), tmp_path / "profile") as page,
    ):
        await page.resize(1440, 1000)
        await page.open(f"{url}/")
        yield page, url, stack, server


@pytest.fixture
def recording(tmp_path):
    """A file as `--record` writes it, of a run with preemptions."""
    file = tmp_path / "run.jsonl"
    config = scheduler_config(num_gpu_blocks=12)
    with file.open("w") as lines:
        write = lambda record: lines.write(json.dumps(record) + "\n")  # noqa: E731
        write(header(config, "run"))
        recorder = Recorder(config, write)
        driver = Driver(recorder)
        driver.add(*(new_request(key, 40) for key in range(1, 5)))
        driver.steps(30)
        recorder.end_step()
    return file


def test_the_page_is_small_and_names_no_other_place():
    assert sum(map(len, ASSETS.values())) <= MAX_BYTES
    for name, data in ASSETS.items():
        text = data.decode().replace('xmlns="http://www.w3.org/2000/svg"', "")
        assert not re.search(r"(https?:)?//[a-z]+\.", text), name
        assert "style=" not in text, f"{name}: the policy forbids it"


async def test_files_are_for_everybody_with_a_strict_policy_and_data_for_the_token(tmp_path):
    file = tmp_path / "token"
    file.write_text("secret\n")
    async with (
        console(FakeScheduler(), auth_token_file=str(file)) as (url, _, _),
        aiohttp.ClientSession(url) as session,
    ):
        for name, data in ASSETS.items():
            path = "/" if name == "index.html" else f"/console/{name}"
            async with session.get(path) as answer:
                assert (answer.status, await answer.read()) == (200, data)
                policy = answer.headers["content-security-policy"]
                assert policy.startswith("default-src 'none'; script-src 'self';")
                assert "unsafe" not in policy
        for path in ("/api/pool", "/api/queue", "/api/explain", "/api/batch", "/metrics"):
            async with session.get(path) as answer:
                assert answer.status == 401, path
        async with session.post("/api/steps", json={}) as answer:
            assert answer.status == 401
        mine = {"authorization": "Bearer secret"}
        async with session.get("/api/pool", headers=mine) as answer:
            assert len((await answer.json())["workers"]) == 1
        async with session.get("/api/batch?worker_id=w&position=7", headers=mine) as answer:
            assert (answer.status, "no scheduler keeps" in await answer.text()) == (404, True)
        # Another site's page can send no JSON without asking first, and nobody answers it.
        async with session.post("/api/steps", data="{}", headers=mine) as answer:
            assert answer.status == 415
        for wrong in (
            {"history_s": "x"},
            {"history_s": 1e9},
            {"after": {"w": -1}},
            {"after": 1},
            [],
        ):
            async with session.post("/api/steps", json=wrong, headers=mine) as answer:
                assert answer.status == 400, wrong
        for wrong in (
            "batch?worker_id=%ff&position=1",
            "batch?worker_id=",
            "explain?request_id=%ff",
        ):
            async with session.get(URL(f"/api/{wrong}", encoded=True), headers=mine) as answer:
                assert answer.status in {400, 404}, wrong
        for wrong in ("limit=1001", "offset=10001", "offset=99999999999999999999&limit=1001"):
            async with session.get(f"/api/queue?{wrong}", headers=mine) as answer:
                assert answer.status == 400, wrong


async def test_where_the_public_port_wants_keys_the_console_wants_an_administrators(tmp_path):
    secrets = {name: make_key() for name in ("acme", "root")}
    file = tmp_path / "keys.toml"
    tenants = {"acme": "acme", "root": ""}
    file.write_text("".join(section(n, secrets[n], tenants[n], None) for n in secrets))
    async with (
        console(FakeScheduler(), keys=watch_keys("", str(file))) as (url, _, _),
        aiohttp.ClientSession(url) as session,
    ):
        for secret, status in ((None, 401), (secrets["acme"], 401), (secrets["root"], 200)):
            headers = {"authorization": f"Bearer {secret}"} if secret else {}
            async with session.get("/api/pool", headers=headers) as answer:
                assert answer.status == status
        async with session.get("/metrics") as answer:
            assert answer.status == 200


async def test_what_the_api_says_is_what_the_rpc_says():
    scheduler = BusyScheduler(2, 30)
    scheduler.make_steps(5, 0.02)
    async with (
        console(scheduler) as (url, stack, _),
        aiohttp.ClientSession(url) as session,
        HeadraceClient(stack.address) as client,
    ):
        async with contextlib.aclosing(client.watch_steps(history_s=60)) as news:
            rpc = {
                worker.worker_id: worker.steps async for batch in _first(news) for worker in batch
            }
        async with session.post("/api/steps", json={"history_s": 60}) as answer:
            fields = json.loads(await answer.content.readline())["fields"]
            http = {}
            while len(http) < 2:
                for worker in json.loads(await answer.content.readline()):
                    http[worker["worker_id"]] = worker["steps"]
        for worker_id, steps in rpc.items():
            said = [[getattr(step, name) for name in fields] for step in steps]
            assert said == http[worker_id]
        page = await client.queue(offset=3, limit=5)
        async with session.get("/api/queue?offset=3&limit=5") as answer:
            found = await answer.json()
        assert [r.request_id for r in page.requests] == [r["request_id"] for r in found["requests"]]
        assert [r.reason for r in page.requests] == [r["reason"] for r in found["requests"]]
        assert found["num_waiting"] == page.num_waiting == 30


async def _first(news):
    """The first message that has something."""
    async for batch in news:
        if batch:
            yield batch
            return


@needs_browser
async def test_a_large_pool_is_shown_truly_in_few_elements_and_with_no_leak(tmp_path):
    scheduler = BusyScheduler(200, 10_000)
    scheduler.make_steps(40, 0.25)
    async with browsing(tmp_path, scheduler) as (page, url, _, _):
        await page.until("headrace.state.store.rings.size === 200 && headrace.state.queue.total")
        await page.until("document.querySelector('#queue [aria-rowindex=\"2\"]')")
        shown = await page.js("document.getElementById('queue').innerText")
        assert "request-0" in shown
        assert "blocks: needs 12, 7 free" in shown
        assert "200 of 200" in await page.js("document.getElementById('figures').innerText")
        step = scheduler.steps["worker-007"][-1]
        ring = "headrace.state.store.rings.get('worker-007')"
        assert await page.js(f"{ring}.at(13, {ring}.size - 1)") == step.kv_blocks_held
        # The end of the list is one scroll away, and costs no elements.
        num_elements = "document.querySelectorAll('*').length"
        await page.js("document.querySelector('#queue .body').scrollTop = 1e9")
        await page.until("document.getElementById('queue').innerText.includes('request-9999')")
        assert await page.js(num_elements) < MAX_ELEMENTS
        for width in (390, 1440):
            await page.resize(width, 900)
            await page.until(f"document.documentElement.clientWidth <= {width}")
            assert await page.js("document.documentElement.scrollWidth") <= width
        # A leak of one number a worker and update would show: 200 workers, 400 updates.
        await page.js("document.getElementById('window').value = 10")
        scheduler.watch_interval_s = 0.01
        before = await _heap_after(page, scheduler, 100)
        num_before = await page.js(num_elements)
        after = await _heap_after(page, scheduler, 400)
        assert after - before < 8_000_000, (before, after)
        assert await page.js(num_elements) < num_before + 100
        assert page.errors == []
        assert page.requests
        assert all(request.startswith((url, "about:")) for request in page.requests)


async def _heap_after(page, scheduler, num_updates):
    """The page's heap after so many more steps of each worker, when each ring is full."""
    for _ in range(num_updates // 100):
        scheduler.make_steps(100, 0.001)
        last = scheduler.steps["worker-199"][-1].position
        await page.until(
            "(() => { const r = headrace.state.store.rings.get('worker-199');"
            f" return r.at(0, r.size - 1) >= {last}; }})()"
        )
    return await page.heap_bytes()


@needs_browser
async def test_all_can_be_done_with_the_keyboard_and_is_named_for_screen_readers(tmp_path):
    scheduler = BusyScheduler(2, 7)
    scheduler.make_steps(200, 0.02)
    async with browsing(tmp_path, scheduler) as (page, _, _, _):
        await page.until("headrace.state.store.rings.size === 2 && headrace.state.queue.total")
        await page.until("!document.getElementById('steps').hidden")
        order = []
        while len(order) < 30:
            await page.key("Tab")
            name = await page.js(
                "(e => e === document.body ? '' : e.id || (e.dataset.for ? `table ${e.dataset.for}`"
                " : e.parentElement.id || e.textContent))(document.activeElement)"
            )
            if not name or name in order[:1]:
                break
            order.append(name)
        wanted = [
            "theme",
            "worker",
            "window",
            "pause",
            "scrub",
            "steps",
            "workers",
            "queue",
            "find-id",
        ]
        assert [name for name in order if name in wanted] == wanted
        unnamed = await page.send("Accessibility.getFullAXTree")
        for node in unnamed["nodes"]:
            role = node.get("role", {}).get("value")
            if role in {"button", "slider", "combobox", "textbox", "grid", "image"}:
                assert node["name"]["value"].strip(), node
        await page.js("document.getElementById('steps').focus()")
        await page.key("End")
        await page.key("ArrowLeft")
        await page.until("!headrace.state.isDirty")
        step = await page.js("document.getElementById('steps').getAttribute('aria-valuetext')")
        await page.key("Enter")
        await page.until("document.querySelectorAll('#details td').length > 10")
        title = await page.js("document.getElementById('details-title').textContent")
        assert title == "Step " + re.search(r"step (\d+ of \S+),", step)[1]
        await page.key("Escape")
        assert await page.js("document.activeElement.id") == "steps"
        await page.js("document.querySelector('#queue .body').focus()")
        await page.key("ArrowDown")
        await page.key("ArrowDown")
        await page.key("Enter")
        await page.until(
            "document.querySelector('#details').innerText.includes('needs 12 KV blocks')"
        )
        assert "request-1" in await page.js("document.getElementById('details-title').textContent")
        await page.key("Escape")
        await page.js("document.querySelector('[data-for=steps]').click()")
        await page.until("document.querySelectorAll('#steps-table tbody tr').length > 20")
        assert page.errors == []


@needs_browser
async def test_a_token_is_asked_for_and_a_lost_router_is_named_and_found_again(tmp_path):
    file = tmp_path / "token"
    file.write_text("secret\n")
    scheduler = BusyScheduler(1, 0)
    scheduler.make_steps(10, 0.02)
    settings = {"auth_token_file": str(file)}
    async with browsing(tmp_path, scheduler, **settings) as (page, url, stack, server):
        for token in ("wrong", "secret"):
            await page.until("document.getElementById('token').open")
            await page.js(f"document.getElementById('token-value').value = {token!r}")
            await page.key("Enter")
            await page.until("!document.getElementById('token').open")
        await page.until("headrace.state.store.rings.size === 1")
        assert await page.js("sessionStorage.getItem('headrace-token')") == "secret"
        assert await page.js("localStorage.length") == 0
        assert not any("secret" in request for request in page.requests)
        await server.stop()
        await page.until("document.getElementById('banner').innerText.includes('does not answer')")
        assert await page.js("document.getElementById('link').textContent") == "not connected"
        # The stream goes on where it broke: each step is there once.
        scheduler.make_steps(5, 0.02)
        page_of = Console(InferenceService(stack.services), None)
        config = AdminConfig(listen=url.removeprefix("http://"), **settings)
        again = AdminServer(config, list, lambda: True, page_of)
        await again.start()
        try:
            await page.until("headrace.state.store.rings.get('worker-000').size >= 15")
            await page.until("document.getElementById('banner').hidden")
            assert await page.js("headrace.state.store.rings.get('worker-000').size") == 15
        finally:
            await again.stop()


@needs_browser
async def test_a_recording_is_shown_like_a_pool(tmp_path, recording):
    async with browsing(tmp_path, FakeScheduler()) as (page, _, _, _):
        text = json.dumps(recording.read_text())
        await page.js(
            "(() => { const files = new DataTransfer();"
            f" files.items.add(new File([{text}], 'run.jsonl'));"
            " const input = document.getElementById('file'); input.files = files.files;"
            " input.dispatchEvent(new Event('change')); })()"
        )
        await page.until("headrace.state.recording && !document.getElementById('steps').hidden")
        steps = [json.loads(line) for line in recording.read_text().splitlines()]
        plans = [step["sched"]["tokens"] for step in steps if step.get("sched", {}).get("tokens")]
        sums = await page.js(
            "(() => { const [[, r]] = headrace.state.store.rings; const all = [];"
            " for (let i = 0; i < r.size; i++) all.push(r.at(5, i) + r.at(6, i) + r.at(7, i));"
            " return all; })()"
        )
        assert sums == [sum(plan.values()) for plan in plans]
        await page.js("document.getElementById('steps').focus()")
        await page.key("End")
        await page.key("Enter")
        await page.until("document.querySelectorAll('#details td').length")
        name = await page.js("document.querySelector('#details td button').textContent")
        assert name in plans[-1]
        await page.js("document.querySelector('#details td button').click()")
        await page.until("document.querySelector('#details').innerText.includes('admitted')")
        assert page.errors == []
