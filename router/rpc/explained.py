"""Completes a scheduler's explanation of a request with the router's part of the time."""

from headrace.v1 import inference_pb2
from router.passage import Account, Load, SchedulerAccount, Share, breakdown, merged

# What a scheduler notes when it gets a request, or another router takes the request over.
_TAKEN = frozenset({"LOST", "RESUMED"})


def complete(found: inference_pb2.ExplainResponse, account: Account, *, has_run: bool) -> None:
    """Add the router's account to an explanation; has_run: a scheduler gave the explanation."""
    shares = breakdown(account, _account_of(found) if has_run else None)
    del found.breakdown[:]
    found.breakdown.extend(
        inference_pb2.StageTime(stage=share.stage, cause=share.cause, seconds=share.seconds)
        for share in shares
    )
    found.total_s = account.total_s
    found.queued_with.extend(map(tenant_load, account.queued_with))


def hide_tenants(found: inference_pb2.ExplainResponse, tenant: str) -> None:
    """Leave no name of another tenant in an explanation for callers of this tenant."""
    loads = [Load(load.tenant, load.num_requests, load.num_tokens) for load in found.queued_with]
    own = [load for load in loads if load.tenant == tenant]
    others = merged([load for load in loads if load.tenant != tenant])
    del found.queued_with[:]
    found.queued_with.extend(map(tenant_load, (*own, *others)))


def _account_of(found: inference_pb2.ExplainResponse) -> SchedulerAccount | None:
    if not found.breakdown:
        return None  # a scheduler of an earlier version
    began = found.begin_time_unix_s
    taken = [event for event in found.events if event.kind in _TAKEN]
    return SchedulerAccount(
        shares=[Share(part.stage, part.seconds, part.cause) for part in found.breakdown],
        began_unix_s=began,
        is_first=not any(event.time_unix_s <= began for event in taken),
        is_continued=any(
            event.kind == "RESUMED" and event.time_unix_s > began for event in found.events
        ),
    )


def tenant_load(load: Load) -> inference_pb2.TenantLoad:
    """What waits for a tenant."""
    return inference_pb2.TenantLoad(
        tenant=load.tenant, num_requests=load.num_requests, num_tokens=load.num_tokens
    )
