"""Limits of single API keys, beside the limits of their tenants.

A key is to its permits what a tenant is to the gate's. Calls count, so a request that goes on
without a call counts for its tenant alone.
"""

import contextlib
import time
from collections.abc import Callable, Iterator

from headrace.service.keys import Caller, KeyLimits
from router import outcomes
from router.core.admission import Limits, TenantLimits
from router.core.permits import Permits

Spend = Callable[[int], None]

_NO_LIMITS = TenantLimits()


class KeyPermits:
    """Owns the permits of the keys that have limits."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._permits = Permits(Limits(), TenantLimits(), noun="key")
        self._clock = clock

    @contextlib.contextmanager
    def hold(self, who: Caller) -> Iterator[Spend]:
        """Holds a permit of the caller's key, or raises; call what it gives with tokens used."""
        limits = _limits_of(who.limits)
        if limits == _NO_LIMITS:
            yield lambda _: None
            return
        name = who.key_id
        self._permits.set_limits(name, limits, self._clock())
        refusal = self._permits.enter(name, self._clock())
        if refusal is not None:
            raise outcomes.rejected(refusal)
        try:
            yield lambda num: self._permits.spend_tokens(name, num, self._clock())
        finally:
            self._permits.leave(name, self._clock())


def _limits_of(limits: KeyLimits) -> TenantLimits:
    return TenantLimits(
        max_live_requests=limits.max_live_requests,
        requests_per_minute=limits.requests_per_minute,
        tokens_per_minute=limits.tokens_per_minute,
    )
