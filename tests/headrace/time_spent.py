"""What a request's history says of its time, checked: no part is negative, and the sum is right."""

import math
from collections import Counter

from headrace.types import RequestHistory


def seconds_by_stage(history: RequestHistory) -> Counter[str]:
    """The seconds of each stage, by its name; of a wait, WAIT and its cause."""
    assert all(part.seconds >= 0 for part in history.breakdown)
    total_s = math.fsum(part.seconds for part in history.breakdown)
    assert math.isclose(total_s, history.total_s, abs_tol=1e-6), "the parts add up to the whole"
    spent: Counter[str] = Counter()
    for part in history.breakdown:
        spent[f"{part.stage} {part.cause}".rstrip()] += part.seconds
    return spent
