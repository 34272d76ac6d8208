"""The values of each component, and what components have in common."""

from collections.abc import Mapping
from typing import Any

from helm import settings
from helm.declare import (
    Schema,
    Section,
    Value,
    choice,
    environment,
    integer,
    kube_list,
    kube_object,
    number,
    quantity,
    resources,
    string_map,
    strings,
    switch,
    text,
)

Values = Mapping[str, Value | Section]


def _image(repository: str, tag: str = "", registry: str = "") -> Section:
    return Section(
        "The container image.",
        {
            "registry": text(registry, "Registry, where `images.registry` names none."),
            "repository": text(repository, "Path of the image in the registry."),
            "tag": text(tag, "Tag; empty is the chart's appVersion." if not tag else "Tag."),
            "digest": text(
                "",
                "Digest, which wins over the tag; for installations that must not change.",
                pattern="^(sha256:[0-9a-f]{64})?$",
            ),
        },
    )


def placement() -> Values:
    """Where pods may run. Every pod has these; what a component leaves empty is podDefaults'."""
    return {
        "nodeSelector": string_map({}, "Labels that a node must have to run the pods."),
        "tolerations": kube_list([], "Taints of nodes that the pods tolerate."),
        "affinity": kube_object({}, "Affinity of the pods to nodes and other pods."),
        "topologySpreadConstraints": kube_list(
            [],
            "How pods are spread; a constraint without labelSelector gets the component's own.",
            required="topologyKey",
        ),
        "priorityClassName": text("", "Priority class of the pods."),
        "runtimeClassName": text("", "Runtime class of the pods, e.g. `nvidia`."),
    }


def pod(requests: Mapping[str, Any]) -> Values:
    """What each component's pods may have besides."""
    return {
        "resources": resources(
            {"requests": dict(requests)}, "Requests and limits of the container."
        ),
        **placement(),
        "podLabels": string_map({}, "More labels of the pods."),
        "podAnnotations": string_map({}, "More annotations of the pods."),
        "extraEnv": environment("More environment variables; the same name replaces the chart's."),
        "extraEnvFrom": kube_list([], "Secrets and ConfigMaps with environment variables."),
        "extraVolumes": kube_list(
            [], "More volumes of the pods; the same name replaces the chart's.", required="name"
        ),
        "extraVolumeMounts": kube_list(
            [],
            "More mounts of the container; the same mountPath replaces the chart's.",
            required="name",
        ),
        "initContainers": kube_list([], "Containers that run first.", required="name"),
        "extraContainers": kube_list([], "Containers beside the service.", required="name"),
    }


def _service(name: str, requests: Mapping[str, Any], pre_stop_s: int = 0) -> Values:
    """What router, scheduler and gpuworker have in common."""
    return {
        "image": _image(f"headrace-{name}"),
        "config": settings.config(name),
        "extraArgs": strings([], "More flags of the service; flags win over `config`."),
        "drainTimeoutSeconds": integer(30, "Time to finish work after SIGTERM."),
        "preStopSeconds": integer(
            pre_stop_s, "Wait before SIGTERM, in which load balancers learn that the pod goes away."
        ),
        "terminationGracePeriodSeconds": integer(
            60, "Must be at least preStopSeconds + drainTimeoutSeconds + 5.", least=1
        ),
        **pod(requests),
    }


def _autoscaling(what: str, *, least: int, more: Mapping[str, str] | None = None) -> Section:
    """more: what else may set the number, and what it does."""
    types = {
        "none": "keeps `replicas`",
        "hpa": "makes a HorizontalPodAutoscaler",
        "keda": "a ScaledObject",
        **(more or {}),
    }
    meaning = ", ".join(f"`{name}` {does}" for name, does in types.items())
    return Section(
        f"Who sets the number of {what}.",
        {
            "type": choice("none", list(types), f"{meaning}."),
            "minReplicas": integer(1, "Fewest pods; 0 is not for `hpa`.", least=least),
            "maxReplicas": integer(4, "Most pods.", least=1),
            "metrics": kube_list([], "Metrics of `hpa` (autoscaling/v2).", required="type"),
            "behavior": kube_object({}, "How fast `hpa` goes up and down."),
            "triggers": kube_list([], "Triggers of `keda`.", required="type"),
            "pollingInterval": integer(30, "Seconds between two looks of `keda`.", least=1),
            "cooldownPeriod": integer(300, "Seconds before `keda` goes down to 0."),
        },
    )


