"""Whether drawn tokens follow a distribution."""

import math
from collections.abc import Sequence

import numpy as np

# Chi-square with few degrees of freedom exceeds this once in a million.
Z = 4.75


def assert_follows(tokens: Sequence[int], probabilities: np.ndarray) -> None:
    """A chi-square test; a token of probability 0 must not come at all."""
    counts = np.bincount(tokens, minlength=len(probabilities))
    assert counts[probabilities == 0].sum() == 0
    expected = probabilities * len(tokens)
    is_common = expected >= 5
    chi2 = ((counts - expected)[is_common] ** 2 / expected[is_common]).sum()
    rare = expected[~is_common].sum()
    if rare > 0:
        chi2 += (counts[~is_common].sum() - rare) ** 2 / max(rare, 1)
    freedom = max(int(is_common.sum()) - 1 + (rare > 0), 1)
    # Wilson-Hilferty: the cube root of chi-square is nearly normal.
    z = ((chi2 / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
    assert z < Z
