"""Whose turn it is: token-cost fair sharing between tenants, by virtual token counters.

Each tenant has a counter of the service it got, in virtual tokens: a prompt token costs 1 when it
is dispatched, an output token costs output_price when it is served, both divided by the tenant's
weight. The tenant with the smallest counter among those that wait goes next. A tenant that begins
to wait after a pause is lifted to the smallest counter of those that wait, so that idle time
cannot be saved up. This is the Virtual Token Counter of Sheng et al., "Fairness in Serving Large
Language Models" (OSDI 2024), with weights.

The bound. Whoever is chosen has the smaller counter at that moment; from then on it can run ahead
only by what that request's prompt is charged and what its requests in flight still produce. So at
any time at which two tenants both wait, with P the longest prompt of a tenant and Q the output
tokens that its requests in flight may still have had at its last turn,

    counter_a - counter_b  <=  (P_a + output_price * Q_a) / weight_a

whatever the sizes of their requests: a tenant of 30,000-token prompts gets one of them for every
30,000 tokens of a neighbour with small prompts. Cached prompt tokens cost as much as others.
"""

import heapq
from collections.abc import Mapping

_MAX_IDLE_ACCOUNTS = 10_000


class Account:
    """A tenant's service so far, in virtual tokens; requests charge it as they are served."""

    __slots__ = ("is_waiting", "output_cost", "place", "prompt_cost", "tenant", "virtual_tokens")

    def __init__(self, tenant: str, weight: float, output_price: float, begin: float) -> None:
        assert weight > 0, "a weight of zero would never be served"
        self.tenant = tenant
        self.prompt_cost = 1.0 / weight
        self.output_cost = output_price / weight
        self.virtual_tokens = begin
        self.is_waiting = False
        self.place = 0  # number of its valid place in the order

    def charge_prompt(self, num_tokens: int) -> None:
        """Prompt tokens were dispatched."""
        self.virtual_tokens += num_tokens * self.prompt_cost

    def charge_output(self, num_tokens: int) -> None:
        """Output tokens were served."""
        self.virtual_tokens += num_tokens * self.output_cost


_Place = tuple[float, int, Account]


class FairShare:
    """Accounts by tenant, and the order among those that wait; the caller is the only writer."""

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
        # (counter when put in, number, account): counters only grow while one waits, so an
        # outdated place is found at the top and put in again where it belongs now.
        self._heap: list[_Place] = []
        self._passed_over: list[_Place] = []
        self._num_pushed = 0
        self._floor = 0.0
        self.num_waiting = 0

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
        assert not account.is_waiting, f"tenant {tenant!r} waits already"
        account.virtual_tokens = max(account.virtual_tokens, self._smallest())
        account.is_waiting = True
        self.num_waiting += 1
        self._push(account)

    def end_waiting(self, tenant: str) -> None:
        """The tenant's last waiting request is gone."""
        account = self._account_by_tenant[tenant]
        assert account.is_waiting, f"tenant {tenant!r} does not wait"
        account.is_waiting = False
        self.num_waiting -= 1
        self._floor = max(self._floor, account.virtual_tokens)
        if self.num_waiting:
            self._floor = min(self._floor, self._smallest())

    def next(self) -> str | None:
        """The tenant whose turn it is; None when nobody waits."""
        while self._heap:
            counter, place, account = self._heap[0]
            is_valid = account.is_waiting and place == account.place
            if is_valid and counter == account.virtual_tokens:
                return account.tenant
            heapq.heappop(self._heap)
            if is_valid:
                self._push(account)
        return None

    def pass_over(self, tenant: str) -> None:
        """Leave the tenant whose turn it is out of `next` until `put_back`."""
        assert self.next() == tenant, f"it is not the turn of {tenant!r}"
        self._passed_over.append(heapq.heappop(self._heap))

    def put_back(self) -> None:
        """Those that were passed over have their places again."""
        for place in self._passed_over:
            heapq.heappush(self._heap, place)
        self._passed_over.clear()

    def _smallest(self) -> float:
        """The smallest counter among those that wait; the floor when nobody does."""
        waiting = [place[2] for place in self._passed_over if place[2].is_waiting]
        if self.next() is not None:
            waiting.append(self._heap[0][2])
        return min((account.virtual_tokens for account in waiting), default=self._floor)

    def _push(self, account: Account) -> None:
        self._num_pushed += 1
        account.place = self._num_pushed
        heapq.heappush(self._heap, (account.virtual_tokens, self._num_pushed, account))

    def _close_idle_accounts(self) -> None:
        """Forget those that would be lifted to the floor anyway, then those least ahead of it."""
        idle = [a for a in self._account_by_tenant.values() if not a.is_waiting]
        idle.sort(key=lambda account: account.virtual_tokens)
        for account in idle[:-_MAX_IDLE_ACCOUNTS]:
            del self._account_by_tenant[account.tenant]
