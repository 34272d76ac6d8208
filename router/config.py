"""The router's settings."""

from typing import Annotated, Literal

import msgspec

from headrace.service.config import StoreSettings, help_text
from headrace.service.serving import ServingConfig
from router.core.admission import Limits, TenantLimits
from router.core.pauses import SlowClient, UnreadLimits
from router.core.policies import OrderName
from router.rules import Rules

DrainMode = Literal["handover", "finish"]


class RouterConfig(StoreSettings, frozen=True, forbid_unknown_fields=True):
    """What a router serves, its schedulers, and its limits."""

    router_id: Annotated[
        str, help_text("Name of this router in logs and traces; empty is the host's name.")
    ] = ""
    scheduler: Annotated[tuple[str, ...], help_text("host:port of a scheduler.")] = ()
    scheduler_selector: Annotated[
        str,
        help_text(
            "Labels of schedulers' pods, for discovery by Kubernetes, e.g."
            " app.kubernetes.io/component=scheduler."
        ),
    ] = ""
    model: Annotated[
        str, help_text("Where the tokenizer is: a model folder, a GGUF file, or a model's name.")
    ] = ""
    model_name: Annotated[
        str, help_text("Name that requests use for the model; empty is `model`'s last part.")
    ] = ""
    policy: Annotated[
        OrderName, help_text("Order of waiting requests; fair is between tenants.")
    ] = "fair"
    priority_aging_s: Annotated[
        float,
        help_text("Seconds of waiting that one priority is worth; 0: priority is strict.", ge=0),
    ] = 60.0
    max_live_requests: Annotated[
        int, help_text("Requests answered at once, waiting or running; more are refused.", ge=1)
    ] = 16_384
    max_queued_requests: Annotated[
        int, help_text("Most completions that may wait in the router; more are refused.", ge=1)
    ] = 4096
    max_queued_tokens: Annotated[
        int, help_text("Most prompt tokens that may wait in the router; more are refused.", ge=1)
    ] = 8_000_000
    max_prompt_bytes: Annotated[int, help_text("Largest prompt taken, in bytes of text.", ge=1)] = (
        4 * 1024 * 1024
    )
    allow_control_tokens_in_messages: Annotated[
        bool,
        help_text(
            "Control tokens that chat messages spell, such as <|im_end|>, count, so that a message"
            " can end its turn and begin another; otherwise they are ordinary text."
        ),
    ] = False
    waiting_allowance: Annotated[
        int, help_text("Requests sent to a worker beyond its max_num_seqs, to wait there.", ge=0)
    ] = 8
    max_report_age_s: Annotated[
        float, help_text("A scheduler that is silent for this long gets no new requests.", gt=0)
    ] = 5.0
    worker_grace_s: Annotated[
        float,
        help_text(
            "New requests are still queued for so long after a model's last worker was ready;"
            " then they are refused with NO_READY_WORKER.",
            ge=0,
        ),
    ] = 30.0
    share_prefix_cache_across_tenants: Annotated[
        bool,
        help_text(
            "Let tenants reuse each other's cached prompts: faster, but usage.cached_tokens then"
            " tells a tenant what another one has sent."
        ),
    ] = False


class PublicServing(ServingConfig, frozen=True, forbid_unknown_fields=True):
    """How the router listens: its callers are strangers, so it takes smaller messages."""

    # The largest prompt and the rest of its request.
    max_message_bytes: Annotated[int, help_text("Largest message taken.", ge=1)] = 5 * 1024 * 1024


class StreamsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How much a slow client may leave unread, and what happens to its request."""

    max_unread_tokens: Annotated[
        int,
        help_text(
            "Tokens of a completion that may wait for its client, beyond what the connection's"
            " buffers hold; with log probabilities fewer, which take the same memory.",
            ge=1,
        ),
    ] = 65_536
    max_unread_tokens_in_all: Annotated[
        int,
        help_text(
            "About how many tokens may wait for all clients; among many completions each may hold"
            " fewer.",
            ge=1,
        ),
    ] = 4_194_304
    slow_client: Annotated[
        SlowClient,
        help_text("With more unread a completion is paused until half is read, or ended at once."),
    ] = "pause"
    max_pause_s: Annotated[
        float, help_text("A request paused for so long in one go is ended.", gt=0)
    ] = 60.0


class RecoveryConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What becomes of requests whose caller, router or scheduler is gone."""

    orphan_ttl_s: Annotated[
        float,
        help_text("How long a kept request waits for a caller to resume it before it ends.", gt=0),
    ] = 60.0
    drain_mode: Annotated[
        DrainMode,
        help_text(
            "Requests that are not done when a shutdown's time is over: left to their schedulers,"
            " to be resumed at another router, or ended."
        ),
    ] = "handover"
    max_recoveries: Annotated[
        int,
        help_text("A request that was recovered so often and is lost again fails.", ge=1),
    ] = 3


class TenantConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Limits of each tenant that has none of its own in `tenants`."""

    weight: Annotated[float, help_text("Share of a tenant beside others that wait.", gt=0)] = 1.0
    max_live_requests: Annotated[
        int, help_text("Requests of a tenant answered at once; 0: no limit.", ge=0)
    ] = 0
    max_queued_requests: Annotated[
        int, help_text("Completions of a tenant that may wait; 0: no limit.", ge=0)
    ] = 0
    max_queued_tokens: Annotated[
        int, help_text("Prompt tokens of a tenant that may wait; 0: no limit.", ge=0)
    ] = 0
    requests_per_minute: Annotated[
        float, help_text("Requests that a tenant may send; 0: no limit.", ge=0)
    ] = 0.0
    tokens_per_minute: Annotated[
        float, help_text("Prompt and output tokens that a tenant may use; 0: no limit.", ge=0)
    ] = 0.0

    def limits(self) -> TenantLimits:
        """The limits as the core's type."""
        return TenantLimits(**msgspec.structs.asdict(self))


class TenantsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Tenants with their own limits; only in the file."""

    named: Annotated[
        dict[str, TenantConfig], help_text("[tenants.named.NAME]: as [tenant], for that tenant.")
    ] = {}


def rules_of(
    router: RouterConfig,
    streams: StreamsConfig,
    recovery: RecoveryConfig,
    tenant: TenantConfig,
    tenants: TenantsConfig,
) -> Rules:
    """The rules that follow from the settings."""
    return Rules(
        limits=Limits(
            router.max_live_requests, router.max_queued_requests, router.max_queued_tokens
        ),
        tenant_limits=tenant.limits(),
        limits_by_tenant={name: settings.limits() for name, settings in tenants.named.items()},
        policy=router.policy,
        priority_aging_s=router.priority_aging_s,
        share_prefix_cache_across_tenants=router.share_prefix_cache_across_tenants,
        orphan_ttl_s=recovery.orphan_ttl_s,
        unread=UnreadLimits(**msgspec.structs.asdict(streams)),
    )
