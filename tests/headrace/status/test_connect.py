"""What a store's URL means."""

import pytest
from redis.asyncio.cluster import RedisCluster
from redis.asyncio.sentinel import SentinelManagedSSLConnection

from headrace.status.connect import make_client


async def test_sentinel_and_its_master_have_logins_of_their_own():
    client = make_client(
        "redis+sentinel://me:p%40ss@a:1,b,[::1]:3/MASTER/2"
        "?sentinel_username=you&sentinel_password=secret",
        1.5,
    )
    pool = client.connection_pool
    assert pool.service_name == "MASTER"
    kwargs = pool.connection_kwargs
    assert (kwargs["username"], kwargs["password"], kwargs["db"]) == ("me", "p@ss", 2)
    sentinels = [s.connection_pool.connection_kwargs for s in pool.sentinel_manager.sentinels]
    assert [(s["host"], s["port"]) for s in sentinels] == [("a", 1), ("b", 26379), ("::1", 3)]
    assert {(s["username"], s["password"], s["socket_timeout"]) for s in sentinels} == {
        ("you", "secret", 1.5)
    }


async def test_tls_holds_for_sentinel_and_for_its_master():
    client = make_client("rediss+sentinel://a/MASTER?ssl_ca_certs=/ca.pem", 1.0)
    pool = client.connection_pool
    assert pool.connection_class is SentinelManagedSSLConnection
    assert pool.connection_kwargs["ssl_ca_certs"] == "/ca.pem"
    (sentinel,) = pool.sentinel_manager.sentinels
    assert sentinel.connection_pool.connection_kwargs["ssl_ca_certs"] == "/ca.pem"


async def test_a_cluster_is_found_by_some_of_its_nodes():
    client = make_client("rediss+cluster://me:pass@a:1,b?ssl_cert_reqs=none", 1.0)
    assert isinstance(client, RedisCluster)
    nodes = client.nodes_manager.startup_nodes.values()
    assert {(node.host, node.port) for node in nodes} == {("a", 1), ("b", 6379)}
    options = next(iter(nodes)).connection_kwargs
    assert (options["username"], options["password"]) == ("me", "pass")
    assert options["ssl_cert_reqs"] == "none"


@pytest.mark.parametrize(
    "url", ["http://a", "sentinel://a/m", "redis+sentinel://a", "redis+sentinel://a/m/x"]
)
def test_a_url_of_another_kind_is_refused(url):
    with pytest.raises(ValueError, match="store URL"):
        make_client(url, 1.0)


def test_an_error_about_a_url_does_not_show_its_password():
    for url in ("http://me:secret@a", "redis+sentinel://me:secret@a"):
        with pytest.raises(ValueError) as refused:
            make_client(url, 1.0)
        assert "secret" not in str(refused.value)
