"""The noise is Gumbel's, and a function of seed, position and token."""

import numpy as np
import pytest
import torch

from gpuworker.sampling.noise import gumbel, gumbel_argmax

MASK = (1 << 64) - 1


def splitmix(x: int) -> int:
    """SplitMix64's mixer over Python's integers."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def test_equals_its_definition_over_unbounded_integers() -> None:
    golden = 0x9E3779B97F4A7C15
    seeds = [0, 1, 2**63, 2**64 - 1]
    positions = [0, 5, 1000, 7]
    tokens = [0, 1, 49151]
    noise = gumbel(
        torch.tensor(np.array(seeds, dtype=np.uint64).view(np.int64)),
        torch.tensor(positions),
        torch.tensor([tokens]),
    )
    for i, (seed, position) in enumerate(zip(seeds, positions, strict=True)):
        key = splitmix((splitmix(seed) + (position + 1) * golden) & MASK)
        for j, token in enumerate(tokens):
            bits = splitmix((key + token * golden) & MASK)
            uniform = ((bits >> 11) + 0.5) * 2.0**-53
            np.testing.assert_allclose(noise[i, j], -np.log(-np.log(uniform)), rtol=1e-12)


def test_is_gumbel_distributed() -> None:
    noise = gumbel(torch.tensor([3]), torch.tensor([11]), torch.arange(200_000)[None])[0].numpy()
    uniform = np.sort(np.exp(-np.exp(-noise)))
    distance = np.abs(uniform - (np.arange(200_000) + 0.5) / 200_000).max()
    assert distance < 2.5 / np.sqrt(200_000)  # Kolmogorov-Smirnov, once in 100,000


def test_neighbouring_seeds_and_positions_are_unrelated() -> None:
    tokens = torch.arange(50_000)[None]
    seeds = torch.tensor([8, 9, 8])
    noise = gumbel(seeds, torch.tensor([4, 4, 5]), tokens).numpy()
    correlations = np.corrcoef(noise)[np.triu_indices(3, 1)]
    assert np.abs(correlations).max() < 4.5 / np.sqrt(50_000)


@pytest.mark.parametrize("spread", [0.0, 0.3, 3.0, 300.0])
def test_the_fast_maximum_is_that_of_float64(spread: float) -> None:
    generator = torch.Generator().manual_seed(1)
    for vocab_size in (3, 16, 5000):
        scaled = torch.randn(300, vocab_size, generator=generator) * spread
        seeds, positions = torch.arange(300) * 7919, torch.arange(300)
        every = torch.arange(vocab_size)[None]
        expected = (gumbel(seeds, positions, every) + scaled).argmax(-1)
        assert torch.equal(gumbel_argmax(scaled, seeds, positions), expected)


def test_a_rough_look_may_not_decide_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """With two finalists rows are often unsure, and are looked at in full."""
    monkeypatch.setattr("gpuworker.sampling.noise._NUM_FINALISTS", 2)
    scaled = torch.zeros(300, 1000)
    seeds, positions = torch.arange(300), torch.zeros(300, dtype=torch.int64)
    every = torch.arange(1000)[None]
    expected = gumbel(seeds, positions, every).argmax(-1)
    assert torch.equal(gumbel_argmax(scaled, seeds, positions), expected)
