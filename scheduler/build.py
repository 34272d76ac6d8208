"""Builds a pool whose engines run SchedulerCore."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from headrace.status.store import StatusStore
from scheduler import takeover
from scheduler.config import PoolSettings, SchedulerSettings
from scheduler.core.plan import SchedulerConfig
from scheduler.core.policy import POLICIES, policy_name
from scheduler.core.scheduler import SchedulerCore
from scheduler.engine import WorkerEngine
from scheduler.orphans import Orphans
from scheduler.pool import Pool
from scheduler.replay.recording import Recording, path_for
from scheduler.switchboard import Switchboard
from scheduler.token_journal import TokenJournal
from scheduler.worker import WorkerSpec, WorkerStream


def core_config(info: WorkerSpec, settings: SchedulerSettings) -> SchedulerConfig:
    """The core's settings for a worker: the worker's limits, narrowed by the scheduler's settings.

    Drafts come with a result, which a step planned ahead of it cannot use. Unless we are told
    otherwise, no request gets more than half of a step's tokens: a long prompt leaves the other
    half to those that came after it.
    """
    pipeline_depth = settings.pipeline_depth or info.pipeline_depth
    num_spec_tokens = info.num_spec_tokens if pipeline_depth == 1 else 0
    token_budget = _narrowed(info.max_num_batched_tokens, settings.max_num_batched_tokens)
    half = max(1 + num_spec_tokens, token_budget // 2)
    return SchedulerConfig(
        block_size=info.block_size,
        num_gpu_blocks=info.num_kv_blocks + 1,  # the null block counts
        max_model_len=info.max_model_len,
        max_num_batched_tokens=token_budget,
        max_num_seqs=_narrowed(info.max_num_seqs, settings.max_num_seqs),
        long_prefill_token_threshold=settings.long_prefill_token_threshold or half,
        long_prefill_share=settings.long_prefill_share,
        policy=policy_name(settings.policy, displaces=settings.priority_preemption),
        enable_prefix_caching=settings.enable_prefix_caching,
        watermark=settings.watermark,
        num_spec_tokens=num_spec_tokens,
        spec_kind="ngram" if num_spec_tokens else None,
        pipeline_depth=pipeline_depth,
    )


def as_driven(info: WorkerSpec, config: SchedulerConfig) -> WorkerSpec:
    """The worker's spec for routers, with the limits that its steps have."""
    return replace(
        info,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        displaces_by_priority=POLICIES[config.policy].displaces,
    )


def build_pool(
    switchboard: Switchboard,
    settings: SchedulerSettings,
    pool_settings: PoolSettings,
    *,
    clock: Callable[[], float],
) -> Pool:
    """A pool without workers; clock: seconds since the epoch."""

    def make_engine(info: WorkerSpec, stream: WorkerStream) -> WorkerEngine:
        config = core_config(info, settings)
        recording = _recording(config, info, settings, is_only_worker=pool.num_workers == 1)
        return WorkerEngine(
            recording.recorder if recording else SchedulerCore(config),
            stream,
            as_driven(info, config),
            switchboard=switchboard,
            clock=clock,
            pipeline_depth=config.pipeline_depth,
            step_timeout_s=pool_settings.step_timeout_s,
            hashes_ahead=settings.enable_prefix_caching,
            recording=recording,
        )

    pool = Pool(make_engine, switchboard, pool_settings, clock=clock)
    return pool


def keep_journal(store: StatusStore, switchboard: Switchboard, orphans: Orphans) -> None:
    """Let the store's writer keep the tokens of all requests, if there is a store."""
    if store.is_configured:
        switchboard.log.journal = store.source = TokenJournal(switchboard.requests)
        store.watch(partial(takeover.on_superseded, switchboard, orphans))


def _narrowed(limit: int, setting: int) -> int:
    return min(limit, setting) if setting else limit


def _recording(
    config: SchedulerConfig,
    info: WorkerSpec,
    settings: SchedulerSettings,
    *,
    is_only_worker: bool,
) -> Recording | None:
    """A new recording of a worker's core, if it is to be recorded."""
    if not settings.record:
        return None
    path = path_for(Path(settings.record), info.worker_id, is_only_worker=is_only_worker)
    return Recording(config, path, max_bytes=settings.record_max_bytes)
