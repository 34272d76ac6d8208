"""The settings that say where peers come from, and the source that they name."""

from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec

from headrace.service.config import ConfigError, help_text
from headrace.service.peers import DnsPeers, PeerSource, StaticPeers


class DiscoveryConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a router finds its schedulers, and a scheduler its gpuworkers."""

    type: Annotated[
        Literal["static", "dns", "kubernetes"],
        help_text(
            "static: the list, as it is; dns: every address of the list's names, looked up again"
            " and again; kubernetes: the pods that a selector finds."
        ),
    ] = "static"
    interval_s: Annotated[
        float,
        help_text(
            "Seconds between two looks at DNS; with kubernetes, how long a watch lasts, and so how"
            " long one that has gone silent is believed.",
            ge=0.1,
        ),
    ] = 10.0
    namespace: Annotated[
        str, help_text("Namespace of the pods; empty is the pod's own, or the kubeconfig's.")
    ] = ""
    address: Annotated[
        Literal["ip", "name"],
        help_text(
            "How pods are reached. name: by HOSTNAME.SUBDOMAIN.NAMESPACE.svc, which TLS needs,"
            " because certificates have names."
        ),
    ] = "ip"
    cluster_domain: Annotated[
        str, help_text("DNS domain of the cluster, for names of pods; may be empty.")
    ] = "cluster.local"
    kubeconfig: Annotated[
        str, help_text("Kubeconfig file; empty: what the pod is given, else ~/.kube/config.")
    ] = ""


class OwnershipConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How schedulers share the workers that they find in Kubernetes."""

    lease_duration_s: Annotated[
        int, help_text("A scheduler that does not renew its lease for so long is dead.", ge=3)
    ] = 10
    renew_every_s: Annotated[
        float, help_text("Seconds between two renewals; at most a third of the duration.", ge=0.1)
    ] = 2.0
    rebalance_after_s: Annotated[
        float,
        help_text("A scheduler that has had too many workers for so long gives some up.", ge=0),
    ] = 30.0
    release_timeout_s: Annotated[
        float,
        help_text("A worker that is given up finishes its requests within that time.", ge=0),
    ] = 30.0


def open_source(
    config: DiscoveryConfig, addresses: Sequence[str], selector: str, *, flag: str
) -> PeerSource:
    """The source of peers; to be called before an event loop runs.

    flag: the flag of the addresses, without dashes; the selector's is `flag`-selector.

    Raises:
        ConfigError: what the source needs is not given, or is of no use to it.
    """
    if config.type == "kubernetes":
        if addresses or not selector:
            raise ConfigError(
                f"--discovery-type kubernetes takes --{flag}-selector LABEL=VALUE, and no --{flag}"
            )
        from headrace.kubernetes.api import check
        from headrace.kubernetes.pods import PodPeers

        check(config)
        return PodPeers(config, selector)
    if selector:
        raise ConfigError(f"--{flag}-selector is for --discovery-type kubernetes")
    if not addresses:
        raise ConfigError(f"give at least one --{flag} HOST:PORT, or --discovery-type kubernetes")
    if config.type == "dns":
        return DnsPeers(addresses, config.interval_s)
    return StaticPeers(addresses)
