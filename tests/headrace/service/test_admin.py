"""The admin port over real HTTP: what it serves, and to whom."""

import asyncio
import contextlib
import ssl

import aiohttp
import pytest
import trustme

from headrace.service.admin import AdminConfig, AdminServer
from headrace.service.config import ConfigError
from headrace.service.metrics import gauge
from headrace.service.monitoring import publish_metrics
from tests.headrace.otlp_receiver import OtlpReceiver

SIZE = gauge("demo.size", "By", "Size.")


def source():
    return [(SIZE, {(): 7})]


@contextlib.asynccontextmanager
async def serving(is_ready=lambda: True, **settings):
    server = AdminServer(AdminConfig(**{"listen": "127.0.0.1:0"} | settings), source, is_ready)
    url = await server.start()
    try:
        async with asyncio.timeout(20), aiohttp.ClientSession(url) as session:
            yield session
    finally:
        await server.stop()


async def get(session, path, **options):
    async with session.get(path, **options) as answer:
        return answer.status, await answer.text()


async def test_metrics_and_probes_are_served_on_loopback():
    async with serving() as session:
        status, text = await get(session, "/metrics")
        assert (status, "demo_size_bytes 7.0\n" in text) == (200, True)
        assert await get(session, "/healthz") == (200, "ok\n")
        assert await get(session, "/readyz") == (200, "ready\n")
        assert (await get(session, "/else"))[0] == 404


async def test_readiness_follows_the_service():
    async with serving(is_ready=lambda: False) as session:
        status, text = await get(session, "/readyz")
        assert (status, text.startswith("not ready")) == (503, True)
        assert (await get(session, "/healthz"))[0] == 200


async def test_a_token_guards_all_but_the_probes(tmp_path):
    file = tmp_path / "token"
    file.write_text("secret\n")
    async with serving(auth_token_file=str(file)) as session:
        assert (await get(session, "/metrics"))[0] == 401
        wrong = {"authorization": "Bearer other"}
        assert (await get(session, "/metrics", headers=wrong))[0] == 401
        right = {"authorization": "Bearer secret"}
        assert (await get(session, "/metrics", headers=right))[0] == 200
        assert (await get(session, "/readyz"))[0] == 200


@pytest.mark.parametrize("has_full_token", [True, False])
async def test_the_token_of_scrapers_opens_the_metrics_and_nothing_else(tmp_path, has_full_token):
    (tmp_path / "full").write_text("full")
    (tmp_path / "scrape").write_text("scrape")
    settings = {"metrics_token_file": str(tmp_path / "scrape")}
    if has_full_token:
        settings["auth_token_file"] = str(tmp_path / "full")
    full, scrape = ({"authorization": f"Bearer {token}"} for token in ("full", "scrape"))
    async with serving(**settings) as session:
        assert (await get(session, "/metrics", headers=scrape))[0] == 200
        assert (await get(session, "/metrics"))[0] == 401
        # A page that is not there is refused before it is looked up.
        assert (await get(session, "/else", headers=scrape))[0] == 401
        assert (await get(session, "/metrics/", headers=scrape))[0] == 401
        found = [(await get(session, path, headers=full))[0] for path in ("/metrics", "/else")]
        assert found == ([200, 404] if has_full_token else [401, 401])


async def test_a_page_of_another_site_reads_nothing_through_a_local_browser():
    async with serving() as session:
        for host in ("evil.example", "evil.example:80", "127.0.0.1.evil.example"):
            assert (await get(session, "/metrics", headers={"host": host}))[0] == 403
        for host in ("localhost:1", "127.0.0.1", "[::1]:1"):
            assert (await get(session, "/metrics", headers={"host": host}))[0] == 200


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "[::]:0", "10.1.2.3:80", "some.host:80"])
def test_a_port_that_other_machines_reach_needs_a_token(listen, tmp_path):
    with pytest.raises(ConfigError, match="auth_token_file"):
        AdminServer(AdminConfig(listen=listen), source, lambda: True)
    AdminServer(AdminConfig(listen=listen, allow_strangers=True), source, lambda: True)
    (tmp_path / "token").write_text("x")
    for setting in ("auth_token_file", "metrics_token_file"):
        config = AdminConfig(**{"listen": listen, setting: str(tmp_path / "token")})
        AdminServer(config, source, lambda: True)


@pytest.mark.parametrize("listen", ["9000", "host:", "host:x", "host:65536", ":80"])
def test_a_wrong_address_is_named(listen):
    with pytest.raises(ConfigError, match="host:port"):
        AdminServer(AdminConfig(listen=listen), source, lambda: True)


async def test_a_taken_port_is_named():
    async with serving() as session:
        config = AdminConfig(listen=f"127.0.0.1:{session._base_url.port}")
        second = AdminServer(config, source, lambda: True)
        with pytest.raises(ConfigError, match="cannot listen on 127"):
            await second.start()
        await second.stop()


async def test_the_port_can_be_https(tmp_path):
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    issued.private_key_pem.write_to_path(str(key))
    issued.cert_chain_pems[0].write_to_path(str(cert))
    context = ssl.create_default_context()
    authority.configure_trust(context)
    async with serving(tls_cert_file=str(cert), tls_key_file=str(key)) as session:
        assert session._base_url.scheme == "https"
        assert (await get(session, "/metrics", ssl=context))[0] == 200


async def test_a_collector_gets_metrics_at_intervals_and_at_the_end(monkeypatch):
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "20")
    values = iter(range(1000))
    receiver = OtlpReceiver()
    try:
        async with (
            asyncio.timeout(20),
            publish_metrics(
                "demo-service",
                lambda: [(SIZE, {(): next(values)})],
                admin=AdminConfig(),
                otlp_endpoint=receiver.endpoint,
                is_ready=lambda: True,
            ),
        ):
            await asyncio.to_thread(receiver.wait_metrics, 3)
        last = next(values) - 1
        found = receiver.metrics
        assert {(one.service, one.name) for one in found} == {("demo-service", "demo.size")}
        assert [metric.value for metric in found] == list(range(last + 1))
    finally:
        receiver.stop()


async def test_nothing_is_published_unless_asked_for():
    def never():
        raise AssertionError

    async with publish_metrics(
        "demo", never, admin=AdminConfig(), otlp_endpoint="", is_ready=lambda: True
    ):
        assert len(asyncio.all_tasks()) == 1
