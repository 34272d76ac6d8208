"""Products whose rows do not know each other."""

import pytest
import torch

from gpuworker.models.linear import MIN_ROWS, make_linear, padded_rows


@pytest.mark.parametrize(("depth", "width"), [(64, 160), (576, 960), (1536, 576), (4096, 256)])
def test_a_row_has_the_same_bits_whatever_the_other_rows(depth: int, width: int) -> None:
    """In float32; in bfloat16 with AMX, oneDNN cuts the depth by the number of rows."""
    generator = torch.Generator().manual_seed(depth)
    weight = torch.randn(width, depth, generator=generator) / depth**0.5
    linear = make_linear(weight, None)
    x = torch.randn(300, depth, generator=generator)
    everything = linear(x)
    for num_rows in (MIN_ROWS, 3, 4, 7, 16, 33, 64, 129):
        for start in (0, 5, 101):
            part = linear(x[start : start + num_rows].contiguous())
            assert torch.equal(part, everything[start : start + num_rows])


def test_equals_the_plain_product() -> None:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(24, 40, generator=generator)
    bias = torch.randn(24, generator=generator)
    x, residual = torch.randn(5, 40, generator=generator), torch.randn(5, 24, generator=generator)
    linear = make_linear(weight, bias)
    expected = x.double() @ weight.double().T + bias.double()
    torch.testing.assert_close(linear(x).double(), expected, rtol=1e-5, atol=1e-5)
    before = residual.clone()
    stream, update = linear.add_to(residual, x)
    added = stream if update is None else stream + update
    torch.testing.assert_close(added.double(), expected + residual, rtol=1e-5, atol=1e-5)
    assert torch.equal(residual, before)


def test_float16_has_a_product_too() -> None:
    linear = make_linear(torch.eye(8, dtype=torch.float16), None)
    x = torch.randn(3, 8).half()
    assert torch.equal(linear(x), x)


def test_sizes_are_few_and_close() -> None:
    sizes = {padded_rows(n) for n in range(1, 2049)}
    assert min(sizes) == MIN_ROWS
    assert len(sizes) < 60
    assert all(n <= padded_rows(n) < n + 64 for n in range(1, 2049))
    assert all(padded_rows(n) <= 4 / 3 * n for n in range(2, 2049))
