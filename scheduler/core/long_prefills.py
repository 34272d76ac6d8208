"""How many tokens the long prefills of a step get together.

A prefill is long if it has more than `long_prefill_token_threshold` tokens to compute when its
request is admitted. Decoding requests get their tokens of a step first:

    room = max_num_batched_tokens - (1 + num_spec_tokens) * decoding requests

While a short prefill waits or runs, all long prefills together get long_prefill_share * room
tokens, the oldest first, under policy priority the most urgent first; fractions are carried from
step to step. Without short prefills, long prefills get the whole room. So long prompts never delay
a decode, delay a short prompt by a bounded number of steps, and still progress. With a share of 1,
the default of the core, there is no limit and steps are as vLLM 0.27.1 plans them.
"""

import numpy as np

from scheduler.core.request import Request
from scheduler.core.state import SchedulerState

NO_LIMIT = 2**31 - 1


def long_prefill_budget(state: SchedulerState, budget: int) -> int:
    """Tokens of a step that its long prefills may use; budget is the step's."""
    config, table, queues = state.config, state.table, state.queues
    if config.long_prefill_share >= 1 or not (table.num_long or queues):
        return NO_LIMIT
    rows = table.running_rows
    is_prefilling = table.is_prefill_chunk[rows]
    num_prefilling = int(np.count_nonzero(is_prefilling))
    num_short = num_prefilling - int(np.count_nonzero(is_prefilling & table.is_long[rows]))
    has_candidate = queues.has_other_than_held or may_serve_held(state, 0)
    can_admit = has_candidate and table.num_running < config.max_num_seqs
    num_decode_tokens = (1 + config.num_spec_tokens) * (len(rows) - num_prefilling)
    room = max(1, budget - num_decode_tokens)
    if not (num_short or can_admit):
        return room
    share = config.long_prefill_share * room
    return int((state.step_id + 1) * share) - int(state.step_id * share)


def may_serve_held(state: SchedulerState, long_budget: int) -> bool:
    """Whether the head of the held requests may get tokens; long prefills have long_budget left."""
    held = state.queues.held
    return bool(held) and (long_budget > 0 or outranks_long_prefills(state, held.first().item))


def outranks_long_prefills(state: SchedulerState, request: Request) -> bool:
    """Whether the policy serves a request before all running requests in a long prefill."""
    table, policy = state.table, state.policy
    if not policy.merges_queues:
        return False
    rows = table.running_rows
    rows = rows[table.is_long[rows] & table.is_prefill_chunk[rows]]
    rank = policy.rank(request, 0)
    return all(rank < policy.rank(table.request(row), 0) for row in rows.tolist())
