"""A core's state as plain data: the partial state that a trace has per step, and the full state.

A recording that begins in the middle of a run begins with the full state. Requests have their names
in the recording, whose `requests` hold their specs.
"""

import base64
import zlib
from collections.abc import Sequence
from dataclasses import astuple
from itertools import count, islice

import numpy as np

from scheduler.core.explain import History
from scheduler.core.plan import Lease, NewRequest, Pause, PrefixCacheStats, RequestStatus
from scheduler.core.request import NO_ROW, Request
from scheduler.core.request_table import NO_ADMISSION
from scheduler.core.state import Flight, SchedulerState
from scheduler.replay.trace import TraceRecord

_STATUS_LETTERS = {
    RequestStatus.WAITING: "W",
    RequestStatus.WAITING_FOR_GRAMMAR: "B",
    RequestStatus.WAITING_FOR_REMOTE_KV: "B",
    RequestStatus.WAITING_FOR_CLIENT: "C",
    RequestStatus.RUNNING: "R",
    RequestStatus.PREEMPTED: "P",
}

NUM_FREE_HEAD = 4
# The key of an ended request, whose lease lives on.
_ENDED = -1


def take(state: SchedulerState, name_by_key: dict[int, str]) -> TraceRecord:
    """The state between two calls of a core."""
    table, queues = state.table, state.queues
    running = [table.request(row) for row in table.running_rows.tolist()]
    return {
        "step_id": state.step_id,
        "now": state.now,
        "pause": state.pause.value,
        "is_saturated": state.is_saturated,
        "stats": list(astuple(state.stats)),
        "running": [name_by_key[request.key] for request in running],
        "waiting": [name_by_key[request.key] for request in queues.waiting],
        "skipped": [name_by_key[request.key] for request in queues.skipped],
        "held": [name_by_key[request.key] for request in queues.held],
        "paused": [name_by_key[key] for key in queues.paused],
        # In order of arrival.
        "requests": {
            name_by_key[key]: _request_record(state, request)
            for key, request in state.requests.items()
        },
        "free_blocks": list(state.kv.pool.free_blocks),
        "cached": [
            [base64.b64encode(digest).decode(), block_ids]
            for digest, block_ids in sorted(state.kv.pool.cached_blocks())
        ],
        "flights": [_flight_record(state, flight, name_by_key) for flight in state.flights],
        **({"leases": _leases_record(state, name_by_key)} if state.leases.num_begun else {}),
    }


def restore(
    state: SchedulerState, snapshot: TraceRecord, spec_by_name: dict[str, NewRequest]
) -> None:
    """Restore a snapshot into a new core; only row numbers may differ.

    Args:
        spec_by_name: every request of the snapshot.
    """
    state.step_id, state.now = snapshot["step_id"], snapshot["now"]
    state.pause, state.is_saturated = Pause(snapshot["pause"]), snapshot["is_saturated"]
    state.stats = PrefixCacheStats(*snapshot["stats"])
    requests = {
        name: _restored_request(state, spec_by_name[name], record)
        for name, record in snapshot["requests"].items()
    }
    held = []
    for name in snapshot["running"]:
        record = snapshot["requests"][name]
        _restore_row(state, requests[name], record)
        held.append(record["blocks"])
    for name in snapshot["waiting"]:
        state.queues.waiting.add(requests[name])
    for name in snapshot["skipped"]:
        state.queues.skipped.add(requests[name])
    for name in snapshot.get("held", ()):
        state.queues.hold(requests[name])
    for name in snapshot.get("paused", ()):
        state.queues.pause(requests[name])
    leases = snapshot.get("leases", {"num_begun": 0, "begun": [], "ended": [], "live": []})
    held += [record["blocks"] for record in leases["live"]]
    cached = [(base64.b64decode(digest), block_ids) for digest, block_ids in snapshot["cached"]]
    state.kv.pool.restore(snapshot["free_blocks"], held, cached)
    state.leases.restore(
        leases["num_begun"],
        [_restored_lease(state, record, requests) for record in leases["live"]],
        [record["id"] for record in leases["live"] if record["is_committed"]],
        leases["begun"],
        leases["ended"],
    )
    # Fresh ids for past admissions, whose output in flight is stale or dropped.
    past = count(NO_ADMISSION - 1, -1)
    for record in snapshot["flights"]:
        state.flights.append(_restored_flight(state, record, requests, past))