WORKER: Values = {
    "replicas": integer(1, "Workers of the pool, without autoscaling."),
    "maxReplicas": integer(
        0,
        "Workers whose names schedulers get in advance: up to so many can be added without"
        " restarting schedulers. Autoscaling has its own.",
    ),
    "role": choice("mixed", ["mixed", "prefill", "decode"], "What schedulers use the pool for."),
    "model": text("", "Other files of the same model, e.g. in fewer bits; empty is `model.name`."),
    "dtype": choice(
        "auto", ["auto", "float32", "bfloat16", "float16"], "Number format of the computation."
    ),
    "gpu": Section(
        "The accelerator of a worker.",
        {
            "count": integer(
                1,
                "GPUs of a worker: 1, or 0 to run on the CPU. A worker cannot drive several yet.",
                most=1,
            ),
            "resource": text(
                "nvidia.com/gpu",
                "Name of the resource, e.g. `amd.com/gpu` or `nvidia.com/mig-1g.10gb`.",
                pattern=r"^[a-z0-9.-]+/[A-Za-z0-9._-]+$",
            ),
            "tolerateTaint": switch(True, "Tolerate the taint that is named like the resource."),
        },
    ),
    "sharedMemory": Section(
        "Shared memory of a worker.",
        {
            "enabled": switch(True, "Mount memory at /dev/shm; counts towards the memory limit."),
            "sizeLimit": quantity("1Gi", "Size of /dev/shm."),
        },
    ),
    "leaderWorkerSet": Section(
        "Groups of pods that serve one model together.",
        {
            "enabled": switch(
                False,
                "Make a LeaderWorkerSet; workers refuse to start in it, because a worker cannot"
                " split a model over nodes yet.",
            ),
            "size": integer(2, "Pods of a group.", least=2),
        },
    ),
    **_service("gpuworker", {"cpu": "2", "memory": "4Gi"}),
    "autoscaling": _autoscaling(
        "workers", least=0, more={"controller": "lets `poolController` decide"}
    ),
}


def pools() -> Value:
    own = Section("", WORKER).schema(is_whole=False)["properties"]
    name = {
        "type": "string",
        "pattern": "^[a-z0-9]([a-z0-9-]*[a-z0-9])?$",
        "maxLength": 15,
        "description": "Name of the pool, part of its pods' names.",
    }
    item: Schema = {
        "type": "object",
        "required": ["name"],
        "additionalProperties": False,
        "properties": {"name": name, **own},
    }
    return Value(
        [{"name": "default"}],
        "Pools of workers. Each has a `name` (at most 15 characters) and any value of `gpuworker`,"
        " which then holds for that pool; maps are merged, lists replaced.",
        {"type": "array", "minItems": 1, "items": item},
    )


STORE = Section(
    "The status store.",
    {
        "type": choice(
            "valkey",
            ["valkey", "external", "none"],
            "`valkey` is built in, `external` an existing Redis or Valkey; `none`: no records.",
        ),
        "external": Section(
            "A Redis or Valkey that is there.",
            {
                "url": text(
                    "",
                    "redis://, rediss://, redis+sentinel://HOST:PORT,HOST:PORT/MASTER or"
                    " redis+cluster://HOST:PORT,HOST:PORT; the chart puts it into a Secret.",
                    pattern=r"^(rediss?(\+(sentinel|cluster))?://.+)?$",
                ),
                "existingSecret": text("", "A Secret that holds the URL."),
                "key": text("url", "Key in that Secret."),
                "port": integer(
                    6379, "Port that egress policies open for it.", least=1, most=65535
                ),
            },
        ),
        "valkey": Section(
            "The built-in Valkey.",
            {
                "image": _image("valkey/valkey", "9.0", "docker.io"),
                "password": text(
                    "",
                    "Password; an empty one is generated once and kept.",
                    pattern="^[A-Za-z0-9_-]*$",
                ),
                "existingSecret": text(
                    "", "A Secret with keys valkey.conf (`requirepass ...`) and url."
                ),
                "persistence": Section(
                    "Whether records outlive the pod.",
                    {
                        "enabled": switch(
                            False, "Keep the data in a claim, which outlives the pod."
                        ),
                        "size": quantity("1Gi", "Size of the claim."),
                        "storageClassName": text(
                            "", "Storage class of that claim; the cluster's default if empty."
                        ),
                    },
                ),
                **pod({"cpu": "100m", "memory": "128Mi"}),
            },
        ),
    },
)

