"""The scheduler's settings."""

from typing import Annotated, Literal

import msgspec

from headrace.service.config import StoreSettings, help_text
from scheduler.core.policy import PolicySetting


class SchedulerSettings(StoreSettings, frozen=True, forbid_unknown_fields=True):
    """The scheduler's name, limits and policies. 0 means: the worker's own limit."""

    scheduler_id: Annotated[str, help_text("Name of this scheduler; the host's if empty.")] = ""
    worker: Annotated[tuple[str, ...], help_text("host:port of a gpuworker to drive.")] = ()
    worker_selector: Annotated[
        str,
        help_text(
            "Labels of gpuworkers' pods, for discovery by Kubernetes, e.g."
            " app.kubernetes.io/component=gpuworker."
        ),
    ] = ""
    policy: Annotated[PolicySetting, help_text("Order of waiting requests.")] = "fcfs"
    priority_preemption: Annotated[
        bool, help_text("Under policy priority, the least urgent give way to more urgent ones.")
    ] = True
    max_num_batched_tokens: Annotated[
        int, help_text("Tokens a step, at most; 0: as the worker.", ge=0)
    ] = 0
    max_num_seqs: Annotated[
        int, help_text("Requests in a step, at most; 0: as the worker.", ge=0)
    ] = 0
    long_prefill_token_threshold: Annotated[
        int, help_text("Tokens a step that one request gets, at most; 0: half a step's.", ge=0)
    ] = 0
    long_prefill_share: Annotated[
        float,
        help_text(
            "Fraction of a step, decodes aside, that prompts above that threshold share while"
            " shorter ones wait or run; 1: no limit.",
            gt=0,
            le=1,
        ),
    ] = 0.5
    watermark: Annotated[
        float, help_text("Fraction of the KV blocks kept free when admitting.", ge=0, lt=1)
    ] = 0.0
    enable_prefix_caching: Annotated[bool, help_text("Reuse KV blocks of equal prefixes.")] = True
    pipeline_depth: Annotated[
        Literal[0, 1, 2],
        help_text("Steps in flight; 2 plans one ahead of the results; 0: as the worker says."),
    ] = 0
    record: Annotated[
        str, help_text("Write inputs (prompts too) and decisions to this file, for `replay`.")
    ] = ""
    record_max_bytes: Annotated[
        int, help_text("Size of one recording; three older ones are kept.", ge=0)
    ] = 256 * 1024 * 1024


class PoolSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How workers are watched, and how long is waited for lost workers and routers."""

    step_timeout_s: Annotated[
        float, help_text("A worker that gives no result for so long is lost.", gt=0)
    ] = 120.0
    requeue_timeout_s: Annotated[
        float, help_text("Requests of a lost worker wait so long for another.", ge=0)
    ] = 120.0
    max_num_losses: Annotated[
        int,
        help_text("A request whose worker died so often while running it ends as an error.", ge=0),
    ] = 3
    orphan_ttl_s: Annotated[
        float,
        help_text("Requests whose router has gone end unless a router resumes them in time.", ge=0),
    ] = 60.0
    max_orphan_tokens: Annotated[
        int, help_text("A request whose router has gone pauses after more new tokens.", ge=0)
    ] = 1024
    quarantine_s: Annotated[
        float,
        help_text(
            "A worker that died 4 times in a row within a minute of its start is left alone for so"
            " long, then for twice as long, up to 60 s; 0: never.",
            ge=0,
        ),
    ] = 5.0
    max_waiting_tokens: Annotated[
        int, help_text("Tokens that may wait for a slow router before its stream is ended.", ge=1)
    ] = 4_000_000
