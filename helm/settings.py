"""The settings of the services that a user of the chart may set, and their schema.

The schema comes from the structs that the services read, so that a setting that no service knows is
refused before anything is installed. Left out are the settings that the chart sets itself.
"""

from typing import Any

import msgspec

from gpuworker.config import KvCacheSettings, WorkerSettings
from headrace.service.channels import ChannelConfig
from headrace.service.discovery import DiscoveryConfig, OwnershipConfig
from headrace.service.serving import ServingConfig
from helm.declare import Schema, Value
from router.config import PublicServing, RouterConfig, StreamsConfig, TenantConfig, TenantsConfig
from scheduler.config import PoolSettings, SchedulerSettings

_SERVICES: dict[str, dict[str, type[msgspec.Struct]]] = {
    "router": {
        "router": RouterConfig,
        "streams": StreamsConfig,
        "tenant": TenantConfig,
        "tenants": TenantsConfig,
        "discovery": DiscoveryConfig,
        "serving": PublicServing,
        "channel": ChannelConfig,
    },
    "scheduler": {
        "scheduler": SchedulerSettings,
        "pool": PoolSettings,
        "discovery": DiscoveryConfig,
        "ownership": OwnershipConfig,
        "serving": ServingConfig,
        "channel": ChannelConfig,
    },
    "gpuworker": {
        "gpuworker": WorkerSettings,
        "kv_cache": KvCacheSettings,
        "serving": ServingConfig,
    },
}

# What the chart writes itself, by section.
SET_BY_THE_CHART: dict[str, frozenset[str]] = {
    "router": frozenset(
        {"router_id", "scheduler", "scheduler_selector", "model", "model_name", "store_url"}
    ),
    "scheduler": frozenset({"scheduler_id", "worker", "worker_selector", "store_url"}),
    "discovery": frozenset({"type", "namespace", "address", "cluster_domain", "kubeconfig"}),
    "gpuworker": frozenset({"model", "model_name", "worker_id", "device", "dtype", "role"}),
    "serving": frozenset(
        {
            *("listen", "tls_cert_file", "tls_key_file", "tls_client_ca_file"),
            *("auth_token_file", "api_keys_file", "drain_timeout_s"),
        }
    ),
    "channel": frozenset(
        {"tls", "tls_ca_file", "tls_cert_file", "tls_key_file", "auth_token_file"}
    ),
}


def config(service: str) -> Value:
    """The value `config` of a service."""
    sections = _SERVICES[service]
    names = ", ".join(f"`[{name}]`" for name in sections)
    return Value(
        {},
        f"Settings of the service by section ({names}), as in docs/settings.md, but for those"
        " that the chart sets.",
        {
            "type": "object",
            "additionalProperties": False,
            "properties": {name: _section(name, struct) for name, struct in sections.items()},
        },
    )


def _section(name: str, struct: type[msgspec.Struct]) -> Schema:
    schema = msgspec.json.schema(struct)
    definitions = schema["$defs"]
    found: Schema = _inlined(definitions[struct.__name__], definitions)
    found["properties"] = {
        key: value
        for key, value in found["properties"].items()
        if key not in SET_BY_THE_CHART.get(name, ())
    }
    return found


def _inlined(schema: Any, definitions: dict[str, Any]) -> Any:
    """The schema without references, titles and defaults."""
    if isinstance(schema, list):
        return [_inlined(part, definitions) for part in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _inlined(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    kept = {k: v for k, v in schema.items() if k not in {"title", "default"} and v != []}
    if "properties" in kept:
        kept["properties"] = {k: _inlined(v, definitions) for k, v in kept["properties"].items()}
        return {k: v if k == "properties" else _inlined(v, definitions) for k, v in kept.items()}
    return {k: _inlined(v, definitions) for k, v in kept.items()}
