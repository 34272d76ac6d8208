"""The chart's Roles are what the services need: they work with them, and with no verb less."""

import asyncio
import copy

import kubernetes
import pytest

from headrace.kubernetes.api import connect
from headrace.kubernetes.ownership import Ownership
from headrace.kubernetes.pods import PodPeers
from headrace.service.discovery import OwnershipConfig
from tests.helm.chart import Chart
from tests.kubernetes.cluster import WORKERS, Namespace, Sets
from tests.kubernetes.control_plane import ControlPlane
from tests.kubernetes.test_controller import StatefulSet
from tests.kubernetes.test_ownership import Driven

QUICK = OwnershipConfig(lease_duration_s=4, renew_every_s=0.3)
PODS, LEASES = ("list", "watch"), ("list", "watch", "create", "update")
SCALE = [("statefulsets/scale", verb) for verb in ("get", "patch")]
LEADING = [("leases", verb) for verb in ("list", "create", "update")]
SCALED = "hr-headrace-gpuworker-default"


@pytest.fixture
def roles(chart: Chart) -> dict[str, list]:
    scaled = {"gpuworker": {"autoscaling": {"type": "controller"}}}
    objects = chart.render({"discovery": {"type": "kubernetes"}, **scaled})
    return {name.removeprefix("hr-headrace-"): r["rules"] for name, r in objects.of("Role").items()}


class Account:
    """A service account in a new namespace, with the rules of a Role."""

    def __init__(self, plane: ControlPlane, rules: list) -> None:
        self.namespace = Namespace(plane)
        self.namespace.add_pod("w-0", "127.0.0.1:7000")
        self.token = plane.service_account(self.namespace.name, "service")
        role = {"metadata": {"name": "role"}, "rules": rules}
        binding = {
            "metadata": {"name": "role"},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "role"},
            "subjects": [
                {"kind": "ServiceAccount", "name": "service", "namespace": self.namespace.name}
            ],
        }
        with plane.client() as client:
            api = kubernetes.client.RbacAuthorizationV1Api(client)
            api.create_namespaced_role(self.namespace.name, role)
            api.create_namespaced_role_binding(self.namespace.name, binding)

    async def own(self, condition) -> None:
        """Runs a scheduler's ownership until the condition is met."""
        discovery, driven = self.namespace.discovery(self.token), Driven()
        api = await connect(discovery)
        ownership = Ownership(api, discovery, WORKERS, QUICK, member="s-0", drives=driven)
        running = asyncio.create_task(ownership.run())
        try:
            async with asyncio.timeout(30):
                while not condition(ownership):  # noqa: ASYNC110 the conditions are of many kinds
                    await asyncio.sleep(0.02)
        finally:
            running.cancel()
            await asyncio.wait([running])


async def test_a_router_finds_pods_with_its_role(control_plane: ControlPlane, roles, caplog):
    account = Account(control_plane, roles["router"])
    async with Sets(PodPeers(account.namespace.discovery(account.token), WORKERS)) as sets:
        await sets.until(lambda peers: "w-0" in peers)
        account.namespace.add_pod("w-1", "127.0.0.1:7001")
        await sets.until(lambda peers: "w-1" in peers)
    assert "forbidden" not in caplog.text
    assert [rule["verbs"] for rule in roles["router"]] == [[*PODS]]


async def test_a_scheduler_owns_workers_with_its_role(control_plane: ControlPlane, roles, caplog):
    account = Account(control_plane, roles["scheduler"])
    await account.own(lambda it: it.num_renewals > 1 and "w-0" in it.owned)
    assert "forbidden" not in caplog.text


@pytest.mark.parametrize(
    ("resource", "verb"),
    [*(("pods", verb) for verb in PODS), *(("leases", verb) for verb in LEASES)],
)
async def test_no_verb_can_be_left_out(
    control_plane: ControlPlane, roles, caplog, resource: str, verb: str
):
    rules = copy.deepcopy(roles["scheduler"])
    (rule,) = (rule for rule in rules if rule["resources"] == [resource])
    rule["verbs"].remove(verb)
    account = Account(control_plane, rules)
    lacking = f'cannot {verb} resource "{resource}"'
    await account.own(lambda _: lacking in caplog.text)


async def control(account: Account, pool: str) -> StatefulSet:
    """Two steps of a controller that the pool is too small for."""
    scaled = StatefulSet(account.namespace, pool)
    scaled.kv_use = 1.2
    async with await connect(account.namespace.discovery(account.token)) as api:
        controller = scaled.controller(api)
        for _ in range(2):
            await controller.step()
    return scaled


async def test_a_controller_scales_its_pools_with_its_role(
    control_plane: ControlPlane, roles, caplog
):
    scaled = await control(Account(control_plane, roles["pool-controller"]), SCALED)
    assert scaled.replicas() == 5
    assert "forbidden" not in caplog.text


async def test_a_controller_can_scale_nothing_else(control_plane: ControlPlane, roles, caplog):
    scaled = await control(Account(control_plane, roles["pool-controller"]), "another")
    assert scaled.replicas() == 2
    assert 'statefulsets.apps "another" is forbidden' in caplog.text


@pytest.mark.parametrize(("resource", "verb"), [*SCALE, *LEADING])
async def test_no_verb_of_a_controller_can_be_left_out(
    control_plane: ControlPlane, roles, caplog, resource: str, verb: str
):
    rules = copy.deepcopy(roles["pool-controller"])
    for rule in rules:
        if rule["resources"] == [resource] and verb in rule["verbs"]:
            rule["verbs"].remove(verb)
    rules = [rule for rule in rules if rule["verbs"]]
    await control(Account(control_plane, rules), SCALED)
    assert f'cannot {verb} resource "{resource}"' in caplog.text


def test_the_roles_hold_no_other_verb(roles):
    granted = {
        (*rule["resources"], verb)
        for name in ("router", "scheduler")
        for rule in roles[name]
        for verb in rule["verbs"]
    }
    assert granted == {("pods", verb) for verb in PODS} | {("leases", verb) for verb in LEASES}
    of_controller = [
        (*rule["resources"], verb) for rule in roles["pool-controller"] for verb in rule["verbs"]
    ]
    assert of_controller == [*SCALE, *LEADING]
