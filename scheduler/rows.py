"""Which request each row of the worker holds."""

from collections.abc import Mapping

import numpy as np

from scheduler.core.plan import Int64Array, StepPlan
from scheduler.requests import LiveRequest


class Rows:
    """The rows of one engine's worker, as the plans sent so far leave them."""

    def __init__(self, num_rows: int, requests: Mapping[int, LiveRequest]) -> None:
        """requests: the engine's, by key; the engine keeps them current."""
        self._requests = requests
        self._key_by_row: Int64Array = np.zeros(num_rows, dtype=np.int64)
        # The request id of each row, as a new list whenever rows are assigned.
        self.request_ids: list[str] = [""] * num_rows
        # Requests in rows that want log probabilities, by row.
        self._asking: dict[int, LiveRequest] = {}

    def assign(self, plan: StepPlan) -> list[LiveRequest]:
        """Place the plan's new requests; they are returned in the order of plan.row_requests."""
        for row in plan.freed_rows.tolist():
            self._asking.pop(row, None)
        placed = []
        if plan.row_requests:
            self.request_ids = self.request_ids.copy()
        for row_request in plan.row_requests:
            self.request_ids[row_request.row] = row_request.request_id
            self._key_by_row[row_request.row] = row_request.key
            request = self._requests[row_request.key]
            # The prompt is computed from its first token again, with its log probabilities.
            request.prompt_logprobs.clear()
            submission = request.submission
            if submission.wants_logprobs or submission.wants_prompt_logprobs:
                self._asking[row_request.row] = request
            placed.append(request)
        return placed

    def keys_in(self, plan: StepPlan) -> Int64Array:
        """[num_rows] The key of the request in each row of the plan."""
        return self._key_by_row[plan.rows]

    def asking_in(self, plan: StepPlan) -> dict[int, LiveRequest]:
        """The plan's requests that want log probabilities, by row."""
        if not self._asking:
            return {}
        return {row: self._asking[row] for row in plan.rows.tolist() if row in self._asking}
