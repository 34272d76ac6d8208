"""The router's metrics: what each is, how requests are counted, and how all are read at once."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from headrace.service.errors import ServiceError
from headrace.service.metrics import (
    WAIT_BOUNDS_S,
    BoundedLabel,
    Distribution,
    Labels,
    Metric,
    Reading,
    Recorder,
    counter,
    gauge,
    histogram,
)
from headrace.status import metrics as store_metrics
from headrace.status.store import StatusStore
from headrace.vocabulary import FinishReason

if TYPE_CHECKING:
    from router.request import ClientRequest
    from router.router import Router

_PROVIDER = "headrace"
# Tenants with limits of their own have their own label values, and so many others.
_MAX_TENANTS = 32

_GEN_AI = ("gen_ai.operation.name", "gen_ai.provider.name", "gen_ai.request.model")
_BY_TENANT = ("model", "tenant")
_QUEUE = ("model", "policy", "tenant")
_TTFT_BOUNDS_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1),
    *(0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
)
_TPOT_BOUNDS_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5),
)  # fmt: skip

DURATION = histogram(
    "gen_ai.server.request.duration",
    "s",
    "From a call's arrival to the end of its request.",
    (*_GEN_AI, "error.type"),
    bounds=[0.01 * 2**k for k in range(14)],
    vllm="e2e_request_latency_seconds",
)
TIME_TO_FIRST_TOKEN = histogram(
    "gen_ai.server.time_to_first_token",
    "s",
    "From a call's arrival to its request's first token, once for each request.",
    _GEN_AI,
    bounds=_TTFT_BOUNDS_S,
    vllm="time_to_first_token_seconds",
)
TIME_PER_OUTPUT_TOKEN = histogram(
    "gen_ai.server.time_per_output_token",
    "s",
    "Mean time between tokens after the first, once for each request that ended here.",
    _GEN_AI,
    bounds=_TPOT_BOUNDS_S,
    vllm="request_time_per_output_token_seconds",
)
QUEUE_TIME = histogram(
    "headrace.queue.time",
    "s",
    "From a call's arrival until a worker began with its request.",
    _QUEUE,
    bounds=WAIT_BOUNDS_S,
    vllm="request_queue_time_seconds",
)
QUEUED_REQUESTS = gauge(
    "headrace.queue.requests",
    "{request}",
    "Completions that wait in the router's queue.",
    _QUEUE,
    vllm="num_requests_waiting",
)
QUEUED_TOKENS = gauge(
    "headrace.queue.tokens",
    "{token}",
    "Prompt and generated tokens of the completions that wait in the router's queue.",
    _QUEUE,
)
ACCEPTED = counter(
    "headrace.requests.accepted",
    "{request}",
    "Requests admitted, or taken up from another router or from the store. Always the sum of"
    " requests.ended, requests.released and requests.live.",
    _BY_TENANT,
)
ENDED = counter(
    "headrace.requests.ended",
    "{request}",
    "Requests that ended here, by how; deadline counts missed deadlines.",
    ("reason",),
    vllm="request_success_total",
)
RELEASED = counter(
    "headrace.requests.released", "{request}", "Requests that went on at another router."
)
LIVE = gauge("headrace.requests.live", "{request}", "Requests that have not ended.")
IN_FLIGHT = gauge(
    "headrace.completions.in_flight", "{request}", "Completions that a scheduler has."
)
PAUSED = gauge(
    "headrace.completions.paused", "{request}", "Completions that wait until their clients read."
)
REFUSED = counter(
    "headrace.requests.refused",
    "{request}",
    "Requests that were not admitted, by the reason that the caller was given, or the field's."
    " Calls that were refused before their request was read are in calls.refused.",
    ("reason",),
)
TAKEN_UP = counter(
    "headrace.requests.taken_up",
    "{request}",
    "Requests taken up after an earlier call: resumed by a caller, or recovered without one.",
    ("by",),
)
LOST_SCHEDULERS = counter(
    "headrace.schedulers.lost", "{connection}", "Connections to schedulers that broke."
)
PROMPT_TOKENS = counter(
    "headrace.tokens.prompt",
    "{token}",
    "Prompt tokens of admitted requests.",
    _BY_TENANT,
    vllm="prompt_tokens_total",
)
OUTPUT_TOKENS = counter(
    "headrace.tokens.output",
    "{token}",
    "Tokens generated for clients. Tokens that are computed again do not count again.",
    _BY_TENANT,
    vllm="generation_tokens_total",
)
CACHED_TOKENS = counter(
    "headrace.tokens.cached",
    "{token}",
    "Prompt tokens that the prefix cache had when a request was first admitted.",
    _BY_TENANT,
    vllm="prompt_tokens_cached_total",
)
READY_WORKERS = gauge(
    "headrace.workers.ready", "{worker}", "Workers that take requests for a model.", ("model",)
)

METRICS: tuple[Metric, ...] = (
    *(DURATION, TIME_TO_FIRST_TOKEN, TIME_PER_OUTPUT_TOKEN),
    *(QUEUE_TIME, QUEUED_REQUESTS, QUEUED_TOKENS),
    *(ACCEPTED, ENDED, RELEASED, LIVE, IN_FLIGHT, PAUSED, REFUSED, TAKEN_UP, LOST_SCHEDULERS),
    *(PROMPT_TOKENS, OUTPUT_TOKENS, CACHED_TOKENS, READY_WORKERS),
    *store_metrics.METRICS,
)


class Traffic:
    """What a model's requests of a tenant came to; the hot path adds to it."""

    __slots__ = ("num_accepted", "num_cached_tokens", "num_output_tokens", "num_prompt_tokens")

    def __init__(self) -> None:
        self.num_accepted = 0
        self.num_prompt_tokens = 0
        self.num_output_tokens = 0
        self.num_cached_tokens = 0


