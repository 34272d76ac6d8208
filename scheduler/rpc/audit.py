"""Converts audits of the KV ledger from and to headrace.v1 messages."""

from collections.abc import Iterable

import numpy as np

from headrace.service.columns import unpack_int32
from headrace.service.errors import invalid
from headrace.v1 import common_pb2, gpuworker_pb2, inference_pb2
from scheduler.audit import LedgerAudit
from scheduler.core.audit import RowTables


def row_tables_of(message: gpuworker_pb2.RowsAudit) -> RowTables:
    """A worker's rows; ServiceError names the column that does not fit."""
    rows = unpack_int32(message.rows, "audit.rows")
    num_blocks = unpack_int32(message.num_blocks, "audit.num_blocks")
    block_ids = unpack_int32(message.block_ids, "audit.block_ids")
    if len(num_blocks) != len(rows):
        raise invalid("audit.num_blocks", f"must be {len(rows)}, one a row")
    if (num_blocks < 0).any() or int(num_blocks.sum(dtype=np.int64)) != len(block_ids):
        raise invalid("audit.num_blocks", f"must be non-negative and sum up to {len(block_ids)}")
    return RowTables(rows, num_blocks, block_ids)


def audit_response(
    scheduler_id: str, audits: Iterable[LedgerAudit]
) -> inference_pb2.AuditPoolResponse:
    """Audits of workers, in order of worker_id."""
    workers = [_worker_audit(scheduler_id, audit) for audit in audits]
    workers.sort(key=lambda worker: worker.worker_id)
    return inference_pb2.AuditPoolResponse(workers=workers)


def _worker_audit(scheduler_id: str, audit: LedgerAudit) -> common_pb2.WorkerAudit:
    return common_pb2.WorkerAudit(
        worker_id=audit.info.worker_id,
        scheduler_id=scheduler_id,
        num_kv_blocks=audit.info.num_kv_blocks,
        num_free_blocks=audit.book.num_free_blocks,
        num_cached_blocks=audit.book.num_cached_blocks,
        num_owned_blocks=audit.book.num_owned_blocks,
        num_requests=audit.book.num_requests,
        num_compared_rows=audit.num_compared_rows,
        faults=audit.faults,
    )
