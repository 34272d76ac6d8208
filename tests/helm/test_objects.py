"""What the chart's objects say, case by case."""

import base64
import re

import pytest

from headrace.cli.pool_controller import pool_controller
from tests.helm.cases import CASES, CERT_MANAGER, CPU_METRIC, EXTRAS, SUPPLIED, TRIGGER
from tests.helm.chart import RefusedError, merged

CONTROLLED = {"gpuworker": {"autoscaling": {"type": "controller"}}}
ALL_PODS = {
    "hr-headrace-router",
    "hr-headrace-scheduler",
    "hr-headrace-gpuworker-default",
    "hr-headrace-store",
    "hr-headrace-test",
}

# Who calls the Kubernetes API, in the cases in which anybody does.
CALL_KUBERNETES = {
    "discovery by labels": {"router", "scheduler"},
    "pool controller": {"pool-controller"},
}


def container(pod):
    return pod["containers"][0]


def volume(pod, name):
    return next((each for each in pod["volumes"] if each["name"] == name), None)


@pytest.mark.parametrize("case", CASES)
def test_every_container_is_restricted(chart, case):
    for name, pod in chart.render(CASES[case]).pods().items():
        assert pod["securityContext"]["runAsNonRoot"] is True, name
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        calls_kubernetes = name.removeprefix("hr-headrace-") in CALL_KUBERNETES.get(case, ())
        assert pod["automountServiceAccountToken"] is calls_kubernetes, name
        context = container(pod)["securityContext"]
        assert context["readOnlyRootFilesystem"] is True
        assert context["allowPrivilegeEscalation"] is False
        assert context["capabilities"] == {"drop": ["ALL"]}


@pytest.mark.parametrize("case", CASES)
def test_volumes_are_there_and_are_mounted_once(chart, case):
    for name, pod in chart.render(CASES[case]).pods().items():
        mounts = container(pod)["volumeMounts"]
        volumes = [each["name"] for each in pod["volumes"]]
        if case == "claim per worker" and "gpuworker" in name:
            volumes.append("models")
        if case == "kept store" and name.endswith("store"):
            volumes.append("data")
        assert {each["name"] for each in mounts} == set(volumes), name
        assert len({each["mountPath"] for each in mounts}) == len(mounts), name
        assert len(set(volumes)) == len(volumes), name


@pytest.mark.parametrize("case", CASES)
def test_selectors_find_the_pods_of_their_component(chart, case):
    objects = chart.render(CASES[case])
    labels = {
        name: each["spec"]["template"]["metadata"]["labels"]
        for kind in ("Deployment", "StatefulSet")
        for name, each in objects.of(kind).items()
    }
    for name, each in objects.of("LeaderWorkerSet").items():
        labels[name] = each["spec"]["leaderWorkerTemplate"]["workerTemplate"]["metadata"]["labels"]
    selectors = {name: s["spec"]["selector"] for name, s in objects.of("Service").items()}
    for kind in ("PodDisruptionBudget", "Deployment", "StatefulSet"):
        for name, each in objects.of(kind).items():
            selectors[f"{kind} {name}"] = each["spec"]["selector"]["matchLabels"]
    for name, selector in selectors.items():
        found = [pod for pod, own in labels.items() if selector.items() <= own.items()]
        assert found == [name.split()[-1].removesuffix("-headless")], name


def test_services_do_not_put_their_ports_into_the_environment(chart):
    """HEADRACE_ROUTER_PORT, which Kubernetes makes of a Service, is an unknown setting."""
    objects = chart.render()
    assert set(objects.pods()) == ALL_PODS
    assert all(pod["enableServiceLinks"] is False for pod in objects.pods().values())


