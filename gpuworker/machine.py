"""The machine's cores and GPU driver, and settings of the libraries below torch."""

import ctypes
import os
import re
import sys
from pathlib import Path

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3


def num_compute_threads() -> int:
    """Physical cores this process may use, within its control group's quota; at least 1.

    Two threads of a core share its vector units, so more threads than cores only add waiting.
    """
    if sys.platform != "linux":
        return max((os.cpu_count() or 2) // 2, 1)
    allowed = os.sched_getaffinity(0)
    cores = {_siblings(cpu) for cpu in allowed}
    return max(min(len(cores), _quota_cpus()), 1)


def prepare_libraries() -> None:
    """Sets what the libraries below torch read from the environment; before torch computes.

    Threads that spin while they wait for each other are fastest on an idle machine. On a busy
    machine the awaited thread may not be running; steps 9 times slower were measured.

    MKL chooses its kernel by the size of a product, and kernels add in different orders, so that
    the bits of a row depend on the number of rows. This was measured on an Intel processor limited
    to AVX2, and not on an AMD processor. MKL's strict mode makes the order fixed. On processors of
    other makers the strict mode may fall back to SSE2, so the mode stays off there.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if "GenuineIntel" in _vendor():
        os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")


def keep_freed_memory() -> None:
    """Has glibc reuse large freed buffers instead of giving them back to the kernel.

    Every step allocates activations of megabytes; fresh pages for each would cost more than the
    arithmetic on them. Elsewhere than on glibc this does nothing.
    """
    if sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 1 << 30)
        mallopt(_M_TRIM_THRESHOLD, 1 << 30)


def give_back_freed_memory() -> None:
    """Has glibc give back to the kernel what is free now; elsewhere this does nothing.

    Loading a model frees buffers as large as its largest tensor, which no step needs again.
    """
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):
        trim(0)


def driver_version(
    nvidia: Path = Path("/proc/driver/nvidia/version"),
    amd: Path = Path("/sys/module/amdgpu/version"),
) -> str:
    """The version of the GPU driver that is loaded here; "" where the kernel does not tell."""
    try:
        # The first number of several parts in a line like
        # NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Thu Jul 17 ... 2025
        found = re.search(r"\b\d+(\.\d+)+\b", nvidia.read_text(encoding="utf-8"))
        return found[0] if found else ""
    except OSError:
        pass
    try:
        return amd.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def gpu_driver(devices: Path = Path("/dev")) -> str | None:
    """The device file of a GPU driver that is loaded here, NVIDIA's or AMD's; None without one."""
    found = (devices / name for name in ("nvidiactl", "kfd"))
    return next((str(file) for file in found if file.exists()), None)


def _vendor() -> str:
    """The line of /proc/cpuinfo that names the processor's maker; empty if there is none."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith("vendor_id")), "")


def _siblings(cpu: int) -> str:
    """The hardware threads of a CPU's core; the CPU itself if the kernel does not list them."""
    file = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    try:
        return file.read_text(encoding="ascii")
    except OSError:
        return str(cpu)


def _quota_cpus() -> int:
    """CPUs that the control group grants, rounded up."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return sys.maxsize
    return sys.maxsize if quota == "max" else -(-int(quota) // int(period))
