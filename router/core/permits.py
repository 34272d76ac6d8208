"""Permits: how many requests are answered at once, and how fast tenants may send.

A permit is taken before a prompt is tokenized and held until the caller is answered or gone, so
that never more requests than the limit are live, waiting or running. Rates are token buckets that
hold one minute's worth. A request costs 1 of its tenant's request bucket. Of the token bucket it
costs its prompt tokens when it is admitted and its output tokens when it ends. The cost may leave a
debt, and the tenant's next request is refused until the debt is paid, so the rate holds over time
although output lengths are not known beforehand.
"""

from collections.abc import Mapping

from router.core.admission import Limits, Reason, Reject, TenantLimits

_MAX_IDLE_TENANTS = 10_000


class Bucket:
    """A token bucket: gains per_minute / 60 a second up to per_minute, and can be in debt."""

    __slots__ = ("_filled_at", "_level", "_per_minute")

    def __init__(self, per_minute: float, now: float) -> None:
        self._per_minute = per_minute
        self._level = per_minute
        self._filled_at = now

    def wait_s(self, num: float, now: float) -> float:
        """Seconds until `num`, or a whole bucket where that is less, may be spent; 0 is now."""
        self._fill(now)
        missing = min(num, self._per_minute) - self._level
        return max(0.0, missing * 60.0 / self._per_minute)

    def spend(self, num: float, now: float) -> None:
        """Take `num` out, into debt if need be."""
        self._fill(now)
        self._level -= num

    def is_full(self, now: float) -> bool:
        """Whether the bucket is in the state of a new one."""
        self._fill(now)
        return self._level >= self._per_minute

    def _fill(self, now: float) -> None:
        gained = max(0.0, now - self._filled_at) * self._per_minute / 60.0
        self._level = min(self._per_minute, self._level + gained)
        self._filled_at = now


class _Tenant:
    __slots__ = ("limits", "num_live", "requests", "tokens")

    def __init__(self, limits: TenantLimits, now: float) -> None:
        self.limits = limits
        self.num_live = 0
        per_minute = limits.requests_per_minute
        self.requests = Bucket(per_minute, now) if per_minute else None
        per_minute = limits.tokens_per_minute
        self.tokens = Bucket(per_minute, now) if per_minute else None

    def is_as_new(self, now: float) -> bool:
        buckets = (bucket for bucket in (self.requests, self.tokens) if bucket is not None)
        return not self.num_live and all(bucket.is_full(now) for bucket in buckets)


class Permits:
    """Counts live requests by tenant; the caller is the only writer."""

    def __init__(
        self,
        limits: Limits,
        tenant_limits: TenantLimits,
        limits_by_tenant: Mapping[str, TenantLimits] | None = None,
        *,
        noun: str = "tenant",
    ) -> None:
        """tenant_limits hold for every tenant that has none in limits_by_tenant.

        noun is what refusals call a tenant: permits are also counted by API key.
        """
        self._noun = noun
        self._limits = limits
        self._default = tenant_limits
        self._limits_by_tenant = dict(limits_by_tenant or {})
        self._tenants: dict[str, _Tenant] = {}
        self._num_tenants_to_sweep = _MAX_IDLE_TENANTS
        self.num_live = 0

    def limits_of(self, tenant: str) -> TenantLimits:
        return self._limits_by_tenant.get(tenant, self._default)

    def set_limits(self, tenant: str, limits: TenantLimits, now: float) -> None:
        """Give a tenant limits of its own; when they differ from its last, its rates begin anew."""
        if self._limits_by_tenant.get(tenant) == limits:
            return
        self._limits_by_tenant[tenant] = limits
        if (known := self._tenants.get(tenant)) is not None:
            self._tenants[tenant] = _Tenant(limits, now)
            self._tenants[tenant].num_live = known.num_live

    def enter(self, tenant: str, now: float) -> Reject | None:
        """Take a permit, which `leave` gives back, or return why there is none."""
        refusal = self.refusal(tenant, now)
        if refusal is None:
            self.take(tenant, now)
        return refusal

    def refusal(self, tenant: str, now: float) -> Reject | None:
        """Why there is no permit; None if there is."""
        maximum = self._limits.max_live_requests
        if maximum and self.num_live >= maximum:
            return Reject(
                Reason.TOO_MANY_LIVE,
                f"{maximum} requests are being answered, the limit",
                1.0,
            )
        return self._refusal(self._tenants.get(tenant) or _Tenant(self.limits_of(tenant), now), now)

    def take(self, tenant: str, now: float) -> None:
        """Take a permit, which `leave` gives back, whatever the limits."""
        known = self._tenants.get(tenant) or _Tenant(self.limits_of(tenant), now)
        if known.requests is not None:
            known.requests.spend(1, now)
        known.num_live += 1
        self.num_live += 1
        self._tenants[tenant] = known

    def leave(self, tenant: str, now: float) -> None:
        """Give a permit back."""
        known = self._tenants[tenant]
        known.num_live -= 1
        self.num_live -= 1
        assert known.num_live >= 0, f"tenant {tenant!r} left more often than it entered"
        if known.is_as_new(now):
            del self._tenants[tenant]
        elif len(self._tenants) > self._num_tenants_to_sweep:
            self._forget_idle(now)

    def spend_tokens(self, tenant: str, num_tokens: int, now: float) -> None:
        """Charge a live request's prompt or output tokens to the tenant's rate."""
        known = self._tenants[tenant]
        if known.tokens is not None:
            known.tokens.spend(num_tokens, now)

    def _refusal(self, known: _Tenant, now: float) -> Reject | None:
        limits = known.limits
        maximum = limits.max_live_requests
        if maximum and known.num_live >= maximum:
            return Reject(
                Reason.TENANT_TOO_MANY_LIVE,
                f"{maximum} requests of this {self._noun} are being answered, the limit",
                1.0,
            )
        if known.requests is not None and (wait_s := known.requests.wait_s(1, now)):
            most = f"{limits.requests_per_minute:g} requests a minute"
            message = f"this {self._noun} may send {most}"
            return Reject(Reason.TENANT_RATE, message, wait_s)
        if known.tokens is not None and (wait_s := known.tokens.wait_s(1, now)):
            most = f"{limits.tokens_per_minute:g} tokens a minute"
            message = f"this {self._noun} may use {most}"
            return Reject(Reason.TENANT_RATE, message, wait_s)
        return None

    def _forget_idle(self, now: float) -> None:
        """Forget the tenants whose rates allow as much as those of a new tenant.

        The next sweep is due when the tenants that remain have doubled, so that sweeping costs
        each request the same, however many tenants are in debt.
        """
        as_new = [name for name, known in self._tenants.items() if known.is_as_new(now)]
        for name in as_new:
            del self._tenants[name]
        self._num_tenants_to_sweep = max(_MAX_IDLE_TENANTS, 2 * len(self._tenants))