def _request_record(state: SchedulerState, request: Request) -> TraceRecord:
    table, row = state.table, request.row
    is_running = row != NO_ROW
    tokens = table.tokens(row) if is_running else request.token_ids
    record: TraceRecord = {
        "status": request.status.name,
        "output": tokens[request.num_prompt_tokens :].tolist(),
        "is_ready": request.is_ready,
        "num_preemptions": request.num_preemptions,
        "num_cached_tokens": request.num_cached_tokens,
        "num_stale_tokens": request.num_stale_tokens,
        "drop_stale": request.drop_stale,
    }
    if request.is_paused:
        record["status_after_pause"] = request.status_after_pause.name
    if is_running:
        record |= {
            "num_computed": table.num_computed.item(row),
            "drafts": table.draft_ids[row, : table.num_drafts[row]].tolist(),
            "num_placeholders": table.num_placeholders.item(row),
            "blocks": table.block_table[row, : table.num_blocks[row]].tolist(),
            "num_registered": table.num_registered.item(row),
            "is_prefill_chunk": bool(table.is_prefill_chunk[row]),
            "is_long": bool(table.is_long[row]),
        }
    return record


def _restored_request(state: SchedulerState, spec: NewRequest, record: TraceRecord) -> Request:
    history = History(spec.request_id, state.step_id, state.now, 0)
    request = Request(spec, state.config.block_size, history)
    output = np.array(record["output"], dtype=np.int32)
    request.token_ids = np.concatenate((spec.prompt_token_ids, output))
    request.status = RequestStatus[record["status"]]
    after_pause = record.get("status_after_pause")
    request.status_after_pause = RequestStatus[after_pause] if after_pause else request.status
    request.is_ready = record["is_ready"]
    request.num_preemptions = record["num_preemptions"]
    request.num_cached_tokens = record["num_cached_tokens"]
    request.num_stale_tokens = record["num_stale_tokens"]
    request.drop_stale = record["drop_stale"]
    if state.config.enable_prefix_caching:
        num_full = len(request.token_ids) // state.config.block_size
        request.block_hashes.extend(request.token_ids, num_full)
    state.own(request)
    return request


def _restore_row(state: SchedulerState, request: Request, record: TraceRecord) -> None:
    table = state.table
    row = table.assign_row(request)
    num_blocks, num_drafts = len(record["blocks"]), len(record["drafts"])
    table.num_computed[row] = record["num_computed"]
    table.num_drafts[row] = num_drafts
    table.draft_ids[row, :num_drafts] = record["drafts"]
    table.num_placeholders[row] = record["num_placeholders"]
    table.block_table[row, :num_blocks] = record["blocks"]
    table.num_blocks[row] = num_blocks
    table.num_registered[row] = record["num_registered"]
    if record.get("is_long"):
        table.mark_long(row)
    table.is_prefill_chunk[row] = record["is_prefill_chunk"]
    request.history.admitted(state.step_id, state.now, record["num_computed"], is_resumed=True)
    state.kv.set_events(row)


def _leases_record(state: SchedulerState, name_by_key: dict[int, str]) -> TraceRecord:
    leases = state.leases
    return {
        "num_begun": leases.num_begun,
        "begun": [lease.lease_id for lease in leases.begun if lease in leases],
        "ended": list(leases.ended),
        "live": [
            {
                "id": lease.lease_id,
                "request": name_by_key[lease.key] if lease.is_import else None,
                "source": lease.source,
                "blocks": list(lease.block_ids),
                "num_present": lease.num_present,
                "expires_at": lease.expires_at,
                "is_committed": leases.is_committed(lease),
            }
            for lease in leases
        ],
    }


