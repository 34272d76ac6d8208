"""Every value of the chart, in the order of values.yaml."""

from helm.components import (
    CONTROLLER,
    MONITORING,
    ROUTER,
    SCHEDULER,
    STORE,
    WORKER,
    placement,
    pod,
    pools,
)
from helm.declare import (
    Section,
    choice,
    integer,
    kube_list,
    kube_object,
    number_or_percent,
    quantity,
    string_map,
    strings,
    switch,
    text,
)

POD_USER = 65532
MIN_STARTUP_S = 600
NAME = "^([a-z]([a-z0-9-]*[a-z0-9])?)?$"

CHART = Section(
    "The chart.",
    {
        "nameOverride": text("", "Replaces the chart's name in names and labels.", pattern=NAME),
        "fullnameOverride": text(
            "", "Begins the name of every object, in place of release and chart.", pattern=NAME
        ),
        "clusterDomain": text(
            "cluster.local", "DNS domain of the cluster; if empty, addresses end with `.svc`."
        ),
        "commonLabels": string_map({}, "Labels of every object."),
        "commonAnnotations": string_map({}, "Annotations of every object."),
        "images": Section(
            "What holds for every image.",
            {
                "registry": text(
                    "", "Registry of every image, e.g. a mirror; replaces the images' own."
                ),
                "pullPolicy": choice(
                    "IfNotPresent", ["IfNotPresent", "Always", "Never"], "When nodes pull images."
                ),
                "pullSecrets": kube_list([], "Secrets for the registry.", required="name"),
            },
        ),
        "model": Section(
            "What is served.",
            {
                "name": text(
                    "smollm2-135m-instruct",
                    "A built-in model, `owner/name` on the Hugging Face hub, or a path in the"
                    " containers of router and gpuworker.",
                    pattern=".",
                ),
                "servedName": text("", "Name that requests use; empty is the last part of `name`."),
                "offline": switch(False, "Never ask the Hugging Face hub; files must be there."),
            },
        ),
        "hfToken": Section(
            "Token for gated models of the Hugging Face hub.",
            {
                "value": text("", "The token; the chart puts it into a Secret."),
                "existingSecret": text("", "A Secret that holds it."),
                "key": text("token", "Key in that Secret."),
            },
        ),
        "modelCache": Section(
            "Where routers and gpuworkers keep model files.",
            {
                "type": choice(
                    "emptyDir",
                    ["emptyDir", "claim", "claimPerWorker", "existingClaim", "hostPath"],
                    "`emptyDir` is lost with its pod; `claim` makes one claim for all pods;"
                    " `claimPerWorker` one for each worker, and routers have an emptyDir.",
                ),
                "sizeLimit": quantity("", "Largest size of an emptyDir; no limit if empty."),
                "size": quantity("100Gi", "Size of a claim that the chart makes."),
                "storageClassName": text(
                    "", "Storage class of that claim; the cluster's default if empty."
                ),
                "accessModes": strings(
                    ["ReadWriteMany"],
                    "Access modes of type claim; claimPerWorker is ReadWriteOnce.",
                ),
                "existingClaim": text("", "Name of an existing claim, for type existingClaim."),
                "hostPath": text(
                    "",
                    f"Folder on the nodes, for type hostPath, which user {POD_USER} can write.",
                ),
            },
        ),
        "kernelCache": Section(
            "Where gpuworkers keep compiled GPU kernels (TRITON_CACHE_DIR).",
            {
                "type": choice(
                    "modelCache",
                    ["modelCache", "emptyDir", "existingClaim", "hostPath"],
                    "`modelCache` is a folder beside the models, and lives as long.",
                ),
                "existingClaim": text("", "Name of an existing claim, for type existingClaim."),
                "hostPath": text(
                    "",
                    "Folder on the nodes, for type hostPath, which user 65532 can write.",
                ),
            },
        ),
        "auth": Section(
            "Bearer tokens: one for clients, one for each step between services; and API keys.",
            {
                "enabled": switch(True, "Ask for tokens on every port."),
                "existingSecret": text(
                    "",
                    "A Secret with keys router-token, scheduler-token and gpuworker-token, and with"
                    " monitoring.enabled metrics-token.",
                ),
                "apiKeys": Section(
                    "Keys of tenants, which clients may send to routers instead of the token.",
                    {
                        "existingSecret": text("", "A Secret with the file of hashes."),
                        "key": text(
                            "keys.toml", "Key in that Secret; `headrace keys` makes the file."
                        ),
                    },
                ),
                "tokens": Section(
                    "Tokens of the chart's own Secret; an empty one is generated once and kept.",
                    {
                        "router": text("", "Token that clients send to routers."),
                        "scheduler": text("", "Token that routers send to schedulers."),
                        "gpuworker": text("", "Token that schedulers send to gpuworkers."),
                        "metrics": text("", "Token that reads /metrics, and opens nothing else."),
                    },
                ),
            },
        ),
        "tls": Section(
            "TLS on every port, mutual between services.",
            {
                "enabled": switch(False, "Turn TLS on; needs certManager or existingSecrets."),
                "requireClientCertificates": switch(
                    False, "Clients of the router must show a certificate of its authority."
                ),
                "certManager": Section(
                    "Certificates made by cert-manager.",
                    {
                        "enabled": switch(False, "Let cert-manager make the certificates."),
                        "issuerRef": kube_object(
                            {},
                            "Issuer or ClusterIssuer; if empty, the chart makes its own authority.",
                        ),
                        "duration": text("8760h", "How long a certificate is valid."),
                        "renewBefore": text("720h", "How long before its end it is renewed."),
                    },
                ),
                "existingSecrets": Section(
                    "Secrets with tls.crt, tls.key and ca.crt.",
                    {
                        "router": text("", "Secret of the routers."),
                        "scheduler": text("", "Secret of the schedulers."),
                        "gpuworker": text("", "Secret of the gpuworkers."),
                        "store": text("", "Secret of the built-in Valkey."),
                    },
                ),
            },
        ),
        "discovery": Section(
            "How routers find schedulers, and schedulers gpuworkers.",
            {
                "type": choice(
                    "static",
                    ["static", "kubernetes"],
                    "`static` gives every scheduler the names of its workers; with `kubernetes`"
                    " routers and schedulers look for pods, and schedulers share the workers by"
                    " Leases.",
                ),
            },
        ),
        "store": STORE,
        "router": ROUTER,
        "scheduler": SCHEDULER,
        "gpuworker": Section("What holds for every pool that does not say otherwise.", WORKER),
        "pools": pools(),
        "poolController": CONTROLLER,
        "podDefaults": Section(
            "Placement of every pod that does not say otherwise.",
            {
                **placement(),
                "topologySpreadConstraints": kube_list(
                    [
                        {
                            "maxSkew": 1,
                            "topologyKey": "kubernetes.io/hostname",
                            "whenUnsatisfiable": "ScheduleAnyway",
                        }
                    ],
                    "How pods are spread, each component by itself.",
                    required="topologyKey",
                ),
            },
        ),
        "podSecurityContext": kube_object(
            {
                "runAsNonRoot": True,
                "runAsUser": POD_USER,
                "runAsGroup": POD_USER,
                "fsGroup": POD_USER,
                "fsGroupChangePolicy": "OnRootMismatch",
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "Security context of every pod.",
        ),
        "containerSecurityContext": kube_object(
            {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            },
            "Security context of every container.",
        ),
        "serviceAccount": Section(
            "The account of the pods. With `discovery.type` kubernetes routers and schedulers have"
            " accounts of their own, with a token, and so has the pool controller; no other pod has"
            " a token.",
            {
                "create": switch(True, "Make a service account."),
                "name": text(
                    "",
                    "Name of the account; if empty, the release's, or `default` without create.",
                ),
                "annotations": string_map({}, "Annotations of the service account."),
            },
        ),
        "probes": Section(
            "How the kubelet asks whether a service works.",
            {
                "type": choice(
                    "auto",
                    ["auto", "grpc", "http", "tcp", "exec"],
                    "`grpc` needs Kubernetes 1.24 and no TLS; `http` needs monitoring.enabled;"
                    " `exec` runs the image's own check; `tcp` sees an open port only; `auto` is"
                    " `grpc` where possible, else `exec`.",
                ),
                "startupBudgetSeconds": integer(
                    1800, "Time to fetch and load a model.", least=MIN_STARTUP_S
                ),
                "periodSeconds": integer(10, "Seconds between two probes.", least=1),
                "timeoutSeconds": integer(10, "Time for an answer.", least=1),
                "livenessFailures": integer(
                    12, "Probes in a row that fail before a container is restarted.", least=1
                ),
            },
        ),
        "pdb": Section(
            "PodDisruptionBudgets of routers, schedulers and pools.",
            {
                "enabled": switch(True, "Make the budgets."),
                "maxUnavailable": number_or_percent(
                    1, "Pods that may be evicted at a time, e.g. 1 or 25%."
                ),
            },
        ),
        "networkPolicy": Section(
            "Who may connect to which port.",
            {
                "enabled": switch(True, "Router to scheduler to gpuworker, and nobody else."),
                "clients": kube_list([], "Peers that may reach the routers; empty is everybody."),
                "egress": Section(
                    "What pods may connect to.",
                    {
                        "enabled": switch(False, "Only DNS, the next service, store and OTLP."),
                        "modelDownload": switch(True, "Routers and gpuworkers may use port 443."),
                        "extra": kube_list([], "More egress rules of every service."),
                    },
                ),
            },
        ),
        "monitoring": MONITORING,
        "telemetry": Section(
            "Traces and logs.",
            {
                "otlpEndpoint": text("", "OTLP/gRPC collector, e.g. http://collector:4317."),
                "otlpPort": integer(
                    4317, "Port that egress policies open for it.", least=1, most=65535
                ),
                "logFormat": choice(
                    "text", ["text", "json"], "Lines for people, or one JSON object a line."
                ),
                "logLevel": choice(
                    "info", ["debug", "info", "warning", "error"], "Least severe line to log."
                ),
            },
        ),
        "tests": Section(
            "`helm test`, which generates text through the router.",
            {
                "enabled": switch(True, "Make the pod of the test."),
                "prompt": text("Once upon a time", "What is completed."),
                "maxTokens": integer(8, "How many tokens are asked for.", least=1),
                "deadlineSeconds": integer(
                    300, "Time until it must have succeeded, repetitions included.", least=1
                ),
                **pod({"cpu": "100m", "memory": "256Mi"}),
            },
        ),
        "extraObjects": kube_list([], "More objects; templates in them are rendered."),
        "enabled": switch(True, "For the `condition` of a parent chart; not read here."),
        "global": kube_object({}, "For parent charts; not read here."),
    },
)
