"""The twins say what the CPU sampler does: a GPU worker's tokens are a CPU worker's."""

import numpy as np
import pytest
import torch

from gpuworker.core.plan import SamplingSettings
from gpuworker.kernels.ops import Adjustments, Draws
from gpuworker.kernels.twins import TorchOps
from gpuworker.sampling.adjust import adjust_logits
from tests.gpuworker.sampling.places import make_places, sampled

VOCAB_SIZE = 70
TOKENS = [3, 9, 9, 41, 9, 3, 60, 41, 41]
NUM_PROMPT = 4


def column(value, dtype):
    return torch.tensor([value], dtype=dtype)


def prompt_bits(tokens):
    words = np.zeros(-(-VOCAB_SIZE // 32), dtype=np.uint32)
    for token in tokens:
        words[token // 32] |= np.uint32(1 << (token % 32))
    return torch.from_numpy(words.view(np.int32))[None]


def adjustments(settings):
    """What a device holds of a row with TOKENS."""
    counts = np.bincount(TOKENS[NUM_PROMPT:], minlength=VOCAB_SIZE).astype(np.int16)
    return Adjustments(
        slots=column(0, torch.int32),
        output_counts=torch.from_numpy(counts)[None],
        prompt_bits=prompt_bits(TOKENS[:NUM_PROMPT]),
        grammar_rows=column(-1, torch.int32),
        grammar_bits=torch.zeros(1, 3, dtype=torch.int32),
        draft_starts=column(0, torch.int32),
        draft_counts=column(0, torch.int32),
        drafts=torch.zeros(1, dtype=torch.int32),
        repetition=column(settings.repetition_penalty, torch.float32),
        presence=column(settings.presence_penalty, torch.float32),
        frequency=column(settings.frequency_penalty, torch.float32),
        temperature=column(settings.temperature, torch.float32),
    )


PENALTIES = [
    SamplingSettings(repetition_penalty=1.4),
    SamplingSettings(presence_penalty=0.7, frequency_penalty=-0.3),
    SamplingSettings(repetition_penalty=0.8, presence_penalty=-1.0, frequency_penalty=1.5),
]


@pytest.mark.parametrize("settings", PENALTIES, ids=range(len(PENALTIES)))
def test_penalties_are_the_cpu_samplers(settings):
    logits = torch.randn(1, VOCAB_SIZE, generator=torch.Generator().manual_seed(1))
    rows, batch = make_places([settings], [TOKENS], VOCAB_SIZE, NUM_PROMPT)
    expected = logits.clone()
    adjust_logits(expected, batch, rows)
    TorchOps().adjust_logits(logits, adjustments(settings))
    assert torch.allclose(logits, expected, rtol=1e-6, atol=1e-6)


DRAWN = [
    SamplingSettings(),
    SamplingSettings(temperature=0.6, top_k=5),
    SamplingSettings(temperature=1.7, top_p=0.6),
    SamplingSettings(min_p=0.2),
    SamplingSettings(temperature=1.2, top_k=20, top_p=0.9, min_p=0.01),
    SamplingSettings(temperature=0.0),
]


@pytest.mark.parametrize("settings", DRAWN, ids=range(len(DRAWN)))
def test_tokens_are_the_cpu_samplers(settings):
    num_rows = 40
    logits = 2 * torch.randn(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(2))
    seeds = np.random.default_rng(3).integers(0, 2**64 - 1, num_rows, dtype=np.uint64)
    each = [
        SamplingSettings(
            temperature=settings.temperature,
            top_k=settings.top_k,
            top_p=settings.top_p,
            min_p=settings.min_p,
            seed=int(seed),
        )
        for seed in seeds
    ]
    tokens = [[0] * (1 + i % 7) for i in range(num_rows)]
    expected = sampled(logits, each, tokens=tokens)
    heat = settings.temperature or 1.0

    def full(value, dtype):
        return torch.full((num_rows,), value, dtype=dtype)

    draws = Draws(
        seeds=torch.from_numpy(seeds.view(np.int64)),
        positions=torch.tensor([len(t) - 1 for t in tokens]),
        top_k=full(settings.top_k, torch.int32),
        top_p=full(settings.top_p, torch.float64),
        min_p=full(settings.min_p, torch.float64),
        is_drawn=full(int(settings.temperature > 0), torch.int32),
    )
    assert TorchOps().sample(logits / heat, draws).tolist() == expected
