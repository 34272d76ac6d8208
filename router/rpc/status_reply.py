"""GetStatus from the store: a request's record, or the sum of its completions' records."""

from collections.abc import Sequence

from google.protobuf.timestamp_pb2 import Timestamp

from headrace.service.errors import not_found
from headrace.status.records import Record
from headrace.status.store import StatusStore
from headrace.v1 import inference_pb2
from router import outcomes


async def read_status(store: StatusStore, request_id: str) -> inference_pb2.GetStatusResponse:
    """A request's status; an error when the store has no record of the request."""
    records = await store.records(request_id)
    if not records and not store.is_durable:
        raise outcomes.not_known_yet(request_id)
    if not records:
        raise not_found("UNKNOWN_REQUEST", f"request_id: there is no record of {request_id!r}")
    return _response(request_id, records)


def _response(request_id: str, records: Sequence[Record]) -> inference_pb2.GetStatusResponse:
    """The sum of the completions' records; the request lives as long as one of them does."""
    living = [record for record in records if not record.state.is_final]
    shown = living[0] if living else max(records, key=lambda record: record.update_time_unix_s)
    return inference_pb2.GetStatusResponse(
        request_id=request_id,
        state=shown.state.value,
        epoch=max(record.epoch for record in records),
        tenant=shown.tenant,
        model=shown.model,
        create_time=_timestamp(records[0].create_time_unix_s),
        update_time=_timestamp(max(record.update_time_unix_s for record in records)),
        prompt_tokens=shown.prompt_tokens,
        # A record has them at the end, and when the request is queued again; the journal has more.
        completion_tokens=sum(max(r.completion_tokens, r.journal_tokens) for r in records),
        detail=shown.detail,
        router_id=shown.router_id,
        scheduler_id=shown.scheduler_id,
        worker_id=shown.worker_id,
    )


def _timestamp(unix_s: float) -> Timestamp:
    stamp = Timestamp()
    stamp.FromNanoseconds(int(unix_s * 1e9))
    return stamp
