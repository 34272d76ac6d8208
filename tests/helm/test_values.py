"""Values: what is generated of them, and which are refused with what words."""

import json
import re

import pytest
import yaml

from docs import generate as docs_generate
from helm import generate
from helm.values import CHART as VALUES
from tests.helm.chart import CHART, RefusedError

README = (CHART / "README.md").read_text(encoding="utf-8")


def test_the_generated_files_are_what_is_declared():
    for path, content in generate.files().items():
        assert path.read_text(encoding="utf-8") == content, f"{path.name}: run `make docs`"


def leaves(values, prefix=""):
    for key, value in values.items():
        if isinstance(value, dict) and value and prefix + key not in dict(VALUES.rows()):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key


def test_every_value_has_its_row_in_the_table():
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    rows = re.findall(r"^\| `([\w.]+)` \|", README, re.MULTILINE)
    assert set(rows) == set(leaves(values))
    assert len(rows) == len(set(rows))


def test_every_value_is_read_by_a_template():
    """By its name in some template; `enabled` and `global` are for parent charts."""
    templates = "".join(
        file.read_text(encoding="utf-8")
        for file in (CHART / "templates").rglob("*")
        if file.is_file()
    )
    unread = {
        name
        for name, _ in VALUES.rows()
        if not re.search(rf"\b{name.rpartition('.')[2]}\b", templates)
    }
    assert unread <= {"global"}


def test_the_schema_knows_no_object_that_takes_anything_by_accident():
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))

    def open_objects(part, path):
        if not isinstance(part, dict):
            return
        if "properties" in part and part.get("additionalProperties") is not False:
            yield path
        for key, value in part.get("properties", {}).items():
            yield from open_objects(value, f"{path}.{key}")
        yield from open_objects(part.get("items"), f"{path}[]")

    assert list(open_objects(schema, "")) == []