def test_every_pod_is_placed_by_its_own_values(chart):
    components = ("router", "scheduler", "gpuworker", "tests", "poolController")
    values = merged(dict.fromkeys(components, EXTRAS), CONTROLLED)
    images = {"pullSecrets": [{"name": "pull"}]}
    pods = chart.render({**values, "store": {"valkey": EXTRAS}, "images": images}).pods()
    assert set(pods) == {*ALL_PODS, "hr-headrace-pool-controller"}
    for name, pod in pods.items():
        assert pod["nodeSelector"] == EXTRAS["nodeSelector"], name
        assert EXTRAS["tolerations"][0] in pod["tolerations"], name
        assert pod["affinity"] == EXTRAS["affinity"], name
        assert pod["priorityClassName"] == "high", name
        assert pod["imagePullSecrets"] == images["pullSecrets"], name
        assert pod["runtimeClassName"] == "nvidia", name
        assert pod["topologySpreadConstraints"][0]["topologyKey"] == "zone", name
        assert pod["topologySpreadConstraints"][0]["labelSelector"]["matchLabels"], name
        assert pod["initContainers"][0]["name"] == "wait", name
        assert container(pod)["resources"]["limits"]["memory"] == "2Gi", name
        assert container(pod)["envFrom"] == EXTRAS["extraEnvFrom"], name
        assert EXTRAS["extraEnv"][0] in container(pod)["env"], name


def test_every_pod_is_placed_by_the_defaults(chart):
    pods = chart.render(
        {
            "podDefaults": {
                **{key: EXTRAS[key] for key in ("nodeSelector", "tolerations", "affinity")},
                "priorityClassName": "low",
                "runtimeClassName": "gvisor",
            },
            "gpuworker": {"runtimeClassName": "nvidia"},
        }
    ).pods()
    for name, pod in pods.items():
        assert pod["nodeSelector"] == EXTRAS["nodeSelector"], name
        assert EXTRAS["tolerations"][0] in pod["tolerations"], name
        assert pod["affinity"] == EXTRAS["affinity"], name
        assert pod["priorityClassName"] == "low", name
        assert pod["runtimeClassName"] == ("nvidia" if "gpuworker" in name else "gvisor"), name
        assert "labelSelector" in pod["topologySpreadConstraints"][0]


