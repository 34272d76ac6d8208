"""Values that people give, each by a name; every case is rendered and checked against schemas."""

from typing import Any

CPU = {"gpu": {"count": 0}}
CPU_METRIC = {
    "type": "Resource",
    "resource": {"name": "cpu", "target": {"type": "Utilization", "averageUtilization": 70}},
}
TRIGGER = {"type": "prometheus", "metadata": {"serverAddress": "http://prometheus", "query": "x"}}
EXTRAS: dict[str, Any] = {
    "resources": {"requests": {"cpu": 1, "memory": "1Gi"}, "limits": {"memory": "2Gi"}},
    "nodeSelector": {"disk": "ssd"},
    "tolerations": [{"key": "dedicated", "operator": "Equal", "value": "llm"}],
    "affinity": {
        "nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": {
                "nodeSelectorTerms": [
                    {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]}
                ]
            }
        }
    },
    "topologySpreadConstraints": [
        {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}
    ],
    "priorityClassName": "high",
    "runtimeClassName": "nvidia",
    "podLabels": {"team": "1"},
    "podAnnotations": {"sidecar.istio.io/inject": "false"},
    "extraEnv": [
        {"name": "HTTPS_PROXY", "value": "http://proxy:3128"},
        {"name": "SECRET", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}},
    ],
    "extraEnvFrom": [{"secretRef": {"name": "more"}}],
    "extraVolumes": [{"name": "ca", "configMap": {"name": "ca"}}],
    "extraVolumeMounts": [{"name": "ca", "mountPath": "/etc/ca"}],
    "initContainers": [{"name": "wait", "image": "busybox", "command": ["true"]}],
    "extraContainers": [{"name": "log", "image": "busybox"}],
}
CERT_MANAGER = {"enabled": True, "certManager": {"enabled": True}}
SUPPLIED = {
    "enabled": True,
    "requireClientCertificates": True,
    "existingSecrets": {
        "router": "router-cert",
        "scheduler": "scheduler-cert",
        "gpuworker": "gpuworker-cert",
        "store": "store-cert",
    },
}

MONITORING: dict[str, Any] = {
    "enabled": True,
    "scrapers": [{"namespaceSelector": {"matchLabels": {"name": "monitoring"}}}],
    "podMonitors": {"enabled": True, "labels": {"release": "prometheus"}},
    "rules": {"enabled": True},
    "dashboard": {"enabled": True},
}

