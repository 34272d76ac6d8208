"""A step's output, divided among the routers it concerns."""

import time

import numpy as np

from headrace.status.states import Writer
from headrace.status.store import StatusStore
from scheduler.core.plan import StepOutput
from scheduler.outbox import RouterOutbox
from scheduler.request_log import RequestLog
from scheduler.requests import Submission
from scheduler.switchboard import Switchboard


def submission(handle: int) -> Submission:
    return Submission(
        handle=handle,
        request_id=f"r{handle}",
        prompt_token_ids=np.array([1], dtype=np.int32),
        max_tokens=9,
        sampling=None,
    )


async def test_each_router_gets_its_own_requests_tokens_and_drafts() -> None:
    switchboard = Switchboard(RequestLog(StatusStore("", Writer.SCHEDULER), "s0", clock=time.time))
    outboxes = RouterOutbox(1000), RouterOutbox(1000)
    routers = [switchboard.open(outbox) for outbox in outboxes]
    keys = [switchboard.add(routers[i % 2], submission(i), None).key for i in range(3)]
    switchboard.publish(
        StepOutput(
            step_id=1,
            keys=np.array(keys, dtype=np.int64),
            num_new_tokens=np.array([1, 3, 2], dtype=np.int32),
            token_ids=np.array([5, 6, 7, 8, 9, 10], dtype=np.int32),
            finished=(),
        ),
        draft_counts=np.array([[0, 0], [3, 2], [1, 1]], dtype=np.int32),
    )
    updates = [await outbox.take() for outbox in outboxes]
    assert [n.handles.tolist() for n in updates] == [[0, 2], [1]]
    assert [n.token_ids.tolist() for n in updates] == [[5, 9, 10], [6, 7, 8]]
    assert [n.draft_counts.tolist() for n in updates] == [[[0, 0], [1, 1]], [[3, 2]]]
