"""The pool controller against a real API server."""

import asyncio

import kubernetes
import pytest
from click.testing import CliRunner

from headrace.cli.pool_controller import measured, pool_controller
from headrace.kubernetes.api import connect
from headrace.kubernetes.controller import Leader, PoolController
from headrace.kubernetes.sizing import Measured, Targets
from headrace.types import PoolInfo, WorkerStatus
from tests.kubernetes.cluster import Namespace
from tests.kubernetes.control_plane import ControlPlane

NOW = Targets(min_replicas=1, max_replicas=5, up_after_s=0, down_after_s=0, dwell_s=0)


class StatefulSet:
    """A pool of two workers in a new namespace."""

    def __init__(self, plane: ControlPlane) -> None:
        self.namespace = Namespace(plane)
        self.kv_use = 0.8
        template = {
            "metadata": {"labels": {"a": "b"}},
            "spec": {"containers": [{"name": "gpuworker", "image": "none"}]},
        }
        selector = {"matchLabels": {"a": "b"}}
        spec = {"replicas": 2, "serviceName": "p", "selector": selector, "template": template}
        body = {"metadata": {"name": "p"}, "spec": spec}
        with plane.client() as client:
            kubernetes.client.AppsV1Api(client).create_namespaced_stateful_set(
                self.namespace.name, body
            )

    def replicas(self) -> int:
        with self.namespace.plane.client() as client:
            api = kubernetes.client.AppsV1Api(client)
            return api.read_namespaced_stateful_set("p", self.namespace.name).spec.replicas

    async def measure(self, _: str) -> Measured:
        return Measured(num_ready=self.replicas(), kv_use=self.kv_use)


@pytest.fixture
def pool(control_plane: ControlPlane) -> StatefulSet:
    return StatefulSet(control_plane)


async def test_a_pool_follows_its_load(pool: StatefulSet, caplog):
    caplog.set_level("INFO")
    async with asyncio.timeout(60), await connect(pool.namespace.discovery()) as api:
        controller = PoolController(api, {"p": NOW}, pool.measure, is_dry_run=False)
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
        await PoolController(api, {"p": NOW}, pool.measure, is_dry_run=True).step()
    assert pool.replicas() == 2
    assert "2 -> 3 workers" in caplog.text


async def test_one_controller_leads_and_its_end_lets_another_lead(control_plane: ControlPlane):
    namespace = Namespace(control_plane)
    async with asyncio.timeout(60), await connect(namespace.discovery()) as api:
        first, second = Leader(api), Leader(api)
        assert await first.renew()
        assert not await second.renew()
        assert await first.renew()
        await first.release()
        assert await second.renew()
        assert not await first.renew()


def worker(name: str, state: str = "ready", num_free: int = 50) -> WorkerStatus:
    return WorkerStatus(
        worker_id=name, model="m", role="mixed", state=state, device="", dtype="", num_running=0,
        num_waiting=0, max_num_seqs=8, num_free_kv_blocks=num_free, num_kv_blocks=100, block_size=8,
        max_model_len=64, max_num_batched_tokens=64,
    )  # fmt: skip


def test_a_pool_measures_its_own_pods_and_its_share_of_the_queue():
    workers = (
        *(worker("p-0", num_free=20), worker("p-1"), worker("p-2", "starting", 100)),
        *(worker("p-x-0", num_free=90), worker("other")),
    )
    found = PoolInfo(workers=workers, num_queued=9, num_in_flight=0, num_paused=0)
    pools = ["p", "p-x"]
    assert measured(found, "p", pools) == Measured(num_ready=2, kv_use=0.65, num_queued=6)
    assert measured(found, "p-x", pools).num_queued == 3


@pytest.mark.parametrize("pool", ["p", "p=2", "p=3:2", "p=a:b"])
def test_a_wrong_pool_is_refused_by_its_name(pool: str):
    done = CliRunner().invoke(pool_controller, ["--pool", pool])
    assert done.exit_code == 2
    assert "is no STATEFULSET=MIN:MAX" in done.output