class Meters:
    """Counts what the router does; owned by the Router, which alone writes."""

    def __init__(self, policy: str, named_tenants: Iterable[str] = ()) -> None:
        """named_tenants: those with limits of their own."""
        named = list(named_tenants)
        self.policy = policy
        self._tenant_label = BoundedLabel(named, max_values=len(named) + _MAX_TENANTS)
        self.traffic_by_labels: defaultdict[Labels, Traffic] = defaultdict(Traffic)
        self.num_refused: Counter[str] = Counter()
        self.num_taken_up: Counter[str] = Counter()
        self.num_ended: Counter[FinishReason] = Counter()
        self.num_released = 0
        self.num_lost_schedulers = 0
        self._duration = Recorder(DURATION)
        self._time_to_first_token = Recorder(TIME_TO_FIRST_TOKEN)
        self._time_per_output_token = Recorder(TIME_PER_OUTPUT_TOKEN)
        self._queue_time = Recorder(QUEUE_TIME)
        self._recorders = (
            self._duration,
            self._time_to_first_token,
            self._time_per_output_token,
            self._queue_time,
        )

    @property
    def num_accepted(self) -> int:
        """Requests that were not released; the difference to those that ended is live."""
        accepted = sum(traffic.num_accepted for traffic in self.traffic_by_labels.values())
        return accepted - self.num_released

    def tenant_label(self, tenant: str) -> str:
        """The tenant's own label value, or "other"."""
        return self._tenant_label.of(tenant)

    def traffic(self, model: str, tenant: str) -> Traffic:
        """Where the requests of a tenant for a model are counted."""
        return self.traffic_by_labels[model, self.tenant_label(tenant)]

    def accepted(self, request: "ClientRequest") -> None:
        """A request is live from now on."""
        request.traffic.num_accepted += 1
        if request.is_taken_up:
            self.num_taken_up["caller" if request.has_reader else "recovery"] += 1
        else:
            request.traffic.num_prompt_tokens += len(request.prompt_token_ids)

    def refused(self, error: ServiceError) -> None:
        """A request was not admitted; reasons are those of the code, so they are few."""
        self.num_refused[error.counted_as or error.reason] += 1

    def admitted(self, request: "ClientRequest", num_cached_tokens: int) -> None:
        """A worker began with a request for the first time since it is here."""
        if request.is_taken_up:
            return
        request.traffic.num_cached_tokens += num_cached_tokens
        timeline, spec = request.timeline, request.spec
        if timeline.admitted is not None:
            labels = (spec.model, self.policy, self.tenant_label(spec.tenant))
            self._queue_time.record(timeline.admitted - timeline.arrived, labels)

    def got_first_token(self, request: "ClientRequest") -> None:
        """The first tokens came since a request is here; those of before were counted there."""
        timeline = request.timeline
        if timeline.first_token is not None and not request.num_tokens_before:
            waited_s = timeline.first_token - timeline.arrived
            self._time_to_first_token.record(waited_s, _gen_ai(request))

    def ended(self, request: "ClientRequest", reason: FinishReason) -> None:
        """A request ended, and is forgotten."""
        self.num_ended[reason] += 1
        timeline = request.timeline
        if timeline.ended is None:
            return
        labels, error = _gen_ai(request), ""
        if reason in {FinishReason.ERROR, FinishReason.DEADLINE, FinishReason.ABORTED}:
            error = request.error.reason if request.error is not None else reason.value
        self._duration.record(timeline.ended - timeline.arrived, (*labels, error))
        num_gaps = max(len(completion.token_ids) for completion in request.completions) - 1
        if timeline.first_token is not None and num_gaps > 0 and not request.is_taken_up:
            per_token_s = (timeline.ended - timeline.first_token) / num_gaps
            self._time_per_output_token.record(per_token_s, labels)

    def durations(self) -> Iterator[tuple[Metric, str, Distribution]]:
        """Each histogram by model, all tenants and other labels together."""
        for recorder in self._recorders:
            metric, points = recorder.read()
            at = next(i for i, label in enumerate(metric.labels) if label.endswith("model"))
            by_model: dict[str, Distribution] = {}
            for labels, found in points.items():
                assert isinstance(found, Distribution), "a histogram's"
                if (total := by_model.setdefault(labels[at], found)) is not found:
                    total.add(found)
            for model, total in sorted(by_model.items()):
                yield metric, model, total

    def histograms(self) -> Iterator[Reading]:
        """The readings of all histograms."""
        return (recorder.read() for recorder in self._recorders)


