"""How many tokens the long prefills of a step get together.

A prefill is long if it has more than `long_prefill_token_threshold` tokens to compute when its
request is admitted. While a short prefill waits or runs, all long ones together get

    long_prefill_share * (max_num_batched_tokens - (1 + num_spec_tokens) * decoding requests)

tokens a step, oldest first; fractions are carried from step to step. The rest is for the short
ones, so any number of long prompts delays a short one by a bounded number of steps, and the long
ones still progress. Without short prefills long ones may use the whole step. With a share of 1, the
default of the core, there is no limit and steps are as vLLM 0.27.1 plans them.
"""

import numpy as np

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
    can_admit_short = queues.has_other_than_held and table.num_running < config.max_num_seqs
    if not (num_short or can_admit_short):
        return NO_LIMIT
    num_decode_tokens = (1 + config.num_spec_tokens) * (len(rows) - num_prefilling)
    share = config.long_prefill_share * max(0, budget - num_decode_tokens)
    return int((state.step_id + 1) * share) - int(state.step_id * share)
