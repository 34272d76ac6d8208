"""Token counts on the device: what a row starts with, and what each token adds."""

import numpy as np
import torch

from gpuworker.core.plan import AssignedRequest, SamplingSettings
from gpuworker.device.transfers import HostTransfers
from gpuworker.sampling.penalties import PenaltyState

VOCAB_SIZE = 70
MOST = 2**15 - 1


def state() -> PenaltyState:
    return PenaltyState(4, VOCAB_SIZE, torch.device("cpu"), HostTransfers())


def request(row: int, prompt: list[int], output: list[int]) -> AssignedRequest:
    tokens = np.array([*prompt, *output], dtype=np.int32)
    settings = SamplingSettings(presence_penalty=1.0)
    return AssignedRequest(row, "r", tokens, len(prompt), settings)


def prompt_tokens(penalties: PenaltyState, row: int) -> list[int]:
    words = penalties.prompt_bits[row].numpy().view(np.uint32)
    return [t for t in range(VOCAB_SIZE) if words[t // 32] >> (t % 32) & 1]


def test_nothing_is_allocated_before_the_first_penalty() -> None:
    penalties = state()
    assert penalties.output_counts.numel() == penalties.prompt_bits.numel() == 1
    penalties.reset_row(request(1, [5], []))
    assert penalties.output_counts.shape == (4, VOCAB_SIZE)
    assert penalties.prompt_bits.shape == (4, 3)


def test_a_row_starts_with_its_own_prompt_and_output() -> None:
    penalties = state()
    penalties.reset_row(request(2, [0, 31, 32, 69, 31], [7, 7, 69]))
    penalties.reset_row(request(2, [63], [8]))
    penalties.reset_row(request(3, [1], [1, 1]))
    assert prompt_tokens(penalties, 2) == [63]
    assert penalties.output_counts[2].nonzero().squeeze(1).tolist() == [8]
    assert penalties.output_counts[3, 1] == 2
    penalties.reset_row(request(0, [0, 31, 32, 69, 31], [7, 7, 69]))
    assert prompt_tokens(penalties, 0) == [0, 31, 32, 69]


def test_a_count_that_is_full_stays_so() -> None:
    penalties = state()
    penalties.reset_row(request(1, [5], [9] * (MOST - 1)))
    for _ in range(3):
        penalties.count(torch.tensor([1, 3]), torch.tensor([9, 4]))
    assert penalties.output_counts[1, 9] == MOST
    assert penalties.output_counts[3, 4] == 3
    penalties.reset_row(request(1, [5], [9] * (MOST + 5)))
    assert penalties.output_counts[1, 9] == MOST
