"""Messages to the core's plans and back; whatever comes from outside is checked here, once."""

from collections.abc import Iterable
from typing import Any

from gpuworker.core.plan import (
    AssignedRequest,
    ExecutedStep,
    LogprobColumns,
    OccupiedRows,
    ReceivedPlan,
    RowLogprobColumns,
    SamplingSettings,
)
from headrace.parameters import PARAMETERS, Parameter
from headrace.service.columns import pack_int32, unpack_int32
from headrace.service.sampling import check_values
from headrace.v1 import common_pb2, gpuworker_pb2

# The largest value of an int32 column of settings.
_MAX_INT32 = 2**31 - 1

_INT32_COLUMNS = (
    "freed_rows",
    "appended_block_rows",
    "appended_block_ids",
    "rows",
    "num_computed_tokens",
    "num_scheduled_tokens",
    "num_draft_tokens",
    "draft_token_ids",
)


def step_plan(message: gpuworker_pb2.StepPlan) -> ReceivedPlan:
    """A plan's message as columns.

    Raises:
        ServiceError: INVALID_ARGUMENT naming the field.
    """
    columns = {name: unpack_int32(getattr(message, name), name) for name in _INT32_COLUMNS}
    return ReceivedPlan(
        step_id=message.step_id,
        row_requests=tuple(_row_request(request) for request in message.row_requests),
        traceparent=message.traceparent,
        wants_audit=message.audit,
        **columns,
    )


def step_result(result: ExecutedStep) -> gpuworker_pb2.StepResult:
    """A result as its message."""
    return gpuworker_pb2.StepResult(
        step_id=result.step_id,
        num_sampled_tokens=pack_int32(result.num_sampled_tokens),
        token_ids=pack_int32(result.token_ids),
        num_draft_tokens=pack_int32(result.num_draft_tokens),
        draft_token_ids=pack_int32(result.draft_token_ids),
        logprobs=[_row_logprobs(row) for row in result.logprobs],
        errors=[
            gpuworker_pb2.RowError(row=error.row, message=error.message) for error in result.errors
        ],
        elapsed_s=result.elapsed_s,
        audit=_rows_audit(result.audit) if result.audit is not None else None,
    )


def _rows_audit(audit: OccupiedRows) -> gpuworker_pb2.RowsAudit:
    return gpuworker_pb2.RowsAudit(
        rows=pack_int32(audit.rows),
        num_blocks=pack_int32(audit.num_blocks),
        block_ids=pack_int32(audit.block_ids),
    )


def _row_request(message: gpuworker_pb2.RowRequest) -> AssignedRequest:
    return AssignedRequest(
        row=message.row,
        request_id=message.request_id,
        token_ids=unpack_int32(message.token_ids, "row_requests.token_ids"),
        num_prompt_tokens=message.num_prompt_tokens,
        sampling=_sampling(message.sampling),
    )


def _sampling(message: common_pb2.SamplingParams) -> SamplingSettings:
    check_values(message)
    return SamplingSettings(
        **{p.name: _number(message, p) for p in PARAMETERS},
        seed=message.seed,
        logit_bias=tuple(sorted(message.logit_bias.items())),
        min_tokens=min(message.min_tokens, _MAX_INT32),
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        bad_token_ids=tuple(tuple(sequence.ids) for sequence in message.bad_token_ids),
        num_logprobs=message.logprobs if message.HasField("logprobs") else None,
        num_prompt_logprobs=(
            message.prompt_logprobs if message.HasField("prompt_logprobs") else None
        ),
    )


def _number(message: common_pb2.SamplingParams, parameter: Parameter) -> Any:
    """A parameter's value, limited to its column's range; None where the message has no value."""
    if not message.HasField(parameter.name):  # type: ignore[arg-type]
        return None
    value = getattr(message, parameter.name)
    return min(value, _MAX_INT32) if parameter.is_whole else value


def _row_logprobs(row: RowLogprobColumns) -> gpuworker_pb2.RowLogprobs:
    return gpuworker_pb2.RowLogprobs(
        row=row.row, tokens=_tokens(row.tokens), prompt_tokens=_tokens(row.prompt_tokens)
    )


def _tokens(columns: LogprobColumns | None) -> Iterable[common_pb2.TokenLogprobs]:
    if columns is None:
        return ()
    return [
        common_pb2.TokenLogprobs(
            token_id=token_id,
            logprob=logprob,
            rank=rank,
            top_token_ids=top_token_ids,
            top_logprobs=top_logprobs,
        )
        for token_id, logprob, rank, top_token_ids, top_logprobs in zip(
            columns.token_ids.tolist(),
            columns.logprobs.tolist(),
            columns.ranks.tolist(),
            columns.top_token_ids.tolist(),
            columns.top_logprobs.tolist(),
            strict=True,
        )
    ]
