"""The chart on a cluster: a real control plane, and pods whose processes are the real services."""

import asyncio
import re

import pytest

from headrace.client import HeadraceClient, ServiceError
from headrace.service.channels import ChannelConfig
from tests.cluster.load import Load

pytestmark = [pytest.mark.system, pytest.mark.timeout(400)]


@pytest.fixture
def load(release, tmp_path):
    """Clients with the release's token."""
    release.until_settled()
    (tmp_path / "token").write_text(release.token())
    return Load(release.address(), tmp_path / "token")


def uids(release):
    components = ("router", "scheduler", "gpuworker")
    return {pod["metadata"]["uid"] for each in components for pod in release.pods(each)}


def test_helm_test_generates_text_after_the_commands_of_the_notes(release):
    assert "2 pods" in release.run_note("rollout status")
    assert release.run_note("get secret")
    output = release.test()
    assert re.search(r"Phase: +Succeeded", output)
    assert re.search(r"8 tokens in \d", output)


async def test_an_upgrade_and_a_rollback_under_load_lose_no_request(release, load):
    before = uids(release)
    async with load:
        # In the settings file of every service.
        await asyncio.to_thread(release.upgrade, {"telemetry": {"logLevel": "debug"}})
        await asyncio.to_thread(release.rollback)
    release.until_settled()
    print(f"{load.num_answers} answers, {load.num_resumes} resumed, {load.num_refused} put off")
    assert load.num_answers > 0
    assert not before & uids(release)


async def test_a_node_is_drained_under_load_one_worker_at_a_time(release, load):
    cluster = release.cluster
    nodes = {pod["spec"]["nodeName"] for pod in release.pods("gpuworker")}
    node = min(nodes)
    async with load:
        flags = ("--ignore-daemonsets", "--delete-emptydir-data", "--timeout=90s")
        try:
            output = await asyncio.to_thread(cluster.kubectl, "drain", node, *flags)
            release.until_settled()
        finally:
            await asyncio.to_thread(cluster.kubectl, "uncordon", node)
    assert "evicted" in output
    assert node not in {pod["spec"]["nodeName"] for pod in release.pods("gpuworker")}
    assert load.num_answers > 0


async def test_a_rotated_token_is_the_only_one_that_counts(release, tmp_path):
    old, new = release.token(), "rotated-token-0123456789"
    await asyncio.to_thread(release.upgrade, {"auth": {"tokens": {"router": new}}})
    release.until_settled()
    assert release.token() == new
    for token, is_let_in in ((new, True), (old, False)):
        (tmp_path / "token").write_text(token)
        config = ChannelConfig(auth_token_file=str(tmp_path / "token"))
        async with HeadraceClient(release.address(), config) as client, asyncio.timeout(60):
            if is_let_in:
                assert await client.models()
            else:
                with pytest.raises(ServiceError) as refused:
                    await client.models()
                assert refused.value.reason == "BAD_TOKEN"
