"""What the assemblers made of a kernel: registers, spills, shared memory, instructions."""

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton

_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
_AMD_MATRIX = re.compile(r"\bv_mfma_")
_NVIDIA_INSTRUCTIONS = {
    "HMMA": re.compile(r"\bHMMA\."),
    "HGMMA": re.compile(r"\bHGMMA\."),
    "UTCMMA": re.compile(r"\bUTC\w*MMA\b"),
    "TMA": re.compile(r"\bUTMALDG\b"),
    "LDGSTS": re.compile(r"\bLDGSTS\b"),
}
_LOCAL_MEMORY = re.compile(r"\b(?:LDL|STL)\b")


@dataclass(frozen=True, slots=True)
class MachineCode:
    """One compiled kernel. num_spills: loads and stores of spilled registers."""

    name: str
    num_registers: int
    num_spills: int
    shared_bytes: int
    instructions: dict[str, int]


def inspect(
    name: str, files: dict[str, str], shared_bytes: int, *, reads_code: bool
) -> MachineCode:
    """Reads a kernel's files as Triton's compiler lists them, by file name.

    reads_code: instructions are wanted; where not, they are only read when something spilled.
    """
    by_suffix = {Path(path).suffix: Path(path) for path in files.values()}
    if ".cubin" in by_suffix:
        return _nvidia(name, by_suffix[".cubin"], shared_bytes, reads_code=reads_code)
    return _amd(name, by_suffix[".amdgcn"].read_text(), shared_bytes)


def _nvidia(name: str, cubin: Path, shared_bytes: int, *, reads_code: bool) -> MachineCode:
    usage = _run("cuobjdump", "--dump-resource-usage", str(cubin))
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found is not None, f"no resource usage of {name}: {usage}"
    registers, stack = int(found[1]), int(found[2])
    # Spilled registers live on the stack, and nothing else of ours does.
    if not reads_code and not stack:
        return MachineCode(name, registers, 0, shared_bytes, {})
    code = _run("nvdisasm", "-c", "-ndf", str(cubin))
    counts = {key: len(pattern.findall(code)) for key, pattern in _NVIDIA_INSTRUCTIONS.items()}
    return MachineCode(name, registers, len(_LOCAL_MEMORY.findall(code)), shared_bytes, counts)


def _amd(name: str, assembly: str, shared_bytes: int) -> MachineCode:
    def field(key: str) -> int:
        found: Any = re.search(rf"\.{key}:\s+(\d+)", assembly)
        assert found is not None, f"no .{key} of {name}"
        return int(found[1])

    return MachineCode(
        name,
        field("vgpr_count"),
        field("vgpr_spill_count"),
        shared_bytes,
        {"MFMA": len(_AMD_MATRIX.findall(assembly))},
    )


def _run(tool: str, *arguments: str) -> str:
    done = subprocess.run(
        [str(_TOOLS / tool), *arguments], check=True, capture_output=True, text=True
    )
    return done.stdout
