"""Whether the status store can be reached and written, and keeps what it is given."""

import secrets
import time
from typing import Any
from urllib.parse import urlsplit

from redis.exceptions import RedisError

from headrace.doctor.findings import Report
from headrace.doctor.ports import TIMEOUT_S
from headrace.status.connect import make_client

_MIN_VERSION = (6, 2)


async def check_store(url: str, report: Report) -> None:
    """Checks the store of a URL; the password in it is in no finding."""
    parts = urlsplit(url)
    target = f"store {parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
    try:
        client: Any = make_client(url, TIMEOUT_S)
    except ValueError as error:
        report.problem(target, "store", str(error), "correct the store URL")
        return
    try:
        await _write(client, target, report)
        await _settings(client, target, report)
    except (RedisError, OSError, TimeoutError) as error:
        advice = "start the store, or correct URL, password and TLS options (ssl_ca_certs)"
        text = f"{type(error).__name__}: {error}" if str(error) else "no answer in time"
        report.problem(target, "store", text, advice)
    finally:
        await client.aclose()


async def _write(client: Any, target: str, report: Report) -> None:
    key, value = f"headrace:doctor:{secrets.token_hex(8)}", b"here"
    began = time.monotonic()
    await client.set(key, value, ex=60)
    found = await client.get(key)
    took_ms = (time.monotonic() - began) * 1000
    await client.delete(key)
    if found == value:
        report.ok(target, "store", f"writable: a write and a read in {took_ms:.1f} ms")
    else:
        text = "what was written is not read back"
        report.problem(target, "store", text, "check that the URL leads to one store")


async def _settings(client: Any, target: str, report: Report) -> None:
    info = _of_one_server(await client.info())
    version = str(info.get("valkey_version") or info.get("redis_version", ""))
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())
    if numbers and numbers < _MIN_VERSION:
        report.problem(target, "store version", version, "upgrade to Valkey, or Redis 6.2 or newer")
    else:
        report.ok(target, "store version", version)
    policy = str(info.get("maxmemory_policy", ""))
    if policy and policy != "noeviction":
        advice = "set maxmemory-policy noeviction: evicted leases make living routers count as dead"
        report.problem(target, "eviction", f"maxmemory-policy is {policy}", advice)
    elif policy:
        report.ok(target, "eviction", policy)
    _persistence(info, target, report)
    if (role := info.get("role")) not in {None, "master"}:
        advice = "give the URL of the master, or redis+sentinel://"
        report.problem(target, "role", f"is a {role}, which takes no writes", advice)
    seconds, microseconds = _of_one_server(await client.time())
    report.clocks[target] = seconds + microseconds / 1e6 - time.time()


def _persistence(info: dict[str, Any], target: str, report: Report) -> None:
    if info.get("rdb_last_bgsave_status") == "err" or info.get("aof_last_write_status") == "err":
        advice = "see the store's log; a full disk does this, and may stop writes"
        report.problem(target, "persistence", "the last save failed", advice)
    elif info.get("aof_enabled"):
        report.ok(target, "persistence", "appendonly")
    else:
        text = "no append-only file: a crash of the store loses requests since its last snapshot"
        report.warning(target, "persistence", text, "set appendonly yes")


def _of_one_server(answer: Any) -> Any:
    """An answer; of a cluster, which gives one for each node, the first."""
    if isinstance(answer, dict) and answer and all(":" in str(key) for key in answer):
        return next(iter(answer.values()))
    return answer
