"""A request, waiting or running."""

import numpy as np

from scheduler.core.block_hash import BlockHashes
from scheduler.core.explain import History
from scheduler.core.plan import Int32Array, NewRequest, RequestStatus

BLOCKED_STATUSES = frozenset(
    {RequestStatus.WAITING_FOR_GRAMMAR, RequestStatus.WAITING_FOR_REMOTE_KV}
)
NO_ROW = -1


class Request:
    """Identity, limits and history of a request.

    A running request has a row, and that row of the RequestTable holds its counts and tokens. Of a
    waiting request, token_ids holds prompt and generated tokens.
    """

    __slots__ = (
        "block_hashes",
        "drop_stale",
        "history",
        "is_ready",
        "key",
        "num_cached_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "num_stale_tokens",
        "request_id",
        "row",
        "spec",
        "status",
        "status_after_pause",
        "token_ids",
    )

    def __init__(self, spec: NewRequest, block_size: int, history: History) -> None:
        self.history = history
        self.spec = spec
        self.key = spec.key
        self.request_id = spec.request_id
        self.num_prompt_tokens = len(spec.prompt_token_ids)
        self.token_ids: Int32Array = spec.prompt_token_ids
        if len(spec.output_token_ids):
            self.token_ids = np.concatenate((spec.prompt_token_ids, spec.output_token_ids))
        self.block_hashes = BlockHashes(block_size, spec.cache_salt)
        if spec.block_hashes is not None:
            assert spec.block_hashes.is_like(self.block_hashes), "hashed ahead under other terms"
            self.block_hashes = spec.block_hashes
        self.status = RequestStatus.WAITING
        if spec.needs_grammar:
            self.status = RequestStatus.WAITING_FOR_GRAMMAR
        elif spec.remote_prefix is not None:
            self.status = RequestStatus.WAITING_FOR_REMOTE_KV
        # The status to return to from WAITING_FOR_CLIENT.
        self.status_after_pause = self.status
        self.is_ready = not self.is_blocked
        self.row = NO_ROW
        self.num_preemptions = 0
        # Cached tokens at the first admission; -1 before it.
        self.num_cached_tokens = -1
        # Tokens scheduled before a preemption whose output is in flight; the output is delivered,
        # or dropped if drop_stale is set.
        self.num_stale_tokens = 0
        self.drop_stale = False

    @property
    def is_blocked(self) -> bool:
        """Whether the request waits for something outside the scheduler."""
        return self.status in BLOCKED_STATUSES

    @property
    def is_paused(self) -> bool:
        """Whether the request waits until its client reads again."""
        return self.status is RequestStatus.WAITING_FOR_CLIENT

    @property
    def is_waiting_for_output(self) -> bool:
        """Whether output from before a preemption has to be delivered first."""
        return self.num_stale_tokens > 0 and not self.drop_stale
