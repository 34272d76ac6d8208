"""From logits to tokens under the interpreter: the kernels against their twins."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from gpuworker.kernels.fused import TritonOps
from gpuworker.kernels.ops import Adjustments, Draws, LogitEdits, Verification
from gpuworker.kernels.twins import TorchOps
from tests.kernels.batches import poison_allocations

VOCAB = 5000
WORDS = -(-VOCAB // 32)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    poison_allocations(monkeypatch)


def random_logits(num_samples, seed=0, spread=3.0, size=VOCAB):
    generator = torch.Generator().manual_seed(seed)
    return spread * torch.randn(num_samples, size, generator=generator)


def column(values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype)


def adjustments(seed=0):
    """Three samples of two requests: one penalized with drafts, one with a grammar, one plain."""
    rng = np.random.default_rng(seed)
    counts = rng.integers(0, 3, (4, VOCAB)).astype(np.int16) * (rng.random((4, VOCAB)) < 0.05)
    bits = rng.integers(-(2**31), 2**31, (4, WORDS)).astype(np.int32)
    return Adjustments(
        slots=column([3, 1, 0]),
        output_counts=torch.from_numpy(counts.astype(np.int16)),
        prompt_bits=torch.from_numpy(bits),
        grammar_rows=column([-1, 2, -1]),
        grammar_bits=torch.from_numpy(bits[::-1].copy()),
        draft_starts=column([1, 0, 0]),
        draft_counts=column([3, 0, 0]),
        drafts=column([9, 17, 18, 17]),
        numbers={
            "repetition_penalty": column([1.3, 1.0, 1.0], torch.float32),
            "presence_penalty": column([0.5, 0.0, 0.0], torch.float32),
            "frequency_penalty": column([0.25, 0.0, 0.0], torch.float32),
            "temperature": column([0.7, 0.0, 1.0], torch.float32),
        },
    )


def check_adjusted(given):
    ours = random_logits(3, seed=2)
    theirs = ours.clone()
    TritonOps().adjust_logits(ours, given)
    TorchOps().adjust_logits(theirs, given)
    assert torch.allclose(ours, theirs, rtol=1e-6, atol=1e-6)
    return ours


def with_numbers(given, values):
    columns = {name: column(value, torch.float32) for name, value in values.items()}
    return replace(given, numbers={**given.numbers, **columns})


def mapped(columns, change):
    """The columns of a step, each changed."""

    def one(value):
        if isinstance(value, torch.Tensor):
            return change(value)
        return {name: change(x) for name, x in value.items()}

    return replace(columns, **{name: one(getattr(columns, name)) for name in columns.__slots__})


def test_penalties_grammar_and_temperature_equal_their_twin():
    check_adjusted(adjustments())


@pytest.mark.parametrize("name", ["repetition", "presence", "frequency"])
def test_each_penalty_works_alone(name):
    off = {"repetition": 1.0, "presence": 0.0, "frequency": 0.0}
    values = {f"{key}_penalty": [value] * 3 for key, value in off.items()}
    values[f"{name}_penalty"] = [0.6, 1.5, 2.0]
    check_adjusted(with_numbers(adjustments(seed=3), values))


def test_drafts_before_a_sample_count_as_its_output():
    given = replace(adjustments(), output_counts=torch.zeros(4, VOCAB, dtype=torch.int16))
    given = replace(given, prompt_bits=torch.zeros(4, WORDS, dtype=torch.int32))
    given = with_numbers(given, {"repetition_penalty": [1.0] * 3})
    before = random_logits(3, seed=2)
    changed = check_adjusted(given)[0] * 0.7 - before[0]
    assert torch.allclose(changed[17], torch.tensor(-1.0), atol=1e-5)
    assert torch.allclose(changed[18], torch.tensor(-0.75), atol=1e-5)
    assert changed[9].abs() < 1e-5


def test_edits_reach_single_logits_and_padding_none():
    edits = LogitEdits(
        column([0, 2, -1, 2, 0]),
        column([7, 4999, 3, 1, 7]),
        column([1.5, -torch.inf, 9.0, 2.0, 0.25], torch.float32),
    )
    # A row before the first is not nothing: it would be another tensor's memory.
    buffer, theirs = torch.cat((torch.zeros(1, VOCAB), random_logits(3))), random_logits(3)
    ours = buffer[1:]
    TritonOps().edit_logits(ours, edits)
    assert not buffer[0].any()
    TorchOps().edit_logits(theirs, edits)
    assert torch.equal(ours, theirs)
    assert ours[2, 4999] == -torch.inf


def draws(num_samples, *, top_k=0, top_p=1.0, min_p=0.0, is_drawn=1, seed=0):
    rng = np.random.default_rng(seed)
    return Draws(
        seeds=torch.from_numpy(rng.integers(-(2**63), 2**63 - 1, num_samples)),
        positions=torch.from_numpy(rng.integers(0, 5000, num_samples)),
        is_drawn=torch.full((num_samples,), is_drawn, dtype=torch.int32),
        numbers={
            "top_k": torch.full((num_samples,), top_k, dtype=torch.int32),
            "top_p": torch.full((num_samples,), top_p, dtype=torch.float64),
            "min_p": torch.full((num_samples,), min_p, dtype=torch.float64),
        },
    )


TRUNCATIONS = [
    {},
    {"top_k": 1},
    {"top_k": 40},
    {"top_k": VOCAB},
    {"top_p": 0.9},
    {"top_p": 0.05},
    {"top_p": 1.0 - 1e-12},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"top_k": 50, "top_p": 0.8},
    {"top_k": 200, "top_p": 0.95, "min_p": 0.02},
]


@pytest.mark.parametrize("truncation", TRUNCATIONS, ids=str)
def test_sampled_tokens_equal_the_twins(truncation):
    # Thresholds of either sign, and around zero.
    scaled = random_logits(4, seed=4) + torch.tensor([[0.0], [-40.0], [-9.0], [20.0]])
    given = draws(4, **truncation)
    assert torch.equal(TritonOps().sample(scaled, given), TorchOps().sample(scaled, given))


@pytest.mark.parametrize("truncation", [{"top_k": 3}, {"top_p": 0.5}], ids=str)
def test_tokens_that_tie_at_the_edge_stay_together(truncation):
    scaled = torch.zeros(24, 64)
    given = draws(24, **truncation)
    tokens = TritonOps().sample(scaled, given)
    assert torch.equal(tokens, TorchOps().sample(scaled, given))
    assert len(tokens.unique()) > 8


def test_thresholds_tell_neighbouring_floats_apart():
    scaled = (1.0 + torch.arange(64) * 2.0**-23).repeat(32, 1)
    tokens = TritonOps().sample(scaled, draws(32, top_k=3))
    assert set(tokens.tolist()) == {61, 62, 63}


def test_a_greedy_row_takes_the_first_of_the_likeliest():
    scaled = random_logits(3, seed=5)
    # 4173 and 77 fall to the same lane of the kernel.
    scaled[:, [4321, 4173, 77]] = 100.0
    tokens = TritonOps().sample(scaled, draws(3, is_drawn=0, top_k=5))
    assert tokens.tolist() == [77, 77, 77]


def test_forbidden_tokens_are_never_drawn():
    scaled = torch.full((16, 300), -torch.inf)
    scaled[:, [5, 210]] = torch.tensor([0.0, 0.1])
    tokens = TritonOps().sample(scaled, draws(16))
    assert set(tokens.tolist()) == {5, 210}


def test_a_token_depends_on_its_own_row_only():
    scaled, given = random_logits(3, seed=6), draws(3, top_p=0.9)
    together = TritonOps().sample(scaled, given)
    alone = [
        TritonOps().sample(
            scaled[i : i + 1],
            mapped(given, lambda x, i=i: x[i : i + 1]),
        )
        for i in range(3)
    ]
    assert torch.equal(torch.cat(alone), together)


def test_logits_that_are_not_numbers_still_give_a_token_id():
    scaled = torch.full((1, 100), torch.nan)
    with np.errstate(invalid="ignore"):
        token = TritonOps().sample(scaled, draws(1, top_p=0.5))
    assert 0 <= int(token) < 100


def test_samples_count_up_to_the_first_that_differs_from_its_draft():
    token_ids = column([5, 1, 2, 3, 4, 7, 8, 9, 6])
    given = Verification(
        sample_starts=column([0, 1, 5, 8, 9]),
        num_samples=column([1, 4, 3, 1, 0]),
        draft_starts=column([0, 0, 3, 5, 5]),
        drafts=column([1, 2, 9, 7, 8]),
    )
    assert TritonOps().accept(token_ids, given).tolist() == [1, 3, 3, 1, 0]
    assert TorchOps().accept(token_ids, given).tolist() == [1, 3, 3, 1, 0]


@pytest.mark.parametrize("wrong", [0, 63, 64, 129, None])
def test_any_number_of_drafts_is_verified(wrong):
    drafts = torch.arange(130, dtype=torch.int32)
    token_ids = torch.arange(131, dtype=torch.int32)
    if wrong is not None:
        token_ids[wrong] += 1
    given = Verification(
        sample_starts=column([0]),
        num_samples=column([131]),
        draft_starts=column([0]),
        drafts=drafts,
    )
    expected = 131 if wrong is None else wrong + 1
    assert TritonOps().accept(token_ids, given).tolist() == [expected]
