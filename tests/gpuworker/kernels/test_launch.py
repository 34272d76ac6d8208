"""How kernels are held: compiled once for each kind of argument, then started directly."""

import pytest
import torch
import triton

from gpuworker.kernels.launch import HeldKernel, make_ready
from tests.kernels.stub_driver import StubDriver


class Compiled:
    """A compiled kernel that notes its launches."""

    function = "handle"
    packed_metadata = "metadata"

    def __init__(self):
        self.launches = []

    def run(self, *arguments):
        self.launches.append(arguments)


class Function:
    """A kernel of two arguments and one constant, whose compilations are noted."""

    __name__ = "kernel"
    arg_names = ("x", "n", "SIZE")

    def __init__(self):
        self.compiled = []

    def __getitem__(self, grid):
        def compile_and_launch(*arguments, **bound):
            self.compiled.append((grid, arguments, bound, Compiled()))
            return self.compiled[-1][3]

        return compile_and_launch


@pytest.fixture
def driver(monkeypatch):
    stub = StubDriver()
    monkeypatch.setattr(triton.runtime.driver, "_active", stub)
    return stub


def make():
    function = Function()
    return function, HeldKernel(function, {"SIZE": 64}, {"num_warps": 4})


def test_the_second_launch_takes_the_held_kernel_with_the_same_arguments(driver):
    function, kernel = make()
    x, y = torch.zeros(8), torch.ones(8)
    kernel((3, 1, 1), x, 5)
    kernel((7, 2, 1), y, 9)
    (grid, arguments, bound, compiled), *more = function.compiled
    assert (grid, arguments, bound, more) == ((3, 1, 1), (x, 5), {"SIZE": 64, "num_warps": 4}, [])
    (launch,) = compiled.launches
    assert launch == (7, 2, 1, 0, "handle", "metadata", None, None, None, y, 9, 64)


@pytest.mark.parametrize(
    "other",
    [torch.zeros(8, dtype=torch.float64), torch.zeros(9)[1:]],
    ids=["another type", "another alignment"],
)
def test_arguments_of_another_kind_are_compiled_apart(driver, other):
    function, kernel = make()
    for x in (torch.zeros(8), other, torch.zeros(8), other):
        kernel((1, 1, 1), x, 0)
    assert len(function.compiled) == 2
    assert [len(entry[3].launches) for entry in function.compiled] == [1, 1]


def test_devices_have_kernels_of_their_own(driver):
    function, kernel = make()
    x = torch.zeros(8)
    for arch in ("sm80", "sm90", "sm80"):
        driver.use(arch)
        kernel((1, 1, 1), x, 0)
    assert len(function.compiled) == 2


def test_constants_must_be_the_last_parameters():
    with pytest.raises(AssertionError, match="its last are not"):
        HeldKernel(Function(), {"n": 1}, {})


class NoCompiler:
    @property
    def active(self):
        raise RuntimeError("Failed to find C compiler.")


def test_without_a_compiler_it_is_said_what_triton_needs(monkeypatch):
    monkeypatch.setattr(triton.runtime, "driver", NoCompiler())
    with pytest.raises(
        ValueError, match=r"Failed to find C compiler.*python3-dev.*TRITON_CACHE_DIR"
    ):
        make_ready()
