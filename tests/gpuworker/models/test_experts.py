"""A mixture of experts: its plain formula, and rows that do not know each other."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from gpuworker.device.graphs import recording
from gpuworker.kernels.twins import TorchOps
from gpuworker.models.experts import Experts, GroupedExperts, ListedExperts, MixtureMlp
from gpuworker.models.linear import make_linear
from gpuworker.models.mlp import GatedMlp

HIDDEN, INNER, NUM_EXPERTS = 48, 1536, 5


class Weights:
    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator) / shape[-1] ** 0.5

        self.router = random(NUM_EXPERTS, HIDDEN) * 3
        self.gate_up = [random(2 * INNER, HIDDEN) for _ in range(NUM_EXPERTS)]
        self.down = [random(HIDDEN, INNER) for _ in range(NUM_EXPERTS)]


def listed(weights: Weights) -> ListedExperts:
    return ListedExperts(
        [
            GatedMlp(make_linear(gate_up, None), make_linear(down, None), "silu", TorchOps())
            for gate_up, down in zip(weights.gate_up, weights.down, strict=True)
        ]
    )


def grouped(weights: Weights, *, is_grouped_in_graphs: bool = True) -> GroupedExperts:
    gate = partial(TorchOps().gate, activation="silu")
    gate_up, down = torch.stack(weights.gate_up), torch.stack(weights.down)
    return GroupedExperts(gate_up, down, gate, is_grouped_in_graphs=is_grouped_in_graphs)


def make_mixture(
    weights: Weights,
    *,
    is_normalized: bool = True,
    make_experts: Callable[[Weights], Experts] = listed,
) -> MixtureMlp:
    router = make_linear(weights.router, None)
    experts = make_experts(weights)
    return MixtureMlp(router, experts, num_per_token=2, is_normalized=is_normalized)


@pytest.mark.parametrize("make_experts", [listed, grouped])
@pytest.mark.parametrize("is_normalized", [True, False])
def test_equals_its_formula(
    is_normalized: bool, make_experts: Callable[[Weights], Experts]
) -> None:
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
    mixture = make_mixture(weights, is_normalized=is_normalized, make_experts=make_experts)
    torch.testing.assert_close(mixture(x), expected, rtol=1e-4, atol=1e-5)
    stream, update = mixture.add_to(x, x)
    torch.testing.assert_close(stream + update, expected + x, rtol=1e-4, atol=1e-5)


def test_a_row_has_the_same_bits_whatever_the_other_rows() -> None:
    mixture = make_mixture(Weights(3))
    x = torch.randn(70, HIDDEN, generator=torch.Generator().manual_seed(4))
    everything = mixture(x)
    for num_rows in (2, 3, 5, 12, 33):
        for start in (0, 11, 30):
            assert torch.equal(
                mixture(x[start : start + num_rows]), everything[start : start + num_rows]
            )


class Untouchable:
    """An expert that must not be asked."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        raise AssertionError

    add_to = None


def test_experts_that_nobody_chose_are_not_touched() -> None:
    real = listed(Weights(5))._experts
    chosen = torch.tensor([[3, 1], [1, 3], [1, 3]])
    some = ListedExperts(
        [expert if i in {1, 3} else Untouchable() for i, expert in enumerate(real)]
    )
    x, shares = torch.randn(3, HIDDEN), torch.rand(3, 2)
    assert torch.equal(some(x, shares, chosen), ListedExperts(real)(x, shares, chosen))


@pytest.mark.parametrize("num_tokens", [1, 7, 64])
def test_every_token_through_every_expert_gives_the_same(num_tokens: int) -> None:
    generator = torch.Generator().manual_seed(6)
    experts = grouped(Weights(6))
    x = torch.randn(num_tokens, HIDDEN, generator=generator)
    chosen = torch.rand(num_tokens, NUM_EXPERTS, generator=generator).topk(2).indices
    torch.testing.assert_close(
        experts.dense(x, chosen), experts.grouped(x, chosen), rtol=1e-4, atol=1e-5
    )


class TakenError(Exception):
    """Instead of a form's result: it was this one."""


@pytest.mark.parametrize(("is_grouped", "form"), [(True, "grouped"), (False, "dense")])
def test_what_is_recorded_is_what_was_run_to_warm_up(
    is_grouped: bool, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that is recorded runs once before: both are the same form."""

    def taken(*_arguments: object) -> torch.Tensor:
        raise TakenError

    experts = grouped(Weights(7), is_grouped_in_graphs=is_grouped)
    x, shares, chosen = torch.randn(1, HIDDEN), torch.ones(1, 2), torch.tensor([[0, 1]])
    monkeypatch.setattr(experts, form, taken)
    with pytest.raises(TakenError), recording():
        experts(x, shares, chosen)
    monkeypatch.setattr(experts, "grouped", taken)
    with pytest.raises(TakenError):
        experts(x, shares, chosen)


@pytest.mark.parametrize("form", ["grouped", "dense"])
def test_nothing_in_a_graph_waits_for_the_device(form: str) -> None:
    """On tensors without values, whatever asks for one raises."""
    with FakeTensorMode():
        place = {"device": "cuda", "dtype": torch.bfloat16}
        gate = partial(TorchOps().gate, activation="silu")
        gate_up = torch.empty(NUM_EXPERTS, 2 * INNER, HIDDEN, **place)
        down = torch.empty(NUM_EXPERTS, HIDDEN, INNER, **place)
        experts = GroupedExperts(gate_up, down, gate, is_grouped_in_graphs=True)
        x = torch.empty(6, HIDDEN, **place)
        chosen = torch.zeros(6, 2, dtype=torch.int64, device="cuda")
        assert getattr(experts, form)(x, chosen).shape == (6, 2, HIDDEN)