def test_a_pool_takes_a_gpu_and_tolerates_its_taint(chart):
    pods = chart.render(
        {
            "pools": [
                {"name": "a", "resources": {"limits": {"memory": "8Gi"}}},
                {"name": "b", "gpu": {"resource": "amd.com/gpu", "tolerateTaint": False}},
                {"name": "c", "gpu": {"count": 0}},
            ]
        }
    ).pods()
    a, b, c = (pods[f"hr-headrace-gpuworker-{pool}"] for pool in "abc")
    assert container(a)["resources"]["limits"] == {"nvidia.com/gpu": "1", "memory": "8Gi"}
    assert a["tolerations"] == [
        {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
    ]
    assert container(b)["resources"]["limits"] == {"amd.com/gpu": "1"}
    assert "tolerations" not in b
    assert "limits" not in container(c)["resources"]
    assert "tolerations" not in c


def test_an_update_of_a_pool_needs_no_free_gpu(chart):
    pool = chart.render().one("StatefulSet", "gpuworker-default")["spec"]
    assert pool["updateStrategy"] == {"type": "RollingUpdate"}
    # With OrderedReady a revision that never gets ready could not be replaced.
    assert pool["podManagementPolicy"] == "Parallel"


@pytest.mark.parametrize(("kind", "least"), [("hpa", 1), ("keda", 0)])
def test_who_scales_is_alone_in_setting_replicas(chart, kind, least):
    scaling = {
        "type": kind,
        "minReplicas": least,
        "metrics": [CPU_METRIC],
        "triggers": [TRIGGER],
    }
    objects = chart.render({"gpuworker": {"autoscaling": scaling}})
    assert "replicas" not in objects.one("StatefulSet", "gpuworker-default")["spec"]
    assert "replicas" in objects.one("Deployment", "router")["spec"]
    kinds = {"hpa": "HorizontalPodAutoscaler", "keda": "ScaledObject"}
    assert set(objects.of(kinds.pop(kind))) == {"hr-headrace-gpuworker-default"}
    assert not objects.of(*kinds.values())
    assert "hr-headrace-pool-controller" not in objects.of("Deployment")


def test_a_pool_that_the_controller_scales_has_no_replicas_and_no_other_scaler(chart):
    objects = chart.render(CASES["pool controller"])
    sets = {name[-1]: each["spec"] for name, each in objects.of("StatefulSet").items()}
    assert [pool for pool in "abc" if "replicas" not in sets[pool]] == ["a", "b"]
    assert not objects.of("HorizontalPodAutoscaler") | objects.of("ScaledObject")
    command = container(objects.pods()["hr-headrace-pool-controller"])["command"]
    assert [flag for flag in command if flag.startswith("--pool=")] == [
        "--pool=hr-headrace-gpuworker-a=0:4",
        "--pool=hr-headrace-gpuworker-b=1:9",
    ]
    assert {"--kv-use=0.5", "--lease-name=hr-headrace-pool-controller"} <= set(command)
    # Its flags are those of the command.
    assert pool_controller.make_context("it", command[4:]).params["kv_use"] == 0.5


def test_a_controller_that_only_says_what_it_would_do_leaves_the_chart_its_replicas(chart):
    values = {"poolController": {"dryRun": True}, "gpuworker": {"replicas": 7}}
    objects = chart.render(merged(CONTROLLED, values))
    assert objects.one("StatefulSet", "gpuworker-default")["spec"]["replicas"] == 7
    file = objects.file("scheduler", "hr-headrace-scheduler-0.toml")
    assert "gpuworker-default-6." in file
    assert "--dry-run" in container(objects.pods()["hr-headrace-pool-controller"])["command"]


def test_a_worker_has_shared_memory_and_caches(chart):
    pod = chart.render().pods()["hr-headrace-gpuworker-default"]
    assert volume(pod, "shm")["emptyDir"] == {"medium": "Memory", "sizeLimit": "1Gi"}
    env = {each["name"]: each.get("value") for each in container(pod)["env"]}
    mounts = {each["mountPath"] for each in container(pod)["volumeMounts"]}
    assert "/dev/shm" in mounts
    for name in ("HEADRACE_CACHE", "HF_HOME", "TRITON_CACHE_DIR"):
        assert any(env[name].startswith(mount) for mount in mounts), name


def test_a_claim_per_worker_is_of_workers_only(chart):
    objects = chart.render({"modelCache": {"type": "claimPerWorker", "size": "50Gi"}})
    template = objects.one("StatefulSet", "gpuworker-default")["spec"]["volumeClaimTemplates"][0]
    assert template["spec"]["resources"]["requests"]["storage"] == "50Gi"
    assert volume(objects.pods()["hr-headrace-router"], "models")["emptyDir"] == {}


def test_a_pod_sees_the_tokens_that_it_uses_and_no_others(chart):
    def keys(pod):
        return [item["key"] for item in volume(pod, "tokens")["secret"]["items"]]

    pods = chart.render().pods()
    assert keys(pods["hr-headrace-router"]) == ["router-token", "scheduler-token"]
    assert keys(pods["hr-headrace-scheduler"]) == ["scheduler-token", "gpuworker-token"]
    assert keys(pods["hr-headrace-gpuworker-default"]) == ["gpuworker-token"]
    assert keys(pods["hr-headrace-test"]) == ["router-token"]
    assert volume(pods["hr-headrace-store"], "tokens") is None


def test_routers_alone_see_the_hashes_of_api_keys(chart):
    objects = chart.render(CASES["api keys"])
    pods = objects.pods()
    source = volume(pods.pop("hr-headrace-router"), "keys")["secret"]
    assert source["secretName"] == "our-keys"
    assert source["items"] == [{"key": "hashes", "path": "keys.toml"}]
    assert not any(volume(pod, "keys") for pod in pods.values())
    router = objects.file("router", "router.toml")
    assert 'api_keys_file = "/etc/headrace/keys/keys.toml"' in router


def test_secrets_are_in_secrets_and_nowhere_else(chart):
    objects = chart.render({"hfToken": {"value": "hidden-5"}, "tls": SUPPLIED})
    secrets = [f"hidden-{number}" for number in range(1, 6)]
    others = str([each for each in objects if each["kind"] != "Secret"])
    assert "hidden" not in others
    assert base64.b64encode(b"hidden")[:-2].decode() not in others
    kept = str([each for each in objects if each["kind"] == "Secret"])
    assert all(secret in kept for secret in secrets)


def test_a_new_secret_or_setting_restarts_the_pods_that_read_it(chart):
    def checksums(values):
        objects = chart.render(values)
        pods = {**objects.of("Deployment"), **objects.of("StatefulSet")}
        return {
            name.removeprefix("hr-headrace-"): pod["spec"]["template"]["metadata"]["annotations"]
            for name, pod in pods.items()
        }

    before = checksums({})
    rotated = checksums({"auth": {"tokens": {"router": "new"}}})
    assert all(before[name] != rotated[name] for name in ("router", "scheduler"))
    one = checksums({"router": {"config": {"router": {"max_live_requests": 5}}}})
    assert {name for name in before if before[name] != one[name]} == {"router"}
    assert checksums({}) == before


def test_the_store_is_reached_by_a_url_from_a_secret(chart):
    def source(values, pod, service):
        env = container(chart.render(values).pods()[f"hr-headrace-{pod}"])["env"]
        name = f"HEADRACE_{service}_STORE_URL"
        return next((e["valueFrom"]["secretKeyRef"] for e in env if e["name"] == name), None)

    own = {"name": "hr-headrace-store", "key": "url"}
    assert source({}, "router", "ROUTER") == own
    assert source(CASES["external store"], "scheduler", "SCHEDULER") == own
    theirs = source(CASES["store in a secret"], "router", "ROUTER")
    assert theirs == {"name": "redis", "key": "dsn"}
    assert source({"store": {"type": "none"}}, "router", "ROUTER") is None
    url = chart.render({"tls": CERT_MANAGER}).one("Secret", "store")["stringData"]["url"]
    assert url == (
        "rediss://:hidden-4@hr-headrace-store.space.svc.cluster.local:6379/0"
        "?ssl_ca_certs=/etc/headrace/tls/ca.crt"
    )


def test_a_loading_worker_is_given_its_time(chart):
    for name, pod in chart.render({"probes": {"startupBudgetSeconds": 3601}}).pods().items():
        if name.removeprefix("hr-headrace-") in ("test", "store"):
            continue
        startup = container(pod)["startupProbe"]
        assert startup["failureThreshold"] * startup["periodSeconds"] >= 3601
        assert container(pod)["livenessProbe"]["failureThreshold"] == 12


@pytest.mark.parametrize(
    ("values", "kube", "kind"),
    [
        ({}, "1.33", "grpc"),
        ({}, "1.23", "exec"),
        ({"tls": CERT_MANAGER}, "1.33", "exec"),
        ({"probes": {"type": "tcp"}}, "1.33", "tcpSocket"),
        ({"probes": {"type": "tcp"}, "tls": CERT_MANAGER}, "1.33", "tcpSocket"),
    ],
)
def test_the_kind_of_probe_fits(chart, values, kube, kind):
    pods = chart.render(values, kube=kube).pods()
    for name in ("router", "scheduler", "gpuworker-default"):
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert kind in container(pods[f"hr-headrace-{name}"])[probe]


def test_certificates_hold_the_names_that_callers_use(chart):
    objects = chart.render({"tls": CERT_MANAGER, "pools": [{"name": "a"}, {"name": "b"}]})
    names = {
        name.removeprefix("hr-headrace-"): each["spec"].get("dnsNames")
        for name, each in objects.of("Certificate").items()
    }
    assert "hr-headrace-router.space.svc.cluster.local" in names["router-tls"]
    assert "localhost" in names["router-tls"]
    assert "*.hr-headrace-scheduler.space.svc.cluster.local" in names["scheduler-tls"]
    assert "*.hr-headrace-gpuworker-b.space.svc.cluster.local" in names["gpuworker-tls"]
    assert "hr-headrace-store.space.svc.cluster.local" in names["store-tls"]
    for pod in ("scheduler", "gpuworker-b"):
        check = container(objects.pods()[f"hr-headrace-{pod}"])["readinessProbe"]["exec"]
        name = next(a for a in check["command"] if a.startswith("--server-name="))
        assert (
            name == f"--server-name=hr-headrace-{pod}-0.hr-headrace-{pod}.space.svc.cluster.local"
        )


def test_policies_let_each_service_be_called_by_its_caller_alone(chart):
    objects = chart.render(CASES["egress"])

    def peers(name, way, key):
        rules = objects.one("NetworkPolicy", name)["spec"][way]
        return [
            peer.get("podSelector", peer)["matchLabels"]["app.kubernetes.io/component"]
            for rule in rules
            for peer in rule.get(key, [])
            if "podSelector" in peer
        ]

    assert peers("scheduler", "ingress", "from") == ["router"]
    assert peers("gpuworker", "ingress", "from") == ["scheduler"]
    assert peers("store", "ingress", "from") == ["router", "scheduler"]
    assert peers("router", "ingress", "from") == ["test"]
    assert peers("router", "egress", "to") == ["scheduler", "store"]
    assert peers("scheduler", "egress", "to") == ["gpuworker", "store"]
    assert objects.one("NetworkPolicy", "store")["spec"]["egress"] == []
    ports = [
        port["port"]
        for rule in objects.one("NetworkPolicy", "gpuworker")["spec"]["egress"]
        for port in rule.get("ports", [])
    ]
    assert ports == [53, 53, 4317, 443]


def test_no_rights_are_asked_for_where_nobody_calls_kubernetes(chart):
    cases = [case for name, case in CASES.items() if name not in CALL_KUBERNETES]
    kinds = {each["kind"] for case in cases for each in chart.render(case)}
    assert not kinds & {"Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding"}


def test_a_node_can_be_drained(chart):
    """One pod may always go, and one that is not ready in any case."""
    for kube, policy in (("1.33", "AlwaysAllow"), ("1.26", None)):
        for budget in chart.render(kube=kube).of("PodDisruptionBudget").values():
            assert budget["spec"]["maxUnavailable"] == 1
            assert budget["spec"].get("unhealthyPodEvictionPolicy") == policy


def test_headless_services_name_pods_before_they_are_ready(chart):
    services = chart.render().of("Service")
    for name in ("scheduler", "gpuworker-default"):
        assert services[f"hr-headrace-{name}"]["spec"]["clusterIP"] == "None"
        assert services[f"hr-headrace-{name}"]["spec"]["publishNotReadyAddresses"] is True


def test_the_test_generates_through_the_router(chart):
    pod = chart.render({"tls": SUPPLIED}).pods()["hr-headrace-test"]
    command = container(pod)["command"]
    assert command[:2] == ["headrace", "generate"]
    assert "--server=hr-headrace-router.space.svc.cluster.local:8700" in command
    assert "--auth-token-file=/etc/headrace/tokens/router-token" in command
    assert "--tls-ca-file=/etc/headrace/tls/ca.crt" in command
    assert "--tls-cert-file=/etc/headrace/tls/tls.crt" in command


def test_long_names_stay_short_and_apart(chart):
    releases = [f"a-release-of-a-long-name-for-{stage}" for stage in ("production", "staging")]
    names = [set(chart.render(release=release).of("StatefulSet")) for release in releases]
    assert not names[0] & names[1]
    # The controller adds a dash and a hash of ten characters to make a label of at most 63.
    assert all(len(name) <= 52 for some in names for name in some)


@pytest.mark.parametrize("release", ["team.prod", "llm"])
def test_any_name_of_a_release_makes_names_of_services(chart, release):
    names = chart.render(release=release).of("Service")
    assert all(re.fullmatch("[a-z]([-a-z0-9]*[a-z0-9])?", name) for name in names)


def test_a_name_that_begins_with_a_digit_is_refused(chart):
    with pytest.raises(RefusedError, match="set fullnameOverride"):
        chart.render(release="1st")
    assert chart.render({"fullnameOverride": "first"}, release="1st")


def test_what_the_user_adds_replaces_what_has_the_same_name(chart):
    """Server-side apply refuses a list in which a name is twice."""
    extra = {
        "extraEnv": [{"name": "HF_HOME", "value": "/mine"}],
        "extraVolumes": [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "9Gi"}}],
        "extraVolumeMounts": [{"name": "scratch", "mountPath": "/tmp"}],
    }
    pod = chart.render({"gpuworker": extra}).pods()["hr-headrace-gpuworker-default"]
    env = [each for each in container(pod)["env"] if each["name"] == "HF_HOME"]
    assert env == extra["extraEnv"]
    assert volume(pod, "shm") == extra["extraVolumes"][0]
    mounts = [each for each in container(pod)["volumeMounts"] if each["mountPath"] == "/tmp"]
    assert mounts == extra["extraVolumeMounts"]
    for key in ("env", "volumeMounts"):
        ids = [each.get("mountPath") or each["name"] for each in container(pod)[key]]
        assert len(set(ids)) == len(ids)


