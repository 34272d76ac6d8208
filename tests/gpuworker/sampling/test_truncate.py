"""Thresholds of truncation against their definition over a sorted row."""

import itertools
import math

import numpy as np
import pytest
import torch

from gpuworker.sampling import truncate
from gpuworker.sampling.truncate import Truncation, exact_thresholds, thresholds

VOCAB_SIZE = 6000
SETTINGS = [
    (top_p, top_k, min_p)
    for top_p, top_k, min_p in itertools.product(
        (1.0, 0.95, 0.5, 0.01), (0, 1, 40, 2500, 10 * VOCAB_SIZE), (0.0, 1e-3, 0.2)
    )
    if (top_p, top_k, min_p) != (1.0, 0, 0.0)
]


def truncation(settings: list[tuple[float, int, float]]) -> Truncation:
    top_p, top_k, min_p = zip(*settings, strict=True)
    return Truncation(
        torch.tensor(top_p, dtype=torch.float64),
        torch.tensor(top_k),
        torch.tensor(min_p, dtype=torch.float64),
    )


def expected(row: np.ndarray, top_p: float, top_k: int, min_p: float) -> float:
    """min_p, then top_k, then top_p over what they leave; tokens that tie stay together."""
    ordered = np.sort(row.astype(np.float64))[::-1]
    weights = np.exp(ordered - ordered[0])
    floor = -math.inf
    if min_p > 0:
        floor = float(np.float32(ordered[0] + math.log(min_p)))
    if 0 < top_k < len(row):
        floor = max(floor, ordered[top_k - 1])
    kept = weights[ordered >= floor]
    if top_p < 1:
        number = int((np.cumsum(kept) < top_p * kept.sum()).sum())
        floor = max(floor, ordered[number])
    return floor


ROWS = {
    "flat": lambda noise: noise * 0.3,
    "peaked": lambda noise: noise * 4,
    "nearly equal": lambda noise: 5 + noise * 1e-5,
    "a few levels": lambda noise: (noise * 2).round(),
    "one far below": lambda noise: torch.cat((noise[:-1] * 1e-4, torch.tensor([-1e30]))),
    "half of it forbidden": lambda noise: torch.where(noise > 0, noise, -torch.inf),
}


@pytest.mark.parametrize("make_row", ROWS.values(), ids=ROWS.keys())
def test_thresholds_are_those_of_the_sorted_row(make_row) -> None:
    noise = torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(1))
    row = make_row(noise)
    scaled = row.expand(len(SETTINGS), -1).contiguous()
    wanted = [expected(row.numpy(), *settings) for settings in SETTINGS]

    def assert_same_tokens(found: torch.Tensor, index: list[int]) -> None:
        """Weights are summed in another order: a token may be in or out at the very edge."""
        for i, threshold in zip(index, found.tolist(), strict=True):
            difference = int((row >= threshold).sum()) - int((row >= wanted[i]).sum())
            is_level = ROWS["a few levels"] is make_row
            assert abs(difference) <= (0 if is_level else 1), SETTINGS[i]

    assert_same_tokens(exact_thresholds(scaled, truncation(SETTINGS)), list(range(len(SETTINGS))))
    num_told = 0
    for num_candidates in (64, 1024, VOCAB_SIZE):
        candidates = scaled.topk(num_candidates).values
        found, is_enough = thresholds(scaled, candidates, truncation(SETTINGS))
        told = is_enough.nonzero().squeeze(1)
        assert_same_tokens(found[told], told.tolist())
        num_told += len(told)
    assert num_told > len(SETTINGS) / 3


def test_little_is_sorted_of_a_flat_row(monkeypatch: pytest.MonkeyPatch) -> None:
    sorted_sizes = []
    original = torch.Tensor.sort

    def spy(self: torch.Tensor, *args: object, **kwargs: object) -> object:
        sorted_sizes.append(self.numel())
        return original(self, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "sort", spy)
    row = torch.randn(1, 100_000, generator=torch.Generator().manual_seed(2)) * 1e-3
    exact_thresholds(row, truncation([(0.9, 0, 0.0)]))
    assert sorted_sizes
    assert max(sorted_sizes) <= truncate._MAX_SORTED


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_that_is_not_finite_ends_all_the_same(bad: float) -> None:
    row = torch.zeros(1, VOCAB_SIZE)
    row[0, 7] = bad
    for settings in SETTINGS:
        assert exact_thresholds(row, truncation([settings])).shape == (1,)
