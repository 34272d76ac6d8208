"""Which tenant is next: fair sharing of token costs between tenants, by virtual token counters.

Each tenant has a counter of the service it got, in virtual tokens: a prompt token costs 1 when it
is dispatched, an output token costs output_price when it is served, both divided by the tenant's
weight. Of the tenants that wait, the tenant with the smallest counter is next. A tenant that begins
to wait after an idle time is lifted to the smallest counter of the waiting tenants, so that idle
time cannot be saved up. This is the Virtual Token Counter of Sheng et al., "Fairness in Serving
Large Language Models" (OSDI 2024), with weights.

The bound. The chosen tenant has the smallest counter at that moment. From then on its counter can
run ahead only by the prompt of the chosen request and by the output that its requests in flight
still produce. So at any time at which two tenants both wait, with P the longest prompt of a tenant
and Q the output tokens that its requests in flight could still produce at its last turn,

    counter_a - counter_b  <=  (P_a + output_price * Q_a) / weight_a

whatever the sizes of their requests: a tenant of 30,000-token prompts gets one prompt served for
every 30,000 tokens of a tenant with small prompts. Cached prompt tokens cost as much as others.
"""

from collections.abc import Mapping

from headrace.lazy_heap import LazyHeap

_MAX_IDLE_ACCOUNTS = 10_000


class Account:
    """A tenant's service so far, in virtual tokens; requests charge it as they are served."""

    __slots__ = ("output_cost", "prompt_cost", "tenant", "virtual_tokens")

    def __init__(self, tenant: str, weight: float, output_price: float, begin: float) -> None:
        assert weight > 0, "a weight of zero would never be served"
        self.tenant = tenant
        self.prompt_cost = 1.0 / weight
        self.output_cost = output_price / weight
        self.virtual_tokens = begin

    def charge_prompt(self, num_tokens: int) -> None:
        """Prompt tokens were dispatched."""
        self.virtual_tokens += num_tokens * self.prompt_cost

    def charge_output(self, num_tokens: int) -> None:
        """Output tokens were served."""
        self.virtual_tokens += num_tokens * self.output_cost


class FairShare:
    """Accounts by tenant, and the order of the tenants that wait; the caller is the only writer."""

    def __init__(
        self,
        weight_by_tenant: Mapping[str, float] | None = None,
        *,
        default_weight: float = 1.0,
        output_price: float = 2.0,
    ) -> None:
        self._weight_by_tenant = dict(weight_by_tenant or {})
        self._default_weight = default_weight
        self._output_price = output_price
        self._account_by_tenant: dict[str, Account] = {}
        # Tenants that wait, by their counter when they were pushed. Counters only grow, so a
        # tenant whose counter has grown since is found at the head and pushed again.
        self._waiting: LazyHeap[str, Account] = LazyHeap()
        self._floor = 0.0

    @property
    def num_waiting(self) -> int:
        """Tenants that have a request waiting."""
        return len(self._waiting)

    def account(self, tenant: str) -> Account:
        """The tenant's account, opened at the floor when it is new."""
        account = self._account_by_tenant.get(tenant)
        if account is None:
            weight = self._weight_by_tenant.get(tenant, self._default_weight)
            account = Account(tenant, weight, self._output_price, self._floor)
            self._account_by_tenant[tenant] = account
            if len(self._account_by_tenant) > 2 * (_MAX_IDLE_ACCOUNTS + self.num_waiting):
                self._close_idle_accounts()
        return account

    def begin_waiting(self, tenant: str) -> None:
        """The tenant has a request that waits, and had none."""
        account = self.account(tenant)
        account.virtual_tokens = max(account.virtual_tokens, self._smallest())
        self._waiting.push(tenant, account.virtual_tokens, account)

    def end_waiting(self, tenant: str) -> None:
        """The tenant's last waiting request is gone."""
        account = self._account_by_tenant[tenant]
        was_waiting = self._waiting.remove(tenant)
        assert was_waiting, f"tenant {tenant!r} does not wait"
        self._floor = max(self._floor, account.virtual_tokens)
        if self.num_waiting:
            self._floor = min(self._floor, self._smallest())

    def next(self) -> str | None:
        """The tenant to serve next; None when no tenant waits."""
        account = self._next()
        return None if account is None else account.tenant

    def pass_over(self, tenant: str) -> None:
        """Skip the next tenant until `put_back`."""
        assert self.next() == tenant, f"{tenant!r} is not next"
        self._waiting.pass_over()

    def put_back(self) -> None:
        """Restore the turns of the tenants skipped by `pass_over`."""
        self._waiting.put_back()

    def _next(self) -> Account | None:
        while (entry := self._waiting.head()) is not None:
            account = entry.item
            if entry.rank == account.virtual_tokens:
                return account
            self._waiting.pop()
            self._waiting.push(account.tenant, account.virtual_tokens, account)
        return None

    def _smallest(self) -> float:
        """The smallest counter among the tenants that wait; the floor when none does."""
        if not self._waiting:
            return self._floor
        waiting = [entry.item for entry in self._waiting.passed_over]
        if (first := self._next()) is not None:
            waiting.append(first)
        return min(account.virtual_tokens for account in waiting)

    def _close_idle_accounts(self) -> None:
        """Forget the idle accounts with the smallest counters.

        An account at or below the floor loses nothing: a new account starts at the floor.
        """
        accounts = self._account_by_tenant.values()
        idle = [account for account in accounts if account.tenant not in self._waiting]
        idle.sort(key=lambda account: account.virtual_tokens)
        for account in idle[:-_MAX_IDLE_ACCOUNTS]:
            del self._account_by_tenant[account.tenant]
