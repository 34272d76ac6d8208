"""A mixture of experts: its plain formula, and rows that do not know each other."""

import pytest
import torch
from torch.nn import functional

from gpuworker.kernels.twins import TorchOps
from gpuworker.models.linear import make_linear
from gpuworker.models.mlp import GatedMlp, MixtureMlp

HIDDEN, INNER, NUM_EXPERTS = 48, 1536, 5


class Weights:
    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator) / shape[-1] ** 0.5

        self.router = random(NUM_EXPERTS, HIDDEN) * 3
        self.gate_up = [random(2 * INNER, HIDDEN) for _ in range(NUM_EXPERTS)]
        self.down = [random(HIDDEN, INNER) for _ in range(NUM_EXPERTS)]


def make_mixture(weights: Weights, *, is_normalized: bool) -> MixtureMlp:
    experts = [
        GatedMlp(make_linear(gate_up, None), make_linear(down, None), "silu", TorchOps())
        for gate_up, down in zip(weights.gate_up, weights.down, strict=True)
    ]
    router = make_linear(weights.router, None)
    return MixtureMlp(router, experts, num_per_token=2, is_normalized=is_normalized)


@pytest.mark.parametrize("is_normalized", [True, False])
def test_equals_its_formula(is_normalized: bool) -> None:
    weights = Weights(1)
    x = torch.randn(9, HIDDEN, generator=torch.Generator().manual_seed(2))
    expected = torch.zeros_like(x)
    for i, row in enumerate(x):
        probabilities = torch.softmax(weights.router @ row, 0)
        top = probabilities.topk(2)
        shares = top.values / top.values.sum() if is_normalized else top.values
        for share, number in zip(shares, top.indices.tolist(), strict=True):
            gate, up = (weights.gate_up[number] @ row).chunk(2)
            expected[i] += share * (weights.down[number] @ (functional.silu(gate) * up))
    mixture = make_mixture(weights, is_normalized=is_normalized)
    torch.testing.assert_close(mixture(x), expected, rtol=1e-4, atol=1e-5)
    stream, update = mixture.add_to(x, x)
    torch.testing.assert_close(stream + update, expected + x, rtol=1e-4, atol=1e-5)


def test_a_row_has_the_same_bits_whatever_the_other_rows() -> None:
    mixture = make_mixture(Weights(3), is_normalized=True)
    x = torch.randn(70, HIDDEN, generator=torch.Generator().manual_seed(4))
    everything = mixture(x)
    for num_rows in (2, 3, 5, 12, 33):
        for start in (0, 11, 30):
            assert torch.equal(
                mixture(x[start : start + num_rows]), everything[start : start + num_rows]
            )
