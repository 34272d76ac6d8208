"""Compiles paged.cpp for this machine, once, and loads the library.

The library uses all instruction sets of this processor and may not run on another. Its name in the
cache is therefore a digest of the source, the compiler and the processor.
"""

import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

from headrace.service.model_files import cache_dir
from headrace.service.progress import say

logger = logging.getLogger(__name__)

_SOURCE = Path(__file__).with_name("paged.cpp")
_FLAGS = (
    "-O3",
    "-march=native",
    "-std=c++17",
    "-fno-math-errno",
    "-ffp-contract=fast",
    "-shared",
    "-fPIC",
)
COMPILERS = ("c++", "g++", "clang++")
_COMPILE_TIMEOUT_S = 120.0


class NativeUnavailableError(Exception):
    """No compiler is installed, or the library cannot be built; the message says why."""


def load_library() -> ctypes.CDLL:
    """Loads the library; compiles it first unless the cache has it.

    Raises:
        NativeUnavailableError: the library cannot be built or loaded on this machine.
    """
    named = os.environ.get("CXX") or next(filter(shutil.which, COMPILERS), "")
    compiler = shlex.split(named)
    if not compiler:
        raise NativeUnavailableError("no C++ compiler on PATH")
    try:
        folder = cache_dir() / "kernels"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        library = folder / f"paged-{_digest(compiler)}.so"
        if not library.exists():
            _build(compiler, library)
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise NativeUnavailableError(str(error)) from error


def _digest(compiler: list[str]) -> str:
    """Digest of everything that the library depends on."""
    version = _run([*compiler, "--version"]).stdout
    command = shlex.join([*compiler, *_FLAGS])
    parts = (_SOURCE.read_text(encoding="utf-8"), command, version, _processor())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]


def _processor() -> str:
    """The processor's model and instruction sets."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))


def _build(compiler: list[str], library: Path) -> None:
    """Compiles in a temporary folder, then renames: no process loads a half-written library."""
    say("compiling the attention kernel, once for this processor")
    started = time.monotonic()
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        draft = Path(folder) / library.name
        base = [*compiler, *_FLAGS, str(_SOURCE), "-o", str(draft)]
        # Without OpenMP (Apple's clang) the library runs on one thread.
        done = _run([*base, "-fopenmp"])
        if done.returncode:
            done = _run(base)
        if done.returncode:
            raise NativeUnavailableError(f"{compiler[0]} failed: {done.stderr.strip()[-500:]}")
        draft.replace(library)
    logger.info("compiled the CPU attention kernel in %.1f s", time.monotonic() - started)


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=_COMPILE_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise NativeUnavailableError(f"{command[0]} took too long") from None
