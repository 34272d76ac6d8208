"""The chart on a cluster: a real control plane, and pods whose processes are the real services."""

import asyncio
import re

import pytest
from msgspec.structs import replace

from headrace.client import HeadraceClient, ServiceError
from headrace.connections import UNREACHABLE
from tests.cluster.load import Load

pytestmark = [pytest.mark.system, pytest.mark.timeout(400)]
POOL = {"hr-headrace-gpuworker-a-0", "hr-headrace-gpuworker-a-1"}


@pytest.fixture
def load(release, credentials):
    """Clients with a key of a tenant."""
    release.until_settled()
    return Load(release.address(), credentials.channel())


def pods(release):
    components = ("router", "scheduler", "gpuworker")
    return [pod for each in components for pod in release.pods(each)]


def uids(release):
    return {pod["metadata"]["uid"] for pod in pods(release)}


def starts(release):
    statuses = [status for pod in pods(release) for status in pod["status"]["containerStatuses"]]
    return uids(release), sum(status["restartCount"] for status in statuses)


@pytest.mark.parametrize("name", ["plain", "hr"])
def test_helm_test_generates_text_after_the_commands_of_the_notes(releases, name):
    release = releases[name]
    assert "complete" in release.run_note("rollout status")
    assert release.run_note("get secret")
    output = release.test()
    assert re.search(r"Phase: +Succeeded", output)
    assert re.search(r"8 tokens in \d", output)


def test_init_containers_and_jobs_run_to_their_end(releases):
    release = releases["plain"]
    (router,) = release.pods("router")
    for flags in ((router["metadata"]["name"], "--container=before"), ("job/plain-job",)):
        log = release.cluster.kubectl("logs", *flags, "--namespace", release.namespace)
        assert log.strip() in {"before", "job"}
    jobs = f"/apis/batch/v1/namespaces/{release.namespace}/jobs"
    release.cluster.until(
        lambda: release.cluster.api.get(f"{jobs}/plain-job")["status"].get("succeeded"), "job"
    )


def test_schedulers_share_the_workers_of_their_release_and_no_other(release):
    release.cluster.until(lambda: is_shared(release), "owner of each worker")


def is_shared(release):
    """Whether each scheduler owns one worker, by the Leases."""
    owners = release.owners()
    # The Lease of a worker outlives it.
    return {owners.get(worker) for worker in POOL} == {
        pod["metadata"]["name"] for pod in release.pods("scheduler")
    }


async def test_an_upgrade_and_a_rollback_under_load_lose_no_request(release, load):
    """From Leases to lists, and back: every pod is replaced twice."""
    before = uids(release)
    async with load:
        await asyncio.to_thread(release.upgrade, {"discovery": {"type": "static"}})
        await load.until_answered()
        await asyncio.to_thread(release.rollback)
        await load.until_answered()
    release.until_settled()
    print(f"{load.num_answers} answers, {load.num_resumes} resumed, {load.num_refused} put off")
    assert not before & uids(release)


async def test_a_node_is_drained_under_load_one_worker_at_a_time(release, load):
    cluster = release.cluster
    nodes = {pod["spec"]["nodeName"] for pod in release.pods("gpuworker")}
    node = min(nodes)
    async with load:
        flags = ("--ignore-daemonsets", "--delete-emptydir-data", "--timeout=90s")
        try:
            output = await asyncio.to_thread(cluster.kubectl, "drain", node, *flags)
            await asyncio.to_thread(release.until_settled)
        finally:
            await asyncio.to_thread(cluster.kubectl, "uncordon", node)
    assert "evicted" in output
    assert node not in {pod["spec"]["nodeName"] for pod in release.pods("gpuworker")}
    assert load.num_answers > 0


async def test_a_scheduler_is_replaced_under_load(release, load):
    (pod, *_) = release.pods("scheduler")
    async with load:
        await load.until_answered()
        await asyncio.to_thread(
            release.cluster.kubectl,
            *("delete", "pod", pod["metadata"]["name"], "--namespace", release.namespace),
        )
        await asyncio.to_thread(release.until_settled)
        await load.until_answered()
    await asyncio.to_thread(release.cluster.until, lambda: is_shared(release), "owners")


async def test_certificates_and_keys_are_renewed_under_load_without_a_restart(
    release, credentials, load, tmp_path
):
    before, old = starts(release), credentials.copy(tmp_path)
    async with load:
        newest = credentials.add_authority_and_key()
        await until_told(release, replace(old, auth_token_file=newest.auth_token_file), "")
        credentials.show_newest()
        await until_told(release, newest, "")
        credentials.use_newest()
        await load.until_answered()
        credentials.drop_old_keys()
        await until_told(release, replace(newest, auth_token_file=old.auth_token_file), "BAD_TOKEN")
        await until_told(release, old, UNREACHABLE)
        await load.until_answered()
    assert starts(release) == before


async def test_a_worker_whose_step_hangs_is_not_ready_until_it_goes_on(release, load):
    cluster, (pod, *_) = release.cluster, release.pods("gpuworker")
    hang = cluster.volume(pod, "tmp") / "hang"
    async with load:
        await load.until_answered()
        hang.touch()
        await asyncio.to_thread(cluster.until, lambda: not release.is_settled(), "hanging worker")
        hang.unlink()
        await asyncio.to_thread(release.until_settled)
        await load.until_answered()


async def test_the_controller_makes_a_pool_larger_under_load_and_smaller_after_it(
    release, credentials
):
    release.until_settled()
    # A worker takes 16 requests at a time, so that many wait in the routers.
    async with Load(release.address(), credentials.channel(), num_clients=60, num_tokens=100):
        await asyncio.to_thread(until_pool, release, 3)
    await asyncio.to_thread(until_pool, release, 2)
    log = release.cluster.kubectl(
        *("logs", "deployment/hr-headrace-pool-controller", "--namespace", release.namespace)
    )
    assert re.search(r"2 -> 3 workers: \w.* is at \d+% of its target", log)


def until_pool(release, num_workers):
    """Wait until the pool has so many workers, all ready."""
    release.cluster.until(lambda: len(release.pods("gpuworker")) == num_workers, "workers")
    release.until_settled()


async def until_told(release, config, reason):
    """Wait until several new connections are refused with this reason; all well if it is empty."""
    num_told = 0
    async with asyncio.timeout(60):
        while num_told < 6:
            async with HeadraceClient(release.address(), config) as client:
                told = ""
                try:
                    await client.models()
                except ServiceError as error:
                    told = error.reason
            num_told = num_told + 1 if told == reason else 0
            await asyncio.sleep(0.1)
