"""The check of compiled kernels can fail."""

import pytest
import triton

from gpuworker.attention.triton.configs import TUNED, ConfigKey, TileConfig
from tests.kernels import shipped
from tests.kernels.check_kernels import _compile_launch, _faults
from tests.kernels.machine_code import MachineCode
from tests.kernels.stub_driver import StubDriver

GOOD = MachineCode("kernel", 100, 0, 1000, {"HMMA": 8, "HGMMA": 0, "TMA": 0})


def test_a_good_kernel_has_no_faults():
    assert _faults(GOOD, "sm80", {shipped.MATRIX, shipped.WIDE_MATRIX}) == ()


@pytest.mark.parametrize(
    ("changes", "needs", "fault"),
    [
        ({"num_spills": 1}, set(), "spills"),
        ({"shared_bytes": 232449}, set(), "too much shared memory"),
        ({}, {shipped.WIDE_MATRIX}, "no HGMMA"),
        ({}, {shipped.COPY_ENGINE}, "no TMA"),
        ({"instructions": {}}, {shipped.MATRIX}, "no HMMA or HGMMA"),
    ],
)
def test_each_fault_is_named(changes, needs, fault):
    fields = {name: getattr(GOOD, name) for name in MachineCode.__slots__} | changes
    assert _faults(MachineCode(**fields), "sm90", needs) == (fault,)


def test_a_configuration_that_spills_is_found(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    driver = StubDriver()
    monkeypatch.setattr(triton.runtime.driver, "_active", driver)
    monkeypatch.setattr(triton.knobs.compilation, "listener", None)
    monkeypatch.setattr(triton.knobs.compilation, "disable_line_info", True)
    driver.use("sm80")
    key = ConfigKey("sm80", 128, 4, 64, "wide", "chunk")
    monkeypatch.setitem(TUNED, key, TileConfig(128, 64, 4, 2, True, False))
    chunk = next(made for made in shipped.launches(shipped.MODELS) if "chunk" in made.name)
    faults = {row.code.name: row.faults for row in _compile_launch(chunk, "sm80") if row.code}
    assert faults["paged_attention"] == ("spills",)
