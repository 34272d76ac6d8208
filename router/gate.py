"""Applies admission's rules to the router's state.

A call takes a permit first, and then counts as a prompt being read until its request is admitted or
given up. `core.admission` and `core.permits` decide; their refusals become errors here.
"""

from collections import Counter
from collections.abc import Callable

from headrace.service.errors import ServiceError
from router import outcomes
from router.core.admission import Ask, QueueLoad, Reject, Situation, decide
from router.core.permits import Permits
from router.dispatcher import Dispatcher
from router.request import Spec
from router.rules import Rules
from router.status_log import StatusLog


class Gate:
    """Owns the permits, and knows how many prompts are being read."""

    def __init__(
        self,
        rules: Rules,
        dispatcher: Dispatcher,
        status: StatusLog,
        clock: Callable[[], float],
    ) -> None:
        """clock is monotonic, in seconds."""
        self.permits = Permits(rules.limits, rules.tenant_limits, rules.limits_by_tenant)
        self._limits = rules.limits
        self._dispatcher = dispatcher
        self._status = status
        self._clock = clock
        self._num_reading_by_tenant: Counter[str] = Counter()

    @property
    def num_reading(self) -> int:
        """Requests whose prompts are being read."""
        return self._num_reading_by_tenant.total()

    def enter(self, tenant: str) -> None:
        """Take a permit, which `leave` gives back, and count a prompt being read; or raise."""
        refusal = self.permits.enter(tenant, self._clock())
        if refusal is not None:
            raise outcomes.rejected(refusal)
        self._num_reading_by_tenant[tenant] += 1

    def check_permit(self, tenant: str) -> None:
        """Raise if `enter` would."""
        refusal = self.permits.refusal(tenant, self._clock())
        if refusal is not None:
            raise outcomes.rejected(refusal)

    def enter_again(self, tenant: str) -> None:
        """Take a permit, which `leave` gives back, for a request that was admitted before."""
        self.permits.take(tenant, self._clock())

    def stop_reading(self, tenant: str) -> None:
        """A prompt was tokenized, or its request was given up."""
        self._num_reading_by_tenant[tenant] -= 1
        if not self._num_reading_by_tenant[tenant]:
            del self._num_reading_by_tenant[tenant]

    def leave(self, tenant: str) -> None:
        """Give the permit of a call back."""
        self.permits.leave(tenant, self._clock())

    def spend(self, tenant: str, num_tokens: int) -> None:
        """Charge prompt or output tokens of an admitted request to its tenant's rate."""
        self.permits.spend_tokens(tenant, num_tokens, self._clock())

    def check(
        self, spec: Spec, num_prompt_tokens: int, deadline: float | None, *, is_read: bool
    ) -> int:
        """The request's max_tokens; raises the error that says why the request is refused.

        deadline is on the monotonic clock. Until the prompt is read, num_prompt_tokens is a lower
        bound, and only a hopeless request is refused.
        """
        now = self._clock()
        queue, rate = self._dispatcher.queue, self._dispatcher.rate(spec.model)
        # Other prompts being read count as queued; this request's own prompt is not counted.
        load, num_reading = queue.load, self.num_reading - 1
        tenant_load = queue.load_of(spec.tenant)
        num_reading_of_tenant = self._num_reading_by_tenant[spec.tenant] - 1
        situation = Situation(
            capacities=self._dispatcher.pool.capacities(spec.model, now),
            load=QueueLoad(load.num_requests + num_reading, load.num_tokens),
            tenant_load=QueueLoad(
                tenant_load.num_requests + num_reading_of_tenant, tenant_load.num_tokens
            ),
            predicted_wait_s=rate.predicted_wait_s(queue.of(spec.model).tokens_ahead(spec.tenant)),
            tokens_per_s=rate.tokens_per_s,
        )
        ask = Ask(
            num_prompt_tokens=num_prompt_tokens,
            is_read=is_read,
            max_tokens=spec.max_tokens,
            min_tokens=spec.min_tokens,
            num_completions=spec.n,
            deadline=deadline,
        )
        tenant_limits = self.permits.limits_of(spec.tenant)
        verdict = decide(ask, situation, self._limits, tenant_limits, now)
        if isinstance(verdict, Reject):
            raise self._rejected(spec, verdict, num_prompt_tokens if is_read else 0)
        if spec.max_tokens is None and spec.default_max_tokens is not None:
            return min(verdict.max_tokens, max(spec.default_max_tokens, spec.min_tokens))
        return verdict.max_tokens

    def _rejected(self, spec: Spec, reject: Reject, num_prompt_tokens: int) -> ServiceError:
        """The error of a refusal, once it is recorded.

        Were the error a variable of the method that raises it, the two would refer to each other,
        and the prompt would stay until a garbage collection.
        """
        error = outcomes.rejected(reject, spec.prompt_field)
        self._status.rejected(spec, num_prompt_tokens, error.message)
        return error