def test_one_version_of_the_chart_is_one_of_headrace():
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    pyproject = (docs_generate.PAGE.parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    assert f'version = "{chart["version"]}"' in pyproject
    assert chart["appVersion"] == chart["version"]


CLAIMS = {"type": "claimPerWorker"}
REFUSED = {
    # Helm takes away what is null, as of a section whose lines are all comments.
    "an empty section": ({"router": None}, "missing property 'router'"),
    "an empty section below": ({"store": {"valkey": None}}, "'/store': missing property 'valkey'"),
    "no number": ({"router": {"replicas": None}}, "'/router': missing property 'replicas'"),
    "a pool without its GPU": ({"pools": [{"name": "a", "gpu": None}]}, "/pools/0/gpu"),
    "a pull secret as text": ({"images": {"pullSecrets": ["pull"]}}, "/images/pullSecrets/0"),
    "a truth value as an annotation": (
        {"router": {"podAnnotations": {"prometheus.io/scrape": True}}},
        "/router/podAnnotations/prometheus.io",
    ),
    "what other charts call autoscaling": (
        {"router": {"autoscaling": {"enabled": True}}},
        "'/router/autoscaling': additional properties 'enabled' not allowed",
    ),
    "what other charts call pull secrets": (
        {"imagePullSecrets": [{"name": "pull"}]},
        "additional properties 'imagePullSecrets' not allowed",
    ),
    "a number among the flags": ({"router": {"extraArgs": ["--x", 1]}}, "/router/extraArgs/1"),
    "a number as the name of a pool": ({"pools": [{"name": 3}]}, "/pools/0/name"),
    "a part of a pool, by its index": ({"pools": [{"replicas": 2}]}, "missing property 'name'"),
    "no router": ({"router": {"replicas": 0}}, "/router/replicas"),
    "no pod may go": ({"pdb": {"maxUnavailable": 0}}, "/pdb/maxUnavailable"),
    "replicaz": ({"router": {"replicaz": 1}}, "replicaz"),
    "a number as text": ({"router": {"replicas": "2"}}, "/router/replicas"),
    "http probes": ({"probes": {"type": "http"}}, "probes.type: http needs monitoring.enabled"),
    "no time to load": ({"probes": {"startupBudgetSeconds": 300}}, "startupBudgetSeconds"),
    "two GPUs": ({"gpuworker": {"gpu": {"count": 2}}}, "/gpuworker/gpu/count"),
    "a setting that nobody reads": (
        {"router": {"config": {"router": {"max_que": 1}}}},
        "max_que",
    ),
    "a setting that the chart sets": (
        {"scheduler": {"config": {"serving": {"listen": "x"}}}},
        "listen",
    ),
    "a setting of another service": (
        {"router": {"config": {"kv_cache": {}}}},
        "kv_cache",
    ),
    "a setting beyond its bounds": (
        {"scheduler": {"config": {"scheduler": {"watermark": 1.5}}}},
        "watermark",
    ),
    "an unknown value of a pool": ({"pools": [{"name": "a", "gpus": 1}]}, "gpus"),
    "a pool without a name": ({"pools": [{}]}, "name"),
    "no pool": ({"pools": []}, "/pools"),
    "a long name": ({"pools": [{"name": "a-very-long-name"}]}, "/pools/0/name"),
    "a scheme": (
        {"store": {"type": "external", "external": {"url": "mysql://x"}}},
        "/store/external/url",
    ),
    "two pools of one name": ({"pools": [{"name": "a"}, {"name": "a"}]}, "two pools"),
    "too little grace": (
        {"router": {"drainTimeoutSeconds": 60}},
        "router.terminationGracePeriodSeconds is 60: Kubernetes would kill",
    ),
    "too little grace of a pool": (
        {"pools": [{"name": "a", "terminationGracePeriodSeconds": 10}]},
        "pools[a].terminationGracePeriodSeconds is 10",
    ),
    "a group of one": ({"gpuworker": {"leaderWorkerSet": {"size": 1}}}, "leaderWorkerSet/size"),
    "groups that are scaled": (
        {
            "gpuworker": {
                "leaderWorkerSet": {"enabled": True},
                "autoscaling": {"type": "controller"},
            }
        },
        "groups have replicas, and no autoscaling",
    ),
    "groups with claims": (
        {"gpuworker": {"leaderWorkerSet": {"enabled": True}}, "modelCache": CLAIMS},
        "groups have no claims of their own",
    ),
    "a scheduler without a worker": ({"scheduler": {"replicas": 2}}, "would own no worker"),
    "no metrics": ({"router": {"autoscaling": {"type": "hpa"}}}, "needs at least one metric"),
    "no triggers": (
        {"gpuworker": {"autoscaling": {"type": "keda"}}},
        "needs at least one trigger",
    ),
    "a controller of routers": (
        {"router": {"autoscaling": {"type": "controller"}}},
        "/router/autoscaling/type",
    ),
    "roles without a target": ({"poolController": {"roles": True}}, "needs tpotSeconds"),
    "hpa to nothing": (
        {
            "gpuworker": {
                "autoscaling": {"type": "hpa", "minReplicas": 0, "metrics": [{"type": "Resource"}]}
            }
        },
        "needs at least 1",
    ),
    "a range upside down": (
        {
            "router": {
                "autoscaling": {"type": "keda", "minReplicas": 9, "triggers": [{"type": "cpu"}]}
            }
        },
        "minReplicas is greater than maxReplicas",
    ),
    "a GPU among the resources": (
        {"pools": [{"name": "a", "resources": {"limits": {"nvidia.com/gpu": 2}}}]},
        "pools[a].resources: nvidia.com/gpu is set by gpu.count",
    ),
    "a number in the environment": (
        {"router": {"extraEnv": [{"name": "A", "value": 1}]}},
        "/router/extraEnv/0/value",
    ),
    "a truth value as a label": (
        {"gpuworker": {"nodeSelector": {"nvidia.com/gpu.present": True}}},
        "/gpuworker/nodeSelector",
    ),
    "a number as a tag": ({"router": {"image": {"tag": 1.1}}}, "/router/image/tag"),
    "tls of nothing": ({"tls": {"enabled": True}}, "tls.existingSecrets.router"),
    "gRPC probes and TLS": (
        {"tls": {"enabled": True, "certManager": {"enabled": True}}, "probes": {"type": "grpc"}},
        "do not speak TLS",
    ),
    "no external store": ({"store": {"type": "external"}}, "either url or existingSecret"),
    "two external stores": (
        {"store": {"type": "external", "external": {"url": "redis://a", "existingSecret": "b"}}},
        "either url or existingSecret",
    ),
    "two passwords": (
        {"store": {"valkey": {"existingSecret": "a"}}},
        "either password or existingSecret",
    ),
    "two sources of tokens": (
        {"auth": {"existingSecret": "a"}},
        "either tokens or existingSecret",
    ),
    "two tokens of the hub": (
        {"hfToken": {"value": "a", "existingSecret": "b"}},
        "either value or existingSecret",
    ),
    "a claim without a name": ({"modelCache": {"type": "existingClaim"}}, "name the claim"),
    "a folder without a name": ({"kernelCache": {"type": "hostPath"}}, "name the folder"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_wrong_value_is_refused_by_its_name(chart, case):
    values, words = REFUSED[case]
    with pytest.raises(RefusedError) as refused:
        chart.render(values)
    assert words in str(refused.value)


def test_a_parent_chart_may_add_its_own(chart):
    assert chart.render({"global": {"team": "x"}, "enabled": True})
