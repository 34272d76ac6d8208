"""The trace format: settings and requests of a run as JSON-able records, both ways.

The fields of vLLM 0.27.1's recordings are read and written. Extensions, all optional: a step
without `sched` (inputs arrived in another order than a step's), `now` in a step, `client` in a step
(pairs of "pause" or "continue" and a request), `paused` and `held` in a step's state, `failed` in
an update, `long_prefill_share` in the config, and `deadline`, `output` and `eos_token_ids` in a
request.
"""

from dataclasses import asdict
from typing import Any

import numpy as np

from scheduler.core.plan import NewRequest, RemotePrefix, RepetitionLimit, SchedulerConfig
from scheduler.core.policy import POLICIES, policy_name

TraceRecord = dict[str, Any]

SCHEMA = "vllm-sched-trace/1"
# Settings with the same name and values in a SchedulerConfig.
_SAME_FIELDS = (
    *("block_size", "num_gpu_blocks", "max_model_len", "max_num_batched_tokens", "max_num_seqs"),
    *("long_prefill_token_threshold", "long_prefill_share", "enable_chunked_prefill"),
    *("enable_prefix_caching", "watermark", "num_spec_tokens", "spec_kind"),
)


def header(config: SchedulerConfig, name: str) -> TraceRecord:
    """The first record of a recording: a trace without its requests and steps."""
    return {
        "schema": SCHEMA,
        "name": name,
        "oracle": {"package": "headrace", "pipeline_depth": config.pipeline_depth},
        "config": {
            **{field: getattr(config, field) for field in _SAME_FIELDS},
            "max_num_scheduled_tokens": None,
            "policy": POLICIES[config.policy].name,
            "priority_preemption": POLICIES[config.policy].displaces,
            "scheduler_reserve_full_isl": config.reserve_full_sequence,
            "async_scheduling": config.pipeline_depth > 1,
        },
        "eos_token_id": None,
    }


def request_record(request: NewRequest, arrival: int) -> TraceRecord:
    """A request in the trace format."""
    record: TraceRecord = {
        "arrival": arrival,
        "arrival_time": request.arrival_time,
        "prompt": request.prompt_token_ids.tolist(),
        "max_tokens": request.max_tokens,
    }
    optional: TraceRecord = {
        "priority": request.priority,
        "min_tokens": request.min_tokens,
        "stop_token_ids": list(request.stop_token_ids),
        "cache_salt": request.cache_salt,
        "skip_reading_prefix_cache": request.skip_reading_prefix_cache,
        "eos_token_ids": list(request.eos_token_ids),
        "output": request.output_token_ids.tolist(),
        "deadline": request.deadline,
        "export_s": request.export_s,
    }
    record |= {name: value for name, value in optional.items() if value}
    if request.needs_grammar:
        record["blocked_until"] = arrival
    if request.remote_prefix is not None:
        record["remote_prefix"] = asdict(request.remote_prefix)
    if request.repetition is not None:
        limit = request.repetition
        record["repetition"] = {
            "max_pattern_size": limit.max_pattern_size,
            "min_pattern_size": limit.min_pattern_size,
            "min_count": limit.min_count,
        }
    return record


def trace_config(trace: TraceRecord) -> SchedulerConfig:
    """The settings a trace was recorded with."""
    config = dict(trace["config"])
    if budget := config.get("max_num_scheduled_tokens"):
        config["max_num_batched_tokens"] = budget
    return SchedulerConfig(
        **{field: config[field] for field in _SAME_FIELDS if field in config},
        policy=policy_name(config["policy"], displaces=config.get("priority_preemption", False)),
        reserve_full_sequence=config["scheduler_reserve_full_isl"],
        pipeline_depth=trace["oracle"]["pipeline_depth"],
    )


def trace_request(trace: TraceRecord, request_id: str, key: int) -> NewRequest:
    """A request of a trace."""
    record = trace["requests"][request_id]
    eos_token_ids = record.get("eos_token_ids") or (
        [trace["eos_token_id"]] if record.get("use_eos") else []
    )
    repetition = record.get("repetition")
    remote_prefix = record.get("remote_prefix")
    return NewRequest(
        key=key,
        request_id=request_id,
        prompt_token_ids=np.array(record["prompt"], dtype=np.int32),
        output_token_ids=np.array(record.get("output", []), dtype=np.int32),
        max_tokens=record["max_tokens"],
        arrival_time=record["arrival_time"],
        priority=record.get("priority", 0),
        eos_token_ids=tuple(eos_token_ids),
        stop_token_ids=tuple(record.get("stop_token_ids", ())),
        min_tokens=record.get("min_tokens", 0),
        cache_salt=record.get("cache_salt") or "",
        skip_reading_prefix_cache=record.get("skip_reading_prefix_cache", False),
        deadline=record.get("deadline"),
        needs_grammar="blocked_until" in record,
        repetition=RepetitionLimit(**repetition) if repetition else None,
        remote_prefix=RemotePrefix(**remote_prefix) if remote_prefix else None,
        export_s=record.get("export_s", 0.0),
    )
