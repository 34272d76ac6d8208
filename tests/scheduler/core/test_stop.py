from typing import Any

import numpy as np
import pytest

from scheduler.core.explain import History
from scheduler.core.plan import RepetitionLimit, RequestStatus
from scheduler.core.request import Request
from scheduler.core.stop import End, is_repeating, stop_status
from tests.scheduler.core.building import new_request


def stop(output: list[int], *, max_num_tokens: int = 100, **fields: Any) -> End | None:
    spec = new_request(0, 2, **({"max_tokens": 10, "eos_token_ids": (2,)} | fields))
    request = Request(spec, 16, History("r0", 0, 0.0, 0))
    tokens = np.concatenate((spec.prompt_token_ids, np.array(output, dtype=np.int32)))
    return stop_status(request, tokens, max_num_tokens)


STOPPED, LENGTH = RequestStatus.STOPPED, RequestStatus.LENGTH_CAPPED


@pytest.mark.parametrize(
    ("output", "fields", "expected"),
    [
        ([5], {}, None),
        ([5, 2], {}, (STOPPED, None)),
        ([5, 2], {"eos_token_ids": ()}, None),
        ([5, 9], {"eos_token_ids": (2, 9)}, (STOPPED, None)),
        ([5, 4], {"stop_token_ids": (3, 4)}, (STOPPED, 4)),
        # EOS comes before a stop id, and both before the length.
        ([5, 2], {"stop_token_ids": (2,), "max_tokens": 2}, (STOPPED, None)),
        ([5, 5], {"max_tokens": 2}, (LENGTH, None)),
        ([5, 5], {"max_num_tokens": 4}, (LENGTH, None)),
        # min_tokens holds back all but the length.
        ([2], {"min_tokens": 2}, None),
        ([5, 2], {"min_tokens": 2}, (STOPPED, None)),
        ([5, 2], {"min_tokens": 3, "max_tokens": 2}, (LENGTH, None)),
        ([5, 2], {"min_tokens": 3, "max_num_tokens": 4}, (LENGTH, None)),
        ([5, 5], {"repetition": RepetitionLimit(1, 1, 2)}, (RequestStatus.REPETITION, None)),
        ([5, 5], {"repetition": RepetitionLimit(1, 1, 2), "min_tokens": 3}, None),
    ],
)
def test_a_request_ends(output: list[int], fields: dict[str, Any], expected: End | None) -> None:
    assert stop(output, **fields) == expected


@pytest.mark.parametrize(
    ("output", "limit", "expected"),
    [
        ([1, 2, 1, 2], RepetitionLimit(2, 1, 2), True),
        ([1, 2, 1, 2], RepetitionLimit(1, 1, 2), False),
        ([1, 2, 1, 2], RepetitionLimit(2, 1, 3), False),
        ([9, 1, 2, 3, 1, 2, 3], RepetitionLimit(3, 3, 2), True),
        ([1, 1], RepetitionLimit(2, 2, 2), False),
        ([1, 1], RepetitionLimit(1, 1, 1), False),
        ([1, 1], RepetitionLimit(0, 0, 2), False),
    ],
)
def test_repetition(output: list[int], limit: RepetitionLimit, expected: bool) -> None:
    assert is_repeating(output, limit) is expected


def test_the_prompt_does_not_count_as_repetition() -> None:
    limit = RepetitionLimit(1, 1, 2)
    tokens = np.array([5, 5], dtype=np.int32)
    assert stop([5], prompt_token_ids=tokens, repetition=limit) is None
