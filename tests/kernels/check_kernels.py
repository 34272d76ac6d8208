"""Compiles every kernel that a worker ships for every target, on a machine without any of them.

Prints registers, spills and shared memory of each, and fails when one does not compile, spills,
lacks the matrix instruction it is made for, or holds more shared memory than the target has.
"""

import argparse
import multiprocessing
import os
import sys
import time
from dataclasses import dataclass

import torch
import triton

from gpuworker.attention.triton.configs import Target
from tests.kernels import machine_code, shipped, stub_driver

# By need and target: instructions of which one must be there.
INSTRUCTIONS = {
    shipped.MATRIX: {
        "sm80": ("HMMA",),
        "sm90": ("HMMA", "HGMMA"),
        "sm100": ("HMMA", "UTCMMA"),
        "gfx942": ("MFMA",),
    },
    shipped.WIDE_MATRIX: {
        "sm80": ("HMMA",),
        "sm90": ("HGMMA",),
        "sm100": ("UTCMMA",),
        "gfx942": ("MFMA",),
    },
    shipped.COPY_ENGINE: {"sm90": ("TMA",), "sm100": ("TMA",)},
}
PROCESSORS = {"sm80": 108, "sm90": 132, "sm100": 148, "gfx942": 304}


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table."""

    launch: str
    arch: str
    code: machine_code.MachineCode | None
    faults: tuple[str, ...]


def main() -> int:
    """Compiles, prints, and says by its result whether all is well."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--all", action="store_true", help="every combination; an hour")
    parser.add_argument("--target", action="append", choices=list(stub_driver.GPU_TARGETS))
    parser.add_argument("--only", default="", help="launches whose name contains this")
    options = parser.parse_args()
    start = time.monotonic()
    names = [launch.name for launch in _launches(everything=options.all)]
    jobs = [
        (arch, name, options.all)
        for name in names
        for arch in options.target or stub_driver.GPU_TARGETS
        if options.only in name
    ]
    with multiprocessing.get_context("spawn").Pool(len(os.sched_getaffinity(0))) as pool:
        rows = [row for rows in pool.imap(_compile, jobs) for row in rows]
    _print_table(rows)
    faults = sum(len(row.faults) for row in rows)
    elapsed = time.monotonic() - start
    print(f"{len(rows)} kernels, {faults} faults, {elapsed:.0f} s")
    return 1 if faults or not rows else 0


def _launches(*, everything: bool) -> list[shipped.Launch]:
    return list(shipped.launches(shipped.all_models() if everything else shipped.MODELS))


def _compile(job: tuple[str, str, bool]) -> list[Row]:
    """One launch for one target, in a process that has no device."""
    arch, name, everything = job
    torch.set_num_threads(1)
    # Twice as fast to compile and read without line numbers.
    triton.knobs.compilation.disable_line_info = True
    stub_driver.install().use(arch)
    launch = next(made for made in _launches(everything=everything) if made.name == name)
    return _compile_launch(launch, arch)


def _compile_launch(launch: shipped.Launch, arch: str) -> list[Row]:
    target = Target(arch, PROCESSORS[arch])
    compiled: list[tuple[str, dict[str, str], int]] = []
    triton.knobs.compilation.listener = lambda **event: compiled.append(
        (event["src"].name, event["metadata_group"], event["metadata"]["shared"])
    )
    try:
        launch.start(target)
    except Exception as error:  # noqa: BLE001 - whatever the compiler says is the finding
        return [Row(launch.name, arch, None, (f"{type(error).__name__}: {error}"[:300],))]
    needs = launch.needs(target)
    rows = []
    for kernel, files, shared in compiled:
        needed = needs.get(kernel, set())
        code = machine_code.inspect(kernel, files, shared, reads_code=bool(needed))
        rows.append(Row(launch.name, arch, code, _faults(code, arch, needed)))
    return rows


def _faults(code: machine_code.MachineCode, arch: str, needs: set[str]) -> tuple[str, ...]:
    faults = []
    if code.num_spills:
        faults.append("spills")
    if code.shared_bytes > stub_driver.SHARED_MEMORY_LIMITS[arch]:
        faults.append("too much shared memory")
    for need in sorted(needs):
        names = INSTRUCTIONS[need][arch]
        if not any(code.instructions.get(instruction) for instruction in names):
            faults.append(f"no {' or '.join(names)}")
    return tuple(faults)


def _print_table(rows: list[Row]) -> None:
    line = "{:45} {:18} {:7} {:>5} {:>6} {:>7}  {:24} {}"
    print(line.format("launch", "kernel", "target", "regs", "spills", "shared", "instructions", ""))
    for row in rows:
        faults = ", ".join(row.faults)
        if row.code is None:
            print(line.format(row.launch, "", row.arch, "", "", "", "", faults))
            continue
        used = " ".join(f"{name}:{n}" for name, n in row.code.instructions.items() if n)
        print(
            line.format(
                row.launch,
                row.code.name,
                row.arch,
                row.code.num_registers,
                row.code.num_spills,
                row.code.shared_bytes,
                used,
                faults,
            ).rstrip()
        )


if __name__ == "__main__":
    sys.exit(main())