def _restored_lease(
    state: SchedulerState, record: TraceRecord, requests: dict[str, Request]
) -> Lease:
    request = None if record["request"] is None else requests[record["request"]]
    digests: Sequence[bytes | None]
    if request is None:
        digests = [state.kv.pool.digests[block_id] for block_id in record["blocks"]]
    else:
        digests = request.block_hashes.digests[: len(record["blocks"])]
    return Lease(
        record["id"],
        _ENDED if request is None else request.key,
        record["source"],
        tuple(record["blocks"]),
        tuple(digest for digest in digests if digest is not None),
        record["num_present"],
        record["expires_at"],
    )


def _flight_record(
    state: SchedulerState, flight: Flight, name_by_key: dict[int, str]
) -> TraceRecord:
    """A step in flight; the name of each row's request, None where the output is dropped."""
    names: list[str | None] = []
    is_stale = []
    for row, admission_id in zip(flight.rows.tolist(), flight.admission_ids.tolist(), strict=True):
        is_current = state.table.admission_id.item(row) == admission_id
        request = state.table.request(row) if is_current else state.stale.get(admission_id)
        names.append(None if request is None else name_by_key[request.key])
        is_stale.append(not is_current)
    return {
        "step_id": flight.step_id,
        "names": names,
        "is_stale": is_stale,
        "num_scheduled": flight.num_scheduled.tolist(),
        "is_prefill_chunk": flight.is_prefill_chunk.tolist(),
        "num_drafts": None if flight.num_drafts is None else flight.num_drafts.tolist(),
    }


def _restored_flight(
    state: SchedulerState, record: TraceRecord, requests: dict[str, Request], past: "count[int]"
) -> Flight:
    rows, admission_ids = [], []
    for name, is_stale in zip(record["names"], record["is_stale"], strict=True):
        request = None if name is None else requests[name]
        if request is not None and not is_stale:
            rows.append(request.row)
            admission_ids.append(state.table.admission_id.item(request.row))
            continue
        # A fresh id for each output is enough: only the request that it belongs to matters.
        rows.append(0)
        admission_ids.append(next(past))
        if request is not None:
            state.stale[admission_ids[-1]] = request
    num_drafts = record["num_drafts"]
    return Flight(
        record["step_id"],
        np.array(rows, dtype=np.intp),
        np.array(admission_ids, dtype=np.int64),
        np.array(record["num_scheduled"], dtype=np.int32),
        np.array(record["is_prefill_chunk"], dtype=np.bool_),
        None if num_drafts is None else np.array(num_drafts, dtype=np.int32),
    )


def state_record(
    state: SchedulerState, name_by_key: dict[int, str], *, max_crc_blocks: int
) -> TraceRecord:
    """The state after a step in the trace format."""
    pool, table, queues = state.kv.pool, state.table, state.queues
    record: TraceRecord = {"free": pool.num_free}
    if pool.num_free <= max_crc_blocks:
        record["free_crc"] = zlib.crc32(",".join(map(str, pool.free_blocks)).encode())
    record["free_head"] = list(islice(pool.free_blocks, NUM_FREE_HEAD))
    running = [table.request(row) for row in table.running_rows.tolist()]
    record["running"] = [name_by_key[request.key] for request in running]
    record["waiting"] = [name_by_key[request.key] for request in queues.waiting]
    if queues.skipped:
        record["skipped"] = [name_by_key[request.key] for request in queues.skipped]
    if queues.held:
        record["held"] = [name_by_key[request.key] for request in queues.held]
    if queues.paused:
        record["paused"] = [name_by_key[key] for key in queues.paused]
    record["reqs"] = {
        name_by_key[request.key]: _request_fields(state, request)
        for request in (*running, *queues, *queues.paused.values())
    }
    return record


def _request_fields(state: SchedulerState, request: Request) -> list[str | int]:
    table, row = state.table, request.row
    is_running = row >= 0
    fields: list[str | int] = [
        _STATUS_LETTERS[request.status],
        table.num_computed.item(row) if is_running else 0,
        table.num_tokens.item(row) if is_running else len(request.token_ids),
        table.num_blocks.item(row) if is_running else 0,
        request.num_preemptions,
        table.num_placeholders.item(row) if is_running else 0,
        request.num_stale_tokens,
    ]
    while len(fields) > 4 and fields[-1] == 0:
        fields.pop()
    return fields
