"""`headrace doctor` in front of services that are well, and of those that are not."""

import asyncio
import contextlib
import json
import sys
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
import redis.asyncio

from headrace.doctor import targets
from headrace.doctor.findings import Level
from headrace.doctor.targets import Targets, add_config
from headrace.service.channels import ChannelConfig
from headrace.service.config import ConfigError
from headrace.service.keys import make_key, section
from headrace.service.serving import GrpcServer, ServingConfig
from headrace.service.versions import version
from headrace.status.embedded import EmbeddedStore
from tests.headrace.service.test_renewal import Pki
from tests.router.fake_scheduler import MODEL, FakeScheduler
from tests.router.stack import running_stack
from tests.scheduler.fake_gpuworker import FakeGpuWorker
from tests.scheduler.harness import running_scheduler

PLAIN = ChannelConfig()


def of(*routers, **others):
    """What to check; only routers by default."""
    nothing = {
        "schedulers": [],
        "workers": [],
        "store_url": "",
        "router_channel": PLAIN,
        "scheduler_channel": PLAIN,
        "worker_channel": PLAIN,
    }
    return Targets(routers=list(routers), **nothing | others)


async def problems(what, level=Level.PROBLEM):
    """The findings of a level, as "check: message -> advice"."""
    async with asyncio.timeout(60):
        report = await targets.check(what)
    return [f"{f.check}: {f.message} -> {f.advice}" for f in report.findings if f.level is level]


@contextlib.asynccontextmanager
async def serving(config):
    """A port with health and nothing else."""
    server = GrpcServer(config, ["headrace.v1.Inference"])
    address = await server.start()
    server.set_serving(True)
    try:
        yield address
    finally:
        await server.stop(0)


@contextlib.asynccontextmanager
async def deployment(folder, **settings):
    """Store, worker, scheduler and router, whose callers need keys; their Targets."""
    worker = FakeGpuWorker(model=MODEL)
    await worker.start()
    keys = {name: make_key() for name in ("admin", "acme")}
    for name, key in keys.items():
        (folder / name).write_text(key)
    file = folder / "keys.toml"
    file.write_text(
        section("a", keys["admin"], "", None) + section("b", keys["acme"], "acme", None)
    )
    serving = ServingConfig(api_keys_file=str(file))
    async with EmbeddedStore() as store, running_scheduler([worker], has_company=True) as scheduler:
        await scheduler.ready()
        async with running_stack(
            schedulers=[scheduler], store_url=store.url, serving=serving, **settings
        ) as stack:
            await stack.until(lambda: stack.store.is_durable)
            yield of(
                stack.address,
                schedulers=[scheduler.address],
                workers=[worker.address],
                store_url=store.url,
                router_channel=ChannelConfig(auth_token_file=str(folder / "admin")),
            )


async def test_what_is_well_has_no_problem(tmp_path):
    async with deployment(tmp_path) as found:
        report = await targets.check(found)
        assert [f for f in report.findings if f.level is Level.PROBLEM] == []
        checks = {(f.target.partition(" ")[0], f.check) for f in report.findings if f.level == "ok"}
        assert checks >= {
            ("router", "port"), ("router", "key"), ("router", "models"), ("router", "scheduler"),
            ("router", "clock"), ("router", "version"), ("router", "store"),
            ("scheduler", "version"), ("scheduler", "clock"),
            ("worker", "worker"), ("store", "store"), ("store", "eviction"), ("store", "clock"),
        }  # fmt: skip


async def test_the_command_tells_people_and_programs_and_exits_with_the_outcome(tmp_path):
    async def command(*arguments):
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "headrace", "doctor", *arguments),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        async with asyncio.timeout(60):
            output, errors = await process.communicate()
        return process.returncode, output.decode(), errors.decode()

    async with deployment(tmp_path) as found:
        address, key = found.routers[0], found.router_channel.auth_token_file
        well = await command("--server", address, "--auth-token-file", key, "--json")
        assert well[0] == 0, well
        findings = json.loads(well[1])
        assert {"target", "check", "level", "message", "advice"} == findings[0].keys()
        ill = await command("--server", address)
        assert ill[0] == 1
        assert f"problem  router {address}  key: asks for a key" in ill[1]
        assert "-> give --auth-token-file FILE" in ill[1]
        assert "1 problems were found" in ill[2]
        secrets = [(tmp_path / name).read_text() for name in ("admin", "acme")]
        assert not any(secret in str((well, ill)) for secret in secrets)


async def test_a_tenant_s_key_checks_what_it_opens(tmp_path):
    async with deployment(tmp_path) as found:
        theirs = ChannelConfig(auth_token_file=str(tmp_path / "acme"))
        assert await problems(replace(found, router_channel=theirs)) == []
        skipped = await problems(replace(found, router_channel=theirs), Level.SKIPPED)
        assert "give an administrator's key" in skipped[0]


@pytest.mark.parametrize(
    ("token", "text"), [("", "key: asks for a key -> give --auth-token-file"),
                        ("wrong", "[BAD_TOKEN] -> give the right key")],
)  # fmt: skip
async def test_a_key_that_is_missing_or_wrong_is_said(tmp_path, token, text):
    (tmp_path / "token").write_text("right")
    (tmp_path / "sent").write_text(token or "-")
    channel = ChannelConfig(auth_token_file=str(tmp_path / "sent") if token else "")
    async with serving(ServingConfig(auth_token_file=str(tmp_path / "token"))) as address:
        found = await problems(of(address, router_channel=channel))
    assert text in "".join(found)


