"""Drafts by prompt lookup (Saxena, "Prompt Lookup Decoding", 2023).

The drafts are the tokens that followed the last earlier occurrence of the row's final tokens. A
lookup compares each token of the row once and runs no model; a wrong draft costs one row of a step.
"""

import numpy as np

from gpuworker.core.plan import EMPTY_INT32, Int32Array

MAX_NGRAM = 4
MIN_NGRAM = 2


def propose(tokens: Int32Array, max_num_drafts: int) -> Int32Array:
    """Tokens that may follow.

    The longest suffix of up to MAX_NGRAM tokens that occurred before decides; of several
    occurrences, the latest.

    Args:
        tokens: [num_tokens] prompt and output so far.
        max_num_drafts: at most so many are proposed.

    Returns:
        [num_drafts], empty when the last MIN_NGRAM tokens have not occurred before.
    """
    if max_num_drafts <= 0 or len(tokens) <= MIN_NGRAM:
        return EMPTY_INT32
    # Ends of earlier occurrences of the last token, then of ever longer suffixes.
    ends = np.flatnonzero(tokens[:-1] == tokens[-1])
    found = ends[:0]
    for length in range(2, MAX_NGRAM + 1):
        ends = ends[ends >= length - 1]
        if length > len(tokens) - 1:
            break
        ends = ends[tokens[ends - (length - 1)] == tokens[-length]]
        if not len(ends):
            break
        if length >= MIN_NGRAM:
            found = ends
    if not len(found):
        return EMPTY_INT32
    start = int(found[-1]) + 1
    return tokens[start : start + max_num_drafts].copy()
