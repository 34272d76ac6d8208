"""Looking at few candidates first changes nothing of what is drawn."""

import numpy as np
import pytest
import torch

from gpuworker.kernels.ops import Draws
from gpuworker.sampling.draw import draw
from gpuworker.sampling.noise import gumbel
from gpuworker.sampling.truncate import Truncation, thresholds

SETTINGS = [
    {},
    {"top_k": 5},
    {"top_k": 100, "min_p": 0.001},
    {"top_p": 0.6},
    {"top_p": 0.999},
    {"min_p": 0.2},
    {"top_k": 20, "top_p": 0.9, "min_p": 0.01},
]


def plainly(scaled: torch.Tensor, draws: Draws) -> torch.Tensor:
    """Everything sorted, noise for every token, in float64."""
    truncation = Truncation.of_numbers(draws.numbers)
    floor, _ = thresholds(scaled, scaled.sort(descending=True).values, truncation)
    scores = gumbel(draws.seeds, draws.positions, torch.arange(scaled.shape[1])[None])
    scores.add_(scaled).masked_fill_(scaled < floor[:, None], -torch.inf)
    return torch.where(draws.is_drawn != 0, scores.argmax(-1), scaled.argmax(-1))


@pytest.mark.parametrize("spread", [0.05, 1.0, 4.0])
def test_tokens_are_those_of_the_plain_definition(spread: float) -> None:
    num_rows, vocab_size = 16 * len(SETTINGS), 2000
    scaled = spread * torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(2))
    rng = np.random.default_rng(3)
    each = [SETTINGS[i % len(SETTINGS)] for i in range(num_rows)]
    draws = Draws(
        seeds=torch.from_numpy(rng.integers(-(2**63), 2**63 - 1, num_rows)),
        positions=torch.from_numpy(rng.integers(0, 5000, num_rows)),
        is_drawn=torch.tensor([i % 5 != 0 for i in range(num_rows)], dtype=torch.int32),
        numbers={
            "top_k": torch.tensor([s.get("top_k", 0) for s in each], dtype=torch.int32),
            "top_p": torch.tensor([s.get("top_p", 1.0) for s in each], dtype=torch.float64),
            "min_p": torch.tensor([s.get("min_p", 0.0) for s in each], dtype=torch.float64),
        },
    )
    expected = plainly(scaled, draws)
    assert torch.equal(draw(scaled, draws), expected)
    for i in range(0, num_rows, 11):
        alone = Draws(
            seeds=draws.seeds[i : i + 1],
            positions=draws.positions[i : i + 1],
            is_drawn=draws.is_drawn[i : i + 1],
            numbers={name: column[i : i + 1] for name, column in draws.numbers.items()},
        )
        assert draw(scaled[i : i + 1], alone).tolist() == [int(expected[i])]
