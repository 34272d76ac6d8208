"""Running requests as columns; a request keeps its row while it runs.

The worker's input batch has the same rows. Everything that a step needs of every running request is
a column, so that a step over hundreds of requests takes a few vector operations.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from scheduler.core.plan import BoolArray, Int32Array, Int64Array, RequestStatus, SchedulerConfig
from scheduler.core.request import NO_ROW, Request

IntpArray = NDArray[np.intp]

NO_STOP_ID = -1
NO_ADMISSION = -1
_NO_LIMIT = 2**31 - 1  # the largest value of a column
# The tokens of rows with more stop ids than this are checked one by one.
MAX_VECTOR_STOP_IDS = 8


class RequestTable:
    """Columns over rows; every column is [max_num_seqs] and valid for rows in use."""

    def __init__(self, config: SchedulerConfig) -> None:
        num_rows = config.max_num_seqs
        self._max_num_tokens = config.max_num_tokens
        is_pool_limiting = config.max_num_tokens < config.max_model_len
        self._pool_limit = config.max_num_tokens if is_pool_limiting else _NO_LIMIT
        self.num_tokens = _column(num_rows)
        self.num_computed = _column(num_rows)
        self.num_drafts = _column(num_rows)
        # Sampled tokens that are still in flight (pipelines deeper than 1), drafts included.
        self.num_placeholders = _column(num_rows)
        self.num_blocks = _column(num_rows)
        self.num_registered = _column(num_rows)  # full blocks that have their digest
        # The number of computed tokens from which a row needs another block, or fills a block.
        self.growth_event = _column(num_rows)
        self.full_event = _column(num_rows)
        self.length_limit = _column(num_rows)  # num_tokens at which the request ends
        self.output_limit = _column(num_rows)  # prompt + max_tokens, or what the pool carries
        self.is_prefill_chunk: BoolArray = np.zeros(num_rows, dtype=np.bool_)
        # Admitted with a long prefill, which gets tokens from the share of long prefills only.
        self.is_long: BoolArray = np.zeros(num_rows, dtype=np.bool_)
        self.is_walked: BoolArray = np.zeros(num_rows, dtype=np.bool_)  # stops need Python
        # Number of the admission: distinguishes the row's request from earlier requests in the row.
        self.admission_id: Int64Array = np.full(num_rows, NO_ADMISSION, dtype=np.int64)
        self.key: Int64Array = np.zeros(num_rows, dtype=np.int64)
        # Column i: each row's i-th stop id (EOS included) or NO_STOP_ID.
        self.stop_columns: list[Int32Array] = []
        # Only the used part of each row is ever touched and takes memory.
        self.token_ids: Int32Array = np.empty(
            (num_rows, config.max_model_len + config.num_spec_tokens + 1), dtype=np.int32
        )
        max_num_blocks = -(-config.max_model_len // config.block_size)
        self.block_table: Int32Array = np.empty((num_rows, max_num_blocks), dtype=np.int32)
        self.draft_ids: Int32Array = np.full(
            (num_rows, config.num_spec_tokens), NO_STOP_ID, dtype=np.int32
        )
        self.requests: list[Request | None] = [None] * num_rows
        self.num_running = 0
        self.num_walked = 0
        self.num_long = 0
        self._order: IntpArray = np.empty(num_rows, dtype=np.intp)
        self._free_rows = list(range(num_rows - 1, -1, -1))
        self._num_admissions = 0

    @property
    def running_rows(self) -> IntpArray:
        """[num_running] rows in order of admission; a view, valid until the next change."""
        return self._order[: self.num_running]

    @property
    def free_rows(self) -> Sequence[int]:
        """Rows without a request; the row that is assigned next is last."""
        return self._free_rows

    def request(self, row: int) -> Request:
        """The request in a row; the row must be in use."""
        request = self.requests[row]
        assert request is not None, f"row {row} is free"
        return request

    def tokens(self, row: int) -> Int32Array:
        """[num_tokens] of a row; a view."""
        return self.token_ids[row, : self.num_tokens[row]]

    def assign_row(self, request: Request) -> int:
        """Assign a row to a request, at the end of the running order, without blocks."""
        row = self._free_rows.pop()
        num_tokens = len(request.token_ids)
        spec = request.spec
        self.requests[row] = request
        self._order[self.num_running] = row
        self.num_running += 1
        self.token_ids[row, :num_tokens] = request.token_ids
        self.num_tokens[row] = num_tokens
        self.num_computed[row] = 0
        self.num_drafts[row] = 0
        self.num_placeholders[row] = 0
        self.num_blocks[row] = 0
        self.num_registered[row] = 0
        output_limit = min(request.num_prompt_tokens + spec.max_tokens, _NO_LIMIT)
        self.length_limit[row] = min(output_limit, self._max_num_tokens)
        # Where the pool is the limit, there is no KV slot for a token beyond the limit.
        self.output_limit[row] = min(output_limit, self._pool_limit)
        self.is_prefill_chunk[row] = False
        self.is_long[row] = False
        self.draft_ids[row] = NO_STOP_ID
        self.admission_id[row] = self._num_admissions
        self._num_admissions += 1
        self.key[row] = request.key
        self._set_stop_ids(row, request)
        request.row = row
        request.status = RequestStatus.RUNNING
        return row

    def mark_long(self, row: int) -> None:
        """Limit a row's prefill, which takes several steps, to the share of long prefills."""
        self.is_long[row] = self.is_prefill_chunk[row] = True
        self.num_long += 1

    def vacate(self, row: int) -> None:
        """Free a row that has left the running order; its tokens move to the request."""
        request = self.request(row)
        request.token_ids = self.tokens(row).copy()
        request.row = NO_ROW
        self.requests[row] = None
        self.admission_id[row] = NO_ADMISSION
        self.num_walked -= int(self.is_walked[row])
        self.num_long -= int(self.is_long[row])
        self._free_rows.append(row)

    def position(self, row: int) -> int:
        """Position of a row in the running order."""
        return int((self.running_rows == row).nonzero()[0][0])

    def stop_running(self, position: int) -> int:
        """Remove the row at a position from the running order, and return it."""
        order = self._order
        row = int(order[position])
        order[position : self.num_running - 1] = order[position + 1 : self.num_running]
        self.num_running -= 1
        return row

    def keep_running(self, is_kept: BoolArray) -> None:
        """Remove the other rows from the running order; is_kept is [num_running]."""
        kept = self.running_rows[is_kept]
        self._order[: len(kept)] = kept
        self.num_running = len(kept)

    def _set_stop_ids(self, row: int, request: Request) -> None:
        ids = request.spec.eos_token_ids + request.spec.stop_token_ids
        is_walked = request.spec.repetition is not None or len(ids) > MAX_VECTOR_STOP_IDS
        self.is_walked[row] = is_walked
        self.num_walked += is_walked
        used_ids = () if is_walked else ids
        while len(self.stop_columns) < len(used_ids):
            self.stop_columns.append(_column(len(self.requests)))
        for index, column in enumerate(self.stop_columns):
            column[row] = used_ids[index] if index < len(used_ids) else NO_STOP_ID


def _column(num_rows: int) -> Int32Array:
    return np.zeros(num_rows, dtype=np.int32)
