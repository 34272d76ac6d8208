"""The sampler: right in distribution, and each token its request's own affair."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from gpuworker.core.plan import SamplingSettings
from tests.gpuworker.sampling.chi_square import assert_follows
from tests.gpuworker.sampling.samples import sampled

GREEDY = SamplingSettings(temperature=0.0)
NUM_DRAWS = 4000

TRUNCATIONS = {
    "none": SamplingSettings(),
    "hot": SamplingSettings(temperature=2.0),
    "top_k": SamplingSettings(top_k=5),
    "top_p": SamplingSettings(top_p=0.7),
    "min_p": SamplingSettings(min_p=0.2),
    "top_k and top_p": SamplingSettings(top_k=8, top_p=0.8, temperature=1.5),
    "min_p and top_k": SamplingSettings(min_p=0.1, top_k=4, temperature=0.8),
    "all three": SamplingSettings(min_p=0.05, top_k=10, top_p=0.9, temperature=1.3),
    "top_k past the vocabulary": SamplingSettings(top_k=1000, top_p=0.99),
}


def expected_probabilities(logits: np.ndarray, settings: SamplingSettings) -> np.ndarray:
    """min_p, then top_k, then top_p over what they leave; written out over a sorted list."""
    scaled = logits.astype(np.float64) / settings.number("temperature")
    probabilities = np.exp(scaled - scaled.max())
    probabilities /= probabilities.sum()
    order = np.argsort(-probabilities).tolist()
    kept = [
        i for i in order if probabilities[i] >= settings.number("min_p") * probabilities[order[0]]
    ]
    if settings.top_k:
        kept = kept[: settings.top_k]
    total = probabilities[kept].sum()
    nucleus, mass = [], 0.0
    for i in kept:
        nucleus.append(i)
        mass += probabilities[i] / total
        if mass >= settings.number("top_p"):
            break
    result = np.zeros_like(probabilities)
    result[nucleus] = probabilities[nucleus]
    return result / result.sum()


@pytest.mark.parametrize("settings", TRUNCATIONS.values(), ids=TRUNCATIONS.keys())
def test_draws_follow_the_distribution_over_seeds(settings: SamplingSettings) -> None:
    logits = torch.randn(24, generator=torch.Generator().manual_seed(1)) * 1.5
    every = [replace(settings, seed=seed) for seed in range(NUM_DRAWS)]
    tokens = sampled(logits.expand(NUM_DRAWS, -1), every)
    assert_follows(tokens, expected_probabilities(logits.numpy(), settings))


def test_draws_follow_what_bias_penalties_and_forbidden_tokens_leave() -> None:
    """The prompt is token 0; the output so far 1, 2, 2."""
    logits = torch.randn(24, generator=torch.Generator().manual_seed(6)) * 1.5
    settings = SamplingSettings(
        temperature=0.8,
        top_p=0.95,
        logit_bias=((4, 2.0), (5, -1.5)),
        presence_penalty=0.7,
        frequency_penalty=0.4,
        repetition_penalty=1.3,
        min_tokens=4,
        stop_token_ids=(7,),
        bad_token_ids=((8,), (2, 9), (1, 2, 2, 10), (3, 11)),
    )
    every = [replace(settings, seed=seed) for seed in range(NUM_DRAWS)]
    tokens = sampled(
        logits.expand(NUM_DRAWS, -1), every, tokens=[[0, 1, 2, 2]] * NUM_DRAWS, eos=(6,)
    )
    adjusted = logits.numpy().astype(np.float64)
    adjusted[[4, 5]] += [2.0, -1.5]
    seen = adjusted[[0, 1, 2]]
    adjusted[[0, 1, 2]] = np.where(seen > 0, seen / 1.3, seen * 1.3)
    adjusted[1] -= 0.7 + 0.4
    adjusted[2] -= 0.7 + 2 * 0.4
    adjusted[[6, 7, 8, 9, 10]] = -np.inf
    assert_follows(tokens, expected_probabilities(adjusted, settings))


def test_draws_follow_the_distribution_over_positions() -> None:
    logits = torch.randn(24, generator=torch.Generator().manual_seed(2)) * 1.5
    settings = SamplingSettings(top_p=0.9, seed=12345)
    tokens = sampled(
        logits.expand(NUM_DRAWS, -1),
        [settings] * NUM_DRAWS,
        tokens=[[0] * (1 + n) for n in range(NUM_DRAWS)],
    )
    assert_follows(tokens, expected_probabilities(logits.numpy(), settings))


@pytest.mark.parametrize(
    "settings",
    [
        SamplingSettings(top_p=0.7, min_p=0.01),
        SamplingSettings(top_p=0.6, top_k=2000),
        SamplingSettings(top_p=0.8, top_k=1500, min_p=0.02),
    ],
    ids=str,
)
def test_top_p_is_a_part_of_what_min_p_and_top_k_leave_however_much(
    settings: SamplingSettings,
) -> None:
    """Far more tokens are left than are looked at first, and top_p takes a part of them all."""
    logits = torch.randn(3000, generator=torch.Generator().manual_seed(3)) * 0.6
    every = [replace(settings, seed=seed) for seed in range(2000)]
    tokens = np.array(sampled(logits.expand(2000, -1), every))
    probabilities = expected_probabilities(logits.numpy(), settings)
    # Thirty groups of about the same probability, from the likeliest token down.
    order = np.argsort(-probabilities)
    group = np.empty(3000, dtype=np.int64)
    group[order] = (np.cumsum(probabilities[order]) * 29.999).astype(np.int64)
    assert (probabilities[tokens] > 0).all()
    assert_follows(group[tokens].tolist(), np.bincount(group, probabilities))


def test_a_wide_nucleus_beyond_the_candidates_follows_too() -> None:
    """3000 equal tokens: more than are looked at first."""
    logits = torch.zeros(3000)
    settings = SamplingSettings(top_p=0.9)
    every = [replace(settings, seed=seed) for seed in range(2000)]
    tokens = np.array(sampled(logits.expand(2000, -1), every))
    # All tie at the edge of the nucleus, so all stay.
    assert_follows((tokens // 100).tolist(), np.full(30, 1 / 30))


@pytest.mark.parametrize("settings", TRUNCATIONS.values(), ids=TRUNCATIONS.keys())
def test_a_token_does_not_depend_on_its_neighbours(settings: SamplingSettings) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(12, 3000, generator=generator) * 2
    others = list(TRUNCATIONS.values())
    mixed = [replace(others[i % len(others)], seed=i) for i in range(12)]
    mixed[5] = replace(settings, seed=99)
    together = sampled(logits, mixed)
    for neighbours in ([], [1], [0, 2, 8, 11]):
        rows = [5, *neighbours]
        assert sampled(logits[rows], [mixed[i] for i in rows])[0] == together[5]


def test_a_seed_gives_its_tokens_again_and_another_does_not() -> None:
    logits = torch.zeros(64, 1000)
    tokens = [[0] * (n + 1) for n in range(64)]
    first = sampled(logits, [SamplingSettings(seed=1)] * 64, tokens=tokens)
    assert sampled(logits, [SamplingSettings(seed=1)] * 64, tokens=tokens) == first
    assert sampled(logits, [SamplingSettings(seed=2)] * 64, tokens=tokens) != first
    assert len(set(first)) > 50


def test_seeds_use_all_64_bits() -> None:
    logits = torch.zeros(3, 100_000)
    settings = [SamplingSettings(seed=seed) for seed in (0, 2**63, 2**64 - 1)]
    assert len(set(sampled(logits, settings))) == 3


def test_greedy_takes_the_lowest_of_equal_tokens() -> None:
    logits = torch.zeros(2, 50)
    logits[0, [7, 30, 49]] = 1.0
    assert sampled(logits, [GREEDY, GREEDY]) == [7, 0]


def test_a_freezing_temperature_is_greedy() -> None:
    logits = torch.randn(1, 500, generator=torch.Generator().manual_seed(4))
    assert sampled(logits, [SamplingSettings(temperature=1e-9)]) == [int(logits.argmax())]


def test_tokens_that_tie_at_the_edge_stay_together() -> None:
    logits = torch.tensor([3.0, 2.0, 2.0, 2.0, 0.0])
    every = [SamplingSettings(top_k=2, seed=seed) for seed in range(400)]
    assert set(sampled(logits.expand(400, -1), every)) == {0, 1, 2, 3}


def test_logits_that_are_not_finite_spoil_only_their_row() -> None:
    logits = torch.randn(4, 200, generator=torch.Generator().manual_seed(5))
    settings = [replace(s, seed=1) for s in list(TRUNCATIONS.values())[:4]]
    expected = sampled(logits, settings)
    logits[1, 17] = math.nan
    logits[3, 3] = math.inf
    result = sampled(logits, settings)
    assert [result[0], result[2]] == [expected[0], expected[2]]