def test_a_mirror_serves_every_image(chart):
    pods = chart.render({"images": {"registry": "mirror:5000"}}).pods()
    assert all(container(pod)["image"].startswith("mirror:5000/") for pod in pods.values())


def test_a_digest_wins(chart):
    digest = "sha256:" + "a" * 64
    pods = chart.render({"router": {"image": {"digest": digest}}}).pods()
    assert container(pods["hr-headrace-router"])["image"] == f"headrace-router@{digest}"


def test_secrets_that_nobody_gave_are_made_up(chart):
    objects = chart.render(is_secret_given=False)
    tokens = objects.one("Secret", "tokens")["stringData"]
    names = {"router-token", "scheduler-token", "gpuworker-token", "metrics-token"}
    assert set(tokens) == names
    store = objects.one("Secret", "store")["stringData"]
    assert f":{store['password']}@" in store["url"]
    assert store["valkey.conf"] == f"requirepass {store['password']}\n"
    made_up = {*tokens.values(), store["password"]}
    assert len(made_up) == 5
    assert {len(secret) for secret in made_up} == {40}


def test_with_discovery_by_labels_only_routers_and_schedulers_have_rights(chart):
    objects = chart.render(CASES["discovery by labels"])
    accounts = {name: pod["serviceAccountName"] for name, pod in objects.pods().items()}
    own = {"hr-headrace-router", "hr-headrace-scheduler"}
    assert {name for name in accounts if accounts[name] == name} == own
    assert {accounts[name] for name in accounts if name not in own} == {"hr-headrace"}
    for name, binding in objects.of("RoleBinding").items():
        assert [subject["name"] for subject in binding["subjects"]] == [name]
    file = objects.file("scheduler", "hr-headrace-scheduler-0.toml")
    (selector,) = re.findall(r'worker_selector = "(.*)"', file)
    labels = [f"app.kubernetes.io/{label}" for label in ("component=gpuworker", "instance=hr")]
    assert sorted(selector.split(",")) == [*labels, "app.kubernetes.io/name=headrace"]


def test_workers_start_again_when_discovery_changes(chart):
    checksums = set()
    for kind in ("static", "kubernetes"):
        pods = chart.render({"discovery": {"type": kind}}).one("StatefulSet", "gpuworker-default")
        metadata = pods["spec"]["template"]["metadata"]
        checksums.add(metadata["annotations"]["checksum/config"])
    assert len(checksums) == 2