CASES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "on a CPU": {"gpuworker": CPU},
    "several pools and schedulers": {
        "scheduler": {"replicas": 2},
        "pools": [
            {"name": "big", "replicas": 3, "resources": {"limits": {"memory": "200Gi"}}},
            {"name": "small", "role": "decode", "gpu": {"resource": "nvidia.com/mig-1g.10gb"}},
            {"name": "amd", "dtype": "float16", "gpu": {"resource": "amd.com/gpu"}},
            {"name": "3", **CPU, "model": "/models/other.gguf"},
        ],
    },
    "hpa": {
        "router": {"autoscaling": {"type": "hpa", "metrics": [CPU_METRIC]}},
        "gpuworker": {
            "autoscaling": {
                "type": "hpa",
                "maxReplicas": 8,
                "metrics": [CPU_METRIC],
                "behavior": {"scaleDown": {"stabilizationWindowSeconds": 600}},
            }
        },
    },
    "keda": {
        "router": {"autoscaling": {"type": "keda", "triggers": [TRIGGER]}},
        "gpuworker": {"autoscaling": {"type": "keda", "minReplicas": 0, "triggers": [TRIGGER]}},
    },
    "pool controller": {
        "pools": [
            {"name": "a", "autoscaling": {"type": "controller", "minReplicas": 0}},
            {"name": "b", "autoscaling": {"type": "controller", "maxReplicas": 9}},
            {"name": "c"},
        ],
        "poolController": {"replicas": 2, "kvUse": 0.5, "roles": True, "tpotSeconds": 1, **EXTRAS},
        "tls": SUPPLIED,
        "networkPolicy": {"clients": [{"podSelector": {}}], "egress": {"enabled": True}},
    },
    "monitoring": {"monitoring": MONITORING, "probes": {"type": "http"}},
    "monitoring with tls": {"monitoring": MONITORING, "tls": SUPPLIED},
    "tls of cert-manager": {"tls": CERT_MANAGER},
    "tls of an issuer that is there": {
        "tls": {
            "enabled": True,
            "certManager": {
                "enabled": True,
                "issuerRef": {"name": "corp", "kind": "ClusterIssuer", "group": "cert-manager.io"},
            },
        }
    },
    "supplied certificates": {"tls": SUPPLIED},
    "no tokens": {"auth": {"enabled": False}},
    "supplied tokens": {
        "auth": {
            "existingSecret": "tokens",
            "tokens": {"router": "", "scheduler": "", "gpuworker": "", "metrics": ""},
        }
    },
    "api keys": {"auth": {"apiKeys": {"existingSecret": "our-keys", "key": "hashes"}}},
    "external store": {
        "store": {"type": "external", "external": {"url": "rediss://u:p%40@redis:6380/1"}}
    },
    "sentinel": {
        "store": {
            "type": "external",
            "external": {"url": "redis+sentinel://:p@a:26379,b:26379/mymaster/0", "port": 26379},
        },
        "networkPolicy": {"egress": {"enabled": True}},
    },
    "cluster": {
        "store": {"type": "external", "external": {"url": "redis+cluster://:p@a:6379,b:6379"}}
    },
    "store in a secret": {
        "store": {"type": "external", "external": {"existingSecret": "redis", "key": "dsn"}}
    },
    "supplied password of the built-in store": {
        "store": {"valkey": {"existingSecret": "mine", "password": ""}}
    },
    "no store": {"store": {"type": "none"}},
    "kept store": {
        "store": {
            "valkey": {"persistence": {"enabled": True, "storageClassName": "fast"}, **EXTRAS}
        }
    },
    "probes by tcp": {"probes": {"type": "tcp"}},
    "probes by exec": {"probes": {"type": "exec", "startupBudgetSeconds": 3601}},
    "shared claim": {
        "modelCache": {"type": "claim", "storageClassName": "nfs", "size": "1.5Ti"},
        "kernelCache": {"type": "emptyDir"},
    },
    "claim per worker": {
        "modelCache": {"type": "claimPerWorker"},
        "kernelCache": {"type": "existingClaim", "existingClaim": "kernels"},
    },
    "claim that is there": {"modelCache": {"type": "existingClaim", "existingClaim": "models"}},
    "folders of the node": {
        "modelCache": {"type": "hostPath", "hostPath": "/mnt/models"},
        "kernelCache": {"type": "hostPath", "hostPath": "/mnt/kernels"},
    },
    "many pods at a time": {"pdb": {"maxUnavailable": "25%"}},
    "bounded emptyDir": {"modelCache": {"sizeLimit": "20Gi"}},
    "gated model": {"model": {"name": "meta-llama/Llama-3.1-8B"}, "hfToken": {"value": "hf_x"}},
    "gated model, supplied token": {"hfToken": {"existingSecret": "hf", "key": "HF_TOKEN"}},
    "everything extra": {
        "router": EXTRAS,
        "scheduler": EXTRAS,
        "gpuworker": EXTRAS,
        "tests": EXTRAS,
        "commonLabels": {"cost": "7", "app.kubernetes.io/name": "not-for-you"},
        "commonAnnotations": {"owner": "me@example.com"},
        "images": {"registry": "mirror:5000/x", "pullSecrets": [{"name": "pull"}]},
        "extraObjects": [
            {
                "apiVersion": "v1",
                "kind": "ConfigMap",
                "metadata": {"name": "{{ .Release.Name }}-more"},
                "data": {"a": "b"},
            }
        ],
    },
    "defaults of every pod": {
        "podDefaults": {key: EXTRAS[key] for key in ("nodeSelector", "tolerations", "affinity")}
    },
    "discovery by labels": {
        "discovery": {"type": "kubernetes"},
        "scheduler": {"replicas": 3, "config": {"ownership": {"lease_duration_s": 20}}},
        "networkPolicy": {"egress": {"enabled": True}},
    },
    "egress": {
        "networkPolicy": {
            "clients": [{"namespaceSelector": {"matchLabels": {"team": "chat"}}}],
            "egress": {
                "enabled": True,
                "extra": [{"to": [{"ipBlock": {"cidr": "10.0.0.0/8"}}]}],
            },
        },
        "telemetry": {"otlpEndpoint": "http://collector:4317"},
    },
    "load balancer": {
        "router": {
            "service": {
                "type": "LoadBalancer",
                "port": 443,
                "nodePort": 30443,
                "annotations": {"cloud/internal": "true"},
                "loadBalancerClass": "cloud/nlb",
                "loadBalancerSourceRanges": ["10.0.0.0/8"],
                "appProtocol": "grpc",
            }
        }
    },
    "an arbitrary user": {"podSecurityContext": {"runAsUser": 1000650000, "fsGroup": 1000650000}},
    "defaults taken away": {
        "podSecurityContext": {"fsGroup": None, "runAsUser": None, "runAsGroup": None},
        "podDefaults": {"topologySpreadConstraints": None},
        "router": {"resources": None},
        "gpuworker": {"resources": {"requests": None}, "tolerations": None},
        "scheduler": {"resources": None, "extraEnv": None, "config": None, "podLabels": None},
        "commonLabels": None,
        "commonAnnotations": None,
        "tests": {"resources": None},
    },
    # `tag:` with nothing behind it, and such.
    "empty values": {
        "model": {"servedName": None},
        "images": {"registry": None, "pullSecrets": None},
        "router": {"image": {"tag": None, "digest": None}, "extraArgs": None},
        "gpuworker": {"model": None, "extraEnv": None, "config": None, "podAnnotations": None},
        "podDefaults": {"tolerations": None, "priorityClassName": None},
        "tls": {"existingSecrets": {"router": None}},
        "store": {"external": {"url": None}, "valkey": {"resources": None}},
        "telemetry": {"otlpEndpoint": None},
        "extraObjects": None,
    },
    "quoted numbers": {
        "router": {"image": {"tag": "1.10"}, "podLabels": {"build": "20240101"}},
        "commonAnnotations": {"sidecar.istio.io/inject": "false"},
        "pools": [{"name": "3", "replicas": 0}, {"name": "b"}],
    },
    "groups over nodes": {
        "pools": [
            {"name": "a", "replicas": 3, "leaderWorkerSet": {"enabled": True, "size": 4}, **EXTRAS},
            {"name": "b"},
        ]
    },
    "nothing optional": {
        "pdb": {"enabled": False},
        "networkPolicy": {"enabled": False},
        "serviceAccount": {"create": False},
        "tests": {"enabled": False},
        "clusterDomain": "",
        "gpuworker": {"sharedMemory": {"enabled": False}},
    },
}
