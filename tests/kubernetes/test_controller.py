"""The pool controller against a real API server."""

import asyncio
from dataclasses import replace
from typing import Any

import kubernetes
import pytest
from click.testing import CliRunner

from headrace.cli.pool_controller import pool_controller
from headrace.kubernetes.api import Api, connect
from headrace.kubernetes.controller import Leader, PoolController
from headrace.kubernetes.sizing import Measured, Targets
from tests.kubernetes.cluster import Namespace
from tests.kubernetes.control_plane import ControlPlane

NOW = Targets(min_replicas=1, max_replicas=5, up_after_s=0, down_after_s=0, dwell_s=0)
LEASE = "hr-headrace-pool-controller"


class StatefulSet:
    """A pool of two workers in a namespace."""

    def __init__(self, namespace: Namespace, name: str = "p") -> None:
        self.namespace = namespace
        self.name = name
        self.kv_use = 0.8
        self.measured: dict[str, Any] = {}
        self.roles: list[tuple[str, str]] = []
        template = {
            "metadata": {"labels": {"a": "b"}},
            "spec": {"containers": [{"name": "gpuworker", "image": "none"}]},
        }
        selector = {"matchLabels": {"a": "b"}}
        spec = {"replicas": 2, "serviceName": "p", "selector": selector, "template": template}
        body = {"metadata": {"name": name}, "spec": spec}
        with namespace.plane.client() as client:
            kubernetes.client.AppsV1Api(client).create_namespaced_stateful_set(namespace.name, body)

    def replicas(self) -> int:
        with self.namespace.plane.client() as client:
            api = kubernetes.client.AppsV1Api(client)
            return api.read_namespaced_stateful_set(self.name, self.namespace.name).spec.replicas

    async def measure(self) -> dict[str, Measured]:
        return {self.name: Measured(num_ready=self.replicas(), kv_use=self.kv_use, **self.measured)}

    async def set_role(self, worker_id: str, role: str) -> None:
        self.roles.append((worker_id, role))

    def controller(self, api: Api, targets: Targets = NOW, *, is_dry_run: bool = False):
        return PoolController(
            *(api, {self.name: targets}, self.measure),
            set_role=self.set_role,
            lease_name=LEASE,
            is_dry_run=is_dry_run,
        )


@pytest.fixture
def pool(control_plane: ControlPlane) -> StatefulSet:
    return StatefulSet(Namespace(control_plane))


async def test_a_pool_follows_its_load(pool: StatefulSet, caplog):
    caplog.set_level("INFO")
    async with asyncio.timeout(60), await connect(pool.namespace.discovery()) as api:
        controller = pool.controller(api)
        await controller.step()
        assert pool.replicas() == 2
        pool.kv_use = 1.2
        await controller.step()
        assert pool.replicas() == 3
        assert "p: 2 -> 3 workers: KV use is at 150% of its target" in caplog.text
        pool.kv_use = 0.1
        await controller.step()
        assert pool.replicas() == 2


async def test_a_dry_run_says_what_it_would_do(pool: StatefulSet, caplog):
    caplog.set_level("INFO")
    async with asyncio.timeout(60), await connect(pool.namespace.discovery()) as api:
        pool.kv_use = 1.2
        await pool.controller(api, is_dry_run=True).step()
    assert pool.replicas() == 2
    assert "2 -> 3 workers" in caplog.text


async def test_a_worker_changes_sides_before_the_pool_grows(pool: StatefulSet, caplog):
    caplog.set_level("INFO")
    targets = replace(NOW, tpot_s=0.1, by_role=True)
    pool.measured = {"num_queued": 8, "tpot_s": 0.02, "prefill": ("p-0",), "decode": ("p-2", "p-1")}
    async with asyncio.timeout(60), await connect(pool.namespace.discovery()) as api:
        dry = pool.controller(api, targets, is_dry_run=True)
        await dry.step()
        assert pool.roles == []
        await dry._leader.release()
        await pool.controller(api, targets).step()
    assert pool.roles == [("p-2", "prefill")]
    assert pool.replicas() == 2
    assert caplog.text.count("p: p-2 becomes prefill: queue is at 200% of its target") == 2


async def test_one_controller_leads_and_its_end_lets_another_lead(control_plane: ControlPlane):
    namespace = Namespace(control_plane)
    async with asyncio.timeout(60), await connect(namespace.discovery()) as api:
        first, second = Leader(api, LEASE), Leader(api, LEASE)
        assert await first.renew()
        assert not await second.renew()
        assert await first.renew()
        await first.release()
        assert await second.renew()
        assert not await first.renew()


@pytest.mark.parametrize("pool", ["p", "p=2", "p=3:2", "p=a:b"])
def test_a_wrong_pool_is_refused_by_its_name(pool: str):
    done = CliRunner().invoke(pool_controller, ["--pool", pool])
    assert done.exit_code == 2
    assert "is no STATEFULSET=MIN:MAX" in done.output


def test_roles_want_a_target_for_decode_workers():
    done = CliRunner().invoke(pool_controller, ["--pool", "p=1:2", "--roles"])
    assert done.exit_code == 2
    assert "--roles needs --tpot-s" in done.output
