"""Whatever happens to a router: every request is counted once, every completion is in one place.

What was let in is, at every instant, exactly what has ended and what is live.
"""

import asyncio
import contextlib

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headrace.service.errors import ServiceError
from headrace.vocabulary import FinishReason, RefusalReason
from router.core.admission import Limits, TenantLimits
from router.core.pauses import UnreadLimits
from router.outputs import Refusal
from router.request import Spec
from router.revival import remembered
from tests.router.bench import TOKENIZER, Bench, report

MODELS = {"s": "m", "t": "m", "u": "other"}
ids = st.integers(0, 63).map("r-{}".format)
tenants = st.sampled_from("abc")
chances = st.integers(0, 10**6)
# Tokens of the prompt, n, model, priority, and how far away the deadline is.
asks = st.tuples(
    st.integers(1, 300),
    st.sampled_from([1, 1, 4]),
    st.sampled_from(["m", "m", "other"]),
    st.integers(-2, 2),
    st.sampled_from([None, None, None, -0.1, 0.3, 2.0]),
)


class RouterMachine(RuleBasedStateMachine):
    """A router between callers and three schedulers; time passes only when it is told to."""

    @initialize(
        policy=st.sampled_from(["fcfs", "priority", "fair"]),
        displaces=st.booleans(),
        max_live=st.sampled_from([0, 12]),
    )
    def build(self, policy, displaces, max_live):
        self.displaces = displaces
        self.bench = Bench(
            policy=policy,
            priority_aging_s=1.0,
            limits=Limits(max_live_requests=max_live, max_queued_requests=20),
            tenant_limits=TenantLimits(max_queued_requests=12, max_queued_tokens=2000),
            unread=UnreadLimits(max_unread_tokens=6, max_pause_s=1.0),
        )
        for name in MODELS:
            self.connect(name)
        self.reading = {}  # request id -> what ends its caller's stay, and the reservation
        self.stays = {}  # request id -> what ends its caller's stay
        self.replaced = []  # what ends the stays of callers whose requests went on elsewhere
        self.first_token = {}

    def connect(self, name):
        self.bench.add(name, 4, model=MODELS[name], displaces_by_priority=self.displaces)

    def pick(self, things, chance):
        things = list(things)
        return things[chance % len(things)]

    @rule(callers=st.lists(st.tuples(ids, tenants), min_size=3, max_size=12))
    def come(self, callers):
        """Their prompts are being read from here on, if there are permits and ids are free."""
        for request_id, tenant in callers:
            is_free = self.bench.router.calls.get(request_id) is None
            with contextlib.suppress(ServiceError):
                stay = self.bench.router.reserve(request_id, tenant)
                self.reading[request_id] = (stay, stay.__enter__())
                assert is_free

    @precondition(lambda self: self.reading)
    @rule(asks=st.lists(asks, min_size=3, max_size=12))
    def be_read(self, asks):
        """Prompts are read, and their requests let in or refused."""
        for request_id, ask in zip(list(self.reading), asks, strict=False):
            num_tokens, n, model, priority, lead_s = ask
            stay, reservation = self.reading.pop(request_id)
            spec = Spec(
                request_id=request_id,
                model=model,
                sampling=None,
                n=n,
                tenant=reservation.tenant,
                priority=priority,
                max_tokens=50,
                # What the steps bring, so some requests stop after seven tokens.
                stop=(7 * "b",) if num_tokens % 2 else (),
                deadline_unix_s=None if lead_s is None else self.bench.time + lead_s,
                goes_on=num_tokens % 3 == 0,
                recovers_at_once=num_tokens % 5 == 0,
            )
            router, prompt = self.bench.router, np.ones(num_tokens, np.int32)
            try:
                router.check(spec, num_tokens)
                router.submit(reservation, spec, prompt, "", TOKENIZER)
            except ServiceError:
                assert reservation.request is None
                stay.__exit__(None, None, None)
            else:
                self.stays[request_id] = stay

    @precondition(lambda self: self.reading)
    @rule(chance=chances)
    def leave_while_read(self, chance):
        stay, _ = self.reading.pop(self.pick(self.reading, chance))
        stay.__exit__(None, None, None)

    @precondition(lambda self: self.stays)
    @rule(chance=chances, is_abrupt=st.booleans())
    def leave(self, chance, is_abrupt):
        """A caller has its answer, or is gone; its request may go on then."""
        stay = self.stays.pop(self.pick(self.stays, chance))
        error = asyncio.CancelledError() if is_abrupt else None
        stay.__exit__(error and type(error), error, None)

    @precondition(lambda self: len(self.bench.router.live))
    @rule(chance=chances, num_wanted=st.integers(0, 12), has_caller=st.booleans())
    def take_up(self, chance, num_wanted, has_caller):
        """A caller comes back to a request, or a sweep does; an earlier caller is still there."""
        request = self.pick(self.bench.router.live._requests.values(), chance)
        request_id, origin = request.spec.request_id, remembered(request)
        if request_id in self.stays:
            self.replaced.append(self.stays.pop(request_id))
        if has_caller:
            wanted = [num_wanted] * len(origin.pasts)
            stay = self.bench.router.take_up(origin, wanted, TOKENIZER)
            revived = stay.__enter__()
            self.stays[request_id] = stay
            assert all(c.num_streamed == num_wanted for c in revived.completions)
        else:
            self.bench.router.recover(origin, TOKENIZER)
        assert request.is_released
        for link in self.bench.links.values():
            # What ended in the text it was rebuilt from is not submitted, and not cancelled.
            for handle, completion in list(link.sent.items()):
                if completion.request is request:
                    link.drop(handle)

    @precondition(lambda self: self.replaced)
    @rule()
    def leave_late(self):
        """A caller whose request went on in a later call."""
        self.replaced.pop().__exit__(None, None, None)

    @rule(name=st.sampled_from(sorted(MODELS)), chance=chances)
    def move(self, name, chance):
        """Another router takes a request from this one."""
        link = self.bench.links[name]
        if not link.sent:
            return
        handle = self.pick(link.sent, chance)
        request = link.sent[handle].request
        self.bench.router.live.on_moved([handle])
        assert request.error.reason == "RESUMED_ELSEWHERE"
        for other in self.bench.links.values():
            for number, completion in list(other.sent.items()):
                if completion.request is request:
                    other.drop(number)
        if request.spec.request_id in self.stays:
            self.replaced.append(self.stays.pop(request.spec.request_id))

    @rule()
    def hand_over_what_nobody_reads(self):
        """There is no store: it ends."""
        self.bench.router.hand_over(is_unread=True)
        assert all(r.has_reader for r in self.bench.router.live._requests.values())

    @rule(
        num_tokens=st.integers(1, 3), num_passed_over=st.integers(0, 4), num_ends=st.integers(0, 2)
    )
    def step(self, num_tokens, num_passed_over, num_ends):
        """What schedulers have gets tokens, but for some; a few end."""
        for name, link in self.bench.links.items():
            advanced = list(link.sent)[num_passed_over:]
            self.bench.step(name, num_tokens, handles=advanced, ends=advanced[:num_ends])

    @rule(request_id=ids)
    def abort(self, request_id):
        self.bench.router.abort(request_id)

    @rule(tenant=tenants)
    def abort_tenant(self, tenant):
        self.bench.router.abort_tenant(tenant, lambda _: True)
        for stay_id, reservation in self.bench.router.calls._by_id.items():
            if reservation.tenant == tenant and reservation.request is not None:
                assert reservation.request.is_finished, stay_id

    @rule(name=st.sampled_from(sorted(MODELS)), chance=chances,
          reason=st.sampled_from([RefusalReason.NO_WORKER, RefusalReason.INVALID]))  # fmt: skip
    def refuse(self, name, chance, reason):
        link = self.bench.links[name]
        if link.sent:
            handle = self.pick(link.sent, chance)
            del link.sent[handle]
            link.paused.discard(handle)
            self.bench.router.live.on_refusal(Refusal(handle, reason, ""))

    @rule(name=st.sampled_from(sorted(MODELS)))
    def lose(self, name):
        """The scheduler goes, and comes back."""
        link = self.bench.links.pop(name)
        link.sent.clear()
        self.bench.router.live.on_lost(link)
        self.connect(name)

    @rule(seconds=st.sampled_from([0.01, 0.2, 1.5]))
    def pass_time(self, seconds):
        self.bench.time += seconds
        self.bench.router.expire()
        for name, model in MODELS.items():
            one = report(name, 4, model=model, displaces_by_priority=self.displaces)
            self.bench.router.live.on_report(name, [one], is_draining=False)

    @precondition(lambda self: self.stays)
    @rule(chance=chances, share=st.sampled_from([1, 2]))
    def read(self, chance, share):
        """A client reads what has come, or half of it."""
        request = self.pick(self.bench.router.live._requests.values(), chance)
        for completion in request.completions:
            completion.num_streamed += completion.num_unread // share
            self.bench.router.live.on_read(completion)

    @invariant()
    def every_request_is_counted_once(self):
        router = self.bench.router
        requests = router.live._requests.values()
        assert sum(request.has_reader for request in requests) == len(self.stays)
        assert router.meters.num_accepted == sum(router.meters.num_ended.values()) + len(requests)
        assert router.num_live == len(requests) + len(self.reading)
        assert {r.number for r in router._orphans} <= {r.number for r in requests}
        assert router._gate.permits.num_live == router.num_live
        assert router._gate.num_reading == len(self.reading)
        assert set(router.meters.num_ended) <= set(FinishReason)

    @invariant()
    def every_completion_is_in_one_place(self):
        """A paused completion may be in none while no scheduler has it."""
        router = self.bench.router
        unfinished = [
            c for r in router.live._requests.values() for c in r.completions if c.finish is None
        ]
        sent = [c for link in self.bench.links.values() for c in link.sent.values()]
        dispatcher = router._dispatcher
        suspects = dispatcher._suspects._held.values()
        places = [id(c) for c in (*dispatcher.queue, *suspects, *sent)]
        held = [id(c) for c in unfinished if c.is_paused and id(c) not in places]
        assert sorted(places + held) == sorted(id(c) for c in unfinished)
        paused = [h for link in self.bench.links.values() for h in link.paused]
        assert len(dispatcher._restraint._pauses) == len(held) + len(paused)
        assert router.pool.num_in_flight() == len(sent) - len(paused)

    @invariant()
    def loads_are_what_waits(self):
        queue = self.bench.router._dispatcher.queue
        waiting = list(queue)
        assert queue.load.num_requests == len(waiting)
        for tenant in "abc":
            of_tenant = [c for c in waiting if c.request.spec.tenant == tenant]
            assert queue.load_of(tenant).num_requests == len(of_tenant)

    @invariant()
    def nobody_waits_while_a_worker_has_credit_for_the_first_in_line(self):
        dispatcher = self.bench.router._dispatcher
        for _, line in dispatcher.queue.by_model:
            completion = line.peek()
            if completion is not None:
                need = dispatcher._need(completion, now=self.bench.time)
                assert dispatcher.pool.choose(need, self.bench.time) is None
            line.put_back()

    @invariant()
    def a_first_token_is_first_for_good(self):
        for number, request in self.bench.router.live._requests.items():
            seen = request.timeline.first_token
            num_new = request.num_completion_tokens - request.num_tokens_before
            assert (seen is not None) >= (num_new > 0)
            assert self.first_token.setdefault(number, seen) in (None, seen)
            self.first_token[number] = seen

    def teardown(self):
        if hasattr(self, "bench"):
            for stay, _ in self.reading.values():
                stay.__exit__(None, None, None)
            for stay in (*self.stays.values(), *self.replaced):
                stay.__exit__(None, None, None)
            # What waits gets its turn once workers that had refused something report themselves.
            for _ in range(100):
                self.pass_time(1000.0)
                for name in MODELS:
                    self.bench.step(name, ends=list(self.bench.links[name].sent))
            self.bench.assert_empty()


TestRouter = RouterMachine.TestCase
TestRouter.settings = settings(max_examples=60, stateful_step_count=80)