def read(router: "Router", models: Iterable[str], store: StatusStore) -> Iterator[Reading]:
    """Every metric now."""
    meters, live = router.meters, router.live
    traffic = meters.traffic_by_labels
    yield from meters.histograms()
    yield from _queue_readings(router)
    yield ACCEPTED, {labels: found.num_accepted for labels, found in traffic.items()}
    yield ENDED, {(reason.value,): meters.num_ended[reason] for reason in FinishReason}
    yield RELEASED, {(): meters.num_released}
    yield LIVE, {(): len(live)}
    yield IN_FLIGHT, {(): router.num_in_flight}
    yield PAUSED, {(): router.num_paused}
    yield REFUSED, {(reason,): count for reason, count in meters.num_refused.items()}
    yield TAKEN_UP, {(by,): meters.num_taken_up[by] for by in ("caller", "recovery")}
    yield LOST_SCHEDULERS, {(): meters.num_lost_schedulers}
    yield PROMPT_TOKENS, {labels: found.num_prompt_tokens for labels, found in traffic.items()}
    yield OUTPUT_TOKENS, {labels: found.num_output_tokens for labels, found in traffic.items()}
    yield CACHED_TOKENS, {labels: found.num_cached_tokens for labels, found in traffic.items()}
    now = router.now()
    yield READY_WORKERS, {(model,): len(router.pool.ready(model, now)) for model in models}
    yield from store_metrics.read(store)


def _queue_readings(router: "Router") -> Iterator[Reading]:
    """The queue's load; a tenant that waits nowhere now has no value."""
    meters = router.meters
    num_requests: Counter[Labels] = Counter()
    num_tokens: Counter[Labels] = Counter()
    for model, queue in router.queue.by_model:
        num_requests[model, meters.policy, ""] += 0
        for tenant, load in queue.load_by_tenant.items():
            labels = (model, meters.policy, meters.tenant_label(tenant))
            num_requests[labels] += load.num_requests
            num_tokens[labels] += load.num_tokens
    yield QUEUED_REQUESTS, num_requests
    yield QUEUED_TOKENS, num_tokens


def _gen_ai(request: "ClientRequest") -> Labels:
    spec = request.spec
    operation = "chat" if spec.prompt_field.startswith("chat") else "text_completion"
    return (operation, _PROVIDER, spec.model)