@pytest.mark.parametrize(
    ("address", "text"),
    [
        ("127.0.0.1:{port}", "port: Connect call failed"),
        ("no-such-host.invalid:8700", "has no address"),
        ("127.0.0.1:many", "port: is not HOST:PORT"),
    ],
)
async def test_a_port_that_is_not_there_is_said(unused_tcp_port, address, text):
    found = await problems(of(address.format(port=unused_tcp_port)))
    assert text in found[0]


async def test_something_else_that_listens_is_said():
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    async with server:
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        found = await problems(of(address))
    assert "check that a Headrace service listens there" in found[0]


async def test_certificates_are_judged(tmp_path):
    pki, now = Pki(tmp_path), datetime.now(UTC)
    pki.issue("good", not_after=now + timedelta(days=90))
    pki.issue("soon", not_after=now + timedelta(days=3))
    pki.issue("old", not_before=now - timedelta(days=9), not_after=now - timedelta(days=1))
    pki.issue("elsewhere", "example.org")
    with_ca = pki.channel()

    async def found(name, channel, level=Level.PROBLEM):
        async with serving(pki.serving(name) if name else ServingConfig()) as address:
            return "".join(await problems(of(address, router_channel=channel), level))

    assert "tls: certificate of localhost, 127.0.0.1, valid for 90" in await found(
        "good", with_ca, Level.OK
    )
    assert "more days -> renew it now" in await found("soon", with_ca, Level.WARNING)
    assert "certificate has expired -> renew the server's" in await found("old", with_ca)
    assert "-> call the server by a name in its certificate" in await found("elsewhere", with_ca)
    assert "-> give the authority that signed it" in await found("good", ChannelConfig(tls=True))
    assert "the port speaks TLS" in await found("good", PLAIN)
    assert "does not speak TLS -> leave the TLS options out" in await found("", with_ca)


async def test_a_missing_client_certificate_is_said(tmp_path):
    pki = Pki(tmp_path)
    pki.issue("good")
    async with serving(pki.serving("good", "ca")) as address:
        found = await problems(of(address, router_channel=pki.channel()))
        assert "it may want a client certificate" in found[0]
        assert not [
            text
            for text in await problems(of(address, router_channel=pki.channel("good")))
            if "health" in text or "tls" in text
        ]


class Later(FakeScheduler):
    """Of a version that does not work with this one."""

    async def WatchPool(self, request, context):
        async for snapshot in super().WatchPool(request, context):
            snapshot.version = "0.9.0"
            yield snapshot


async def test_a_scheduler_of_a_far_version_is_a_problem_from_both_sides():
    async with (
        FakeScheduler() as near,
        Later() as far,
        running_stack(schedulers=[near, far]) as stack,
    ):
        await stack.until(lambda: stack.services.schedulers[1].link().error)
        found = await problems(of(stack.address))
    assert f"is Headrace 0.9.0 and this router is {version()}" in "".join(found)


async def test_a_pool_without_workers_is_a_problem():
    scheduler = FakeScheduler()
    async with running_stack(scheduler=scheduler) as stack:
        scheduler.set_workers()
        await stack.until(lambda: not stack.services.schedulers[0].workers)
        found = await problems(of(stack.address))
    assert "models: no worker serves a model now" in found[0]


async def test_a_store_that_the_router_lost_is_a_problem():
    async with contextlib.AsyncExitStack() as ending:
        store = await ending.enter_async_context(EmbeddedStore())
        stack = await ending.enter_async_context(running_stack(store_url=store.url))
        await stack.until(lambda: stack.store.is_durable)
        await store.__aexit__(None, None, None)
        await stack.answer()
        await stack.until(lambda: not stack.store.is_durable)
        found = await problems(of(stack.address, store_url=store.url))
    assert any("store: does not reach its store" in text for text in found)
    assert any("-> start the store, or correct URL" in text for text in found)


async def test_a_store_that_evicts_or_refuses_is_a_problem():
    async with EmbeddedStore() as store:
        client = redis.asyncio.Redis.from_url(store.url)
        await client.config_set("maxmemory-policy", "allkeys-lru")
        await client.aclose()
        found = await problems(of(store_url=store.url))
        assert "eviction: maxmemory-policy is allkeys-lru -> set maxmemory-policy" in found[0]
        assert len(found) == 1
        password = store.url.partition("password=")[2]
        wrong = store.url.replace(password, "wrong")
        refused = await problems(of(store_url=wrong))
        assert "invalid username-password pair" in refused[0]
        report = await targets.check(of(store_url=store.url))
        assert password not in str(report)


def test_targets_come_from_the_settings_of_a_service(tmp_path):
    file = tmp_path / "router.toml"
    file.write_text(
        '[router]\nscheduler = ["a:1", "b:2"]\nstore_url = "redis://s"\nmodel = "m"\n'
        "[channel]\ntls = true\n"
    )
    found = add_config(of("r:1"), file)
    assert (found.schedulers, found.store_url) == (["a:1", "b:2"], "redis://s")
    assert (found.scheduler_channel.tls, found.worker_channel.tls) == (True, False)
    file.write_text("[scheduler]\nworker = 5\n")
    with pytest.raises(ConfigError, match="worker"):
        add_config(of("r:1"), file)