ROUTER = Section(
    "The routers: text in, text out.",
    {
        "replicas": integer(2, "Routers, without autoscaling.", least=1),
        "service": Section(
            "How clients reach the routers.",
            {
                "type": choice(
                    "ClusterIP", ["ClusterIP", "NodePort", "LoadBalancer"], "Type of the Service."
                ),
                "port": integer(8700, "Port of the Service.", least=1, most=65535),
                "nodePort": integer(
                    0,
                    "Port on the nodes, for NodePort and LoadBalancer; 0 takes a free one.",
                    most=65535,
                ),
                "annotations": string_map({}, "Annotations, e.g. for a load balancer."),
                "loadBalancerClass": text("", "Class of the load balancer."),
                "loadBalancerSourceRanges": strings([], "Addresses that may connect."),
                "appProtocol": text(
                    "", "Protocol, for gateways; empty is kubernetes.io/h2c without TLS."
                ),
            },
        ),
        **_service("router", {"cpu": "500m", "memory": "1Gi"}, pre_stop_s=5),
        "autoscaling": _autoscaling("routers", least=1),
    },
)

SCHEDULER = Section(
    "The schedulers: each owns workers and decides their steps.",
    {
        "replicas": integer(
            1,
            "Schedulers; with static discovery, worker i of pool p belongs to scheduler (i + p) mod"
            " replicas.",
            least=1,
        ),
        **_service("scheduler", {"cpu": "500m", "memory": "512Mi"}),
    },
)

CONTROLLER = Section(
    "`headrace pool-controller`, which runs where a pool's autoscaling.type is `controller`;"
    " latencies are the 95th percentiles of the last minute.",
    {
        "replicas": integer(1, "Controllers; of several one leads, by a Lease.", least=1),
        "dryRun": switch(
            False, "Log what would be changed and change nothing; pools keep `replicas`."
        ),
        "kvUse": number(
            0.8, "Fraction of a pool's KV blocks that should be in use; 0: no target.", most=1
        ),
        "queuedPerWorker": number(2, "Requests that may wait in the routers for each worker."),
        "queueWaitSeconds": number(
            0, "Seconds until a worker begins with a request; 0: no target.", most=600
        ),
        "ttftSeconds": number(0, "Seconds to a request's first token; 0: no target.", most=10),
        "tpotSeconds": number(0, "Seconds a token after the first; 0: no target.", most=2.5),
        "roles": switch(
            False, "Move workers between prefill and decode; needs tpotSeconds. See docs first."
        ),
        "upAfterSeconds": integer(15, "How long a pool is overloaded before it grows."),
        "downAfterSeconds": integer(
            300, "How long a pool could do with one worker less before it shrinks."
        ),
        "dwellSeconds": integer(60, "Least time between two changes of a pool."),
        "extraArgs": strings([], "More flags of `headrace pool-controller`."),
        **pod({"cpu": "50m", "memory": "128Mi"}),
    },
)

MONITORING = Section(
    "Metrics, and probes over HTTP, on an admin port (8710) of every pod.",
    {
        "enabled": switch(
            False,
            "Open the port. With auth.enabled, /metrics wants the metrics token, which opens"
            " nothing else, or the token of the pod's service.",
        ),
        "scrapers": kube_list(
            [], "Peers that the network policies let reach the port; empty is nobody."
        ),
        "podMonitors": Section(
            "PodMonitors for the Prometheus operator (monitoring.coreos.com/v1).",
            {
                "enabled": switch(False, "Make the PodMonitors."),
                "interval": text("15s", "Time between two scrapes."),
                "labels": string_map({}, "Labels by which a Prometheus selects them."),
            },
        ),
        "rules": Section(
            "Alerts as a PrometheusRule (monitoring.coreos.com/v1): monitoring/rules.yaml.",
            {
                "enabled": switch(False, "Make the PrometheusRule."),
                "labels": string_map({}, "Labels by which a Prometheus selects it."),
            },
        ),
        "dashboard": Section(
            "Grafana's dashboard as a ConfigMap: monitoring/dashboard.json.",
            {
                "enabled": switch(False, "Make the ConfigMap."),
                "labels": string_map(
                    {"grafana_dashboard": "1"}, "Labels by which Grafana's sidecar finds it."
                ),
            },
        ),
    },
)
