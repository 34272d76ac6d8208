"""Columns over groups of different sizes: one value a group, and the members of all groups."""

import numpy as np

from gpuworker.core.plan import Int32Array, Int64Array


def repeated(values: Int32Array, counts: Int32Array) -> Int32Array:
    """Each value as often as its count says."""
    return values if is_all_ones(counts) else np.repeat(values, counts)


def starts(counts: Int32Array | Int64Array) -> Int64Array:
    """Where each group of `counts` members begins: [num_groups]."""
    begins: Int64Array = np.cumsum(counts, dtype=np.int64) - counts
    return begins


def ranks(counts: Int32Array | Int64Array) -> Int64Array:
    """0, 1, ... within each group: [sum(counts)] for groups of `counts` members."""
    if is_all_ones(counts):
        return np.zeros(len(counts), dtype=np.int64)
    total = int(counts.sum())
    within: Int64Array = np.arange(total, dtype=np.int64) - np.repeat(starts(counts), counts)
    return within


def is_all_ones(counts: Int32Array | Int64Array) -> bool:
    """Whether every count is 1, as in a step of decodes only."""
    return bool((counts == 1).all())
