"""Bias, penalties and the stop tokens' mask against their plain definitions."""

import numpy as np
import torch

from gpuworker.core.plan import AssignedRequest, SamplingSettings
from gpuworker.core.request_slots import RequestSlots
from tests.gpuworker.sampling.samples import sample, sampled

GREEDY = SamplingSettings(temperature=0.0)
VOCAB_SIZE = 30


def adjusted(
    logits: torch.Tensor, settings: SamplingSettings, tokens: list[int], num_prompt_tokens: int
) -> np.ndarray:
    """The first of two rows; the second must stay as it is."""
    both = torch.stack([logits, logits])
    sample(both, [settings, GREEDY], [tokens, tokens], num_prompt_tokens, eos=(2,))
    assert torch.equal(both[1], logits)
    return both[0].numpy()


def test_penalties_follow_their_definition() -> None:
    rng = np.random.default_rng(1)
    logits = torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(1))
    for _ in range(20):
        tokens = rng.integers(0, VOCAB_SIZE, 25).tolist()
        num_prompt = int(rng.integers(1, 25))
        repetition, presence, frequency = (float(rng.uniform(*r)) for r in _RANGES)
        settings = SamplingSettings(
            temperature=0.0,
            repetition_penalty=repetition,
            presence_penalty=presence,
            frequency_penalty=frequency,
        )
        expected = logits.numpy().astype(np.float64)
        for token in set(tokens):
            factor = 1 / repetition if expected[token] > 0 else repetition
            expected[token] *= factor
        for token in tokens[num_prompt:]:
            expected[token] -= frequency
        for token in set(tokens[num_prompt:]):
            expected[token] -= presence
        np.testing.assert_allclose(
            adjusted(logits, settings, tokens, num_prompt), expected, rtol=1e-5, atol=1e-5
        )


_RANGES = ((0.5, 2.0), (-2.0, 2.0), (-2.0, 2.0))


def test_a_bias_is_added_before_penalties() -> None:
    logits = torch.zeros(VOCAB_SIZE)
    settings = SamplingSettings(
        temperature=0.0, logit_bias=((4, 2.0), (9, -3.0)), repetition_penalty=2.0
    )
    expected = np.zeros(VOCAB_SIZE)
    expected[[4, 9]] = [1.0, -3.0]
    np.testing.assert_array_equal(adjusted(logits, settings, [4], 1), expected)


def test_stop_tokens_cannot_come_before_min_tokens() -> None:
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, [2, 7, 11]] = torch.tensor([9.0, 8.0, 7.0])

    def token(num_output: int, **settings: object) -> int:
        sampling = SamplingSettings(temperature=0.0, min_tokens=2, **settings)
        return sampled(logits, [sampling], tokens=[[1] * (1 + num_output)], eos=(2,))[0]

    assert token(0, stop_token_ids=(7, 500)) == 11
    assert token(1, stop_token_ids=(7,)) == 11
    assert token(2, stop_token_ids=(7,)) == 2
    assert token(0) == 7
    assert token(0, ignore_eos=True, stop_token_ids=(7,)) == 2


def test_the_token_that_would_complete_a_bad_word_cannot_come() -> None:
    logits = torch.zeros(VOCAB_SIZE)
    bad = ((7,), (4, 5), (3, 4, 6), (9, VOCAB_SIZE), (8, 4, 5, 9))
    settings = SamplingSettings(temperature=0.0, bad_token_ids=bad)

    def forbidden(*output: int) -> set[int]:
        """With 4 as the prompt's end: a bad word that begins in the prompt is no bad word."""
        result = adjusted(logits, settings, [3, 4, *output], num_prompt_tokens=2)
        return set(np.flatnonzero(np.isneginf(result)).tolist())

    assert forbidden() == {7}
    assert forbidden(9) == {7}
    assert forbidden(4) == {5, 7}
    assert forbidden(3, 4) == {5, 6, 7}
    assert forbidden(8, 4, 5) == {7, 9}
    assert forbidden(2, 4, 5) == {7}


def test_a_freed_rows_bad_words_are_not_its_next_requests() -> None:
    slots = RequestSlots(2, VOCAB_SIZE, ())
    tokens = np.array([1], dtype=np.int32)
    slots.occupy(AssignedRequest(1, "a", tokens, 1, SamplingSettings(bad_token_ids=((4,),))))
    slots.free(np.array([1], dtype=np.int32))
    slots.occupy(AssignedRequest(1, "b", tokens, 1, SamplingSettings()))
    assert not slots.bad_words_by_row
