"""Containers by runc: process 1 of its own, a user without rights, a read-only root.

Processes are in the machine's network unless a container asks for its own, which has a loopback
interface only. Needs root; there is no daemon.
"""

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.service.children import tied_to_us

_POLL_S = 0.01
_START_TIMEOUT_S = 60.0


class RuntimeUnavailableError(Exception):
    """Containers cannot run here; the message says why."""


def need_programs(*programs: str) -> None:
    """Raises RuntimeUnavailableError where containers cannot be run, or a program is missing."""
    if os.name != "posix" or os.geteuid() != 0:
        raise RuntimeUnavailableError("containers need root")
    missing = [name for name in ("runc", *programs) if shutil.which(name) is None]
    if missing:
        raise RuntimeUnavailableError(f"not installed: {', '.join(missing)}")


@dataclass(frozen=True, slots=True)
class Mount:
    """A folder or file at a path of the container; an empty source is memory."""

    destination: str
    source: str = ""
    is_read_only: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerSpec:
    """What runs, and with which rights."""

    command: Sequence[str]
    root: Path
    env: Mapping[str, str] = field(default_factory=dict)
    folder: str = "/"
    mounts: Sequence[Mount] = ()
    hostname: str = "container"
    user: int = 65532
    group: int = 65532
    extra_groups: Sequence[int] = ()
    is_root_read_only: bool = True
    has_own_network: bool = False

    def bundle(self) -> dict[str, Any]:
        """The file config.json of the OCI runtime specification."""
        namespaces = ["mount", "pid", "ipc", "uts", *(["network"] if self.has_own_network else [])]
        return {
            "ociVersion": "1.0.0",
            "process": {
                "user": {
                    "uid": self.user,
                    "gid": self.group,
                    "additionalGids": list(self.extra_groups),
                },
                "args": list(self.command),
                "env": [f"{name}={value}" for name, value in self.env.items()],
                "cwd": self.folder,
                "capabilities": {},
                "noNewPrivileges": True,
            },
            "root": {"path": str(self.root), "readonly": self.is_root_read_only},
            "hostname": self.hostname,
            "mounts": [*_DEVICES, *(_oci_mount(mount) for mount in self.mounts)],
            "linux": {"namespaces": [{"type": name} for name in namespaces]},
        }


_DEVICES = [
    {"destination": "/proc", "type": "proc", "source": "proc"},
    {
        "destination": "/dev",
        "type": "tmpfs",
        "source": "tmpfs",
        "options": ["nosuid", "strictatime", "mode=755", "size=65536k"],
    },
    {
        "destination": "/sys",
        "type": "sysfs",
        "source": "sysfs",
        "options": ["nosuid", "noexec", "nodev", "ro"],
    },
]


def _oci_mount(mount: Mount) -> dict[str, Any]:
    if not mount.source:
        options = ["nosuid", "nodev", "mode=1777"]
        return {
            "destination": mount.destination,
            "type": "tmpfs",
            "source": "tmpfs",
            "options": options,
        }
    return {
        "destination": mount.destination,
        "type": "bind",
        "source": mount.source,
        "options": ["rbind", "ro" if mount.is_read_only else "rw"],
    }


class Container:
    """One container; what its processes print goes to `log`."""

    def __init__(self, name: str, spec: ContainerSpec, folder: Path) -> None:
        """name: unique on this machine. folder: for its files; is made."""
        self.name = name
        self.log = folder / "log"
        self._spec = spec
        self._folder = folder
        self._state = folder / "runc"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start process 1; returns once it runs, or has ended already."""
        self._state.mkdir(parents=True, exist_ok=True)
        (self._folder / "config.json").write_text(json.dumps(self._spec.bundle()))
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                tied_to_us([*self._runc(), "run", "--bundle", str(self._folder), self.name]),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        deadline = time.monotonic() + _START_TIMEOUT_S
        while self.exit_code is None and self._status() != "running":
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.name} has not started: {self.output()}")
            time.sleep(_POLL_S)

    @property
    def exit_code(self) -> int | None:
        """Exit code of process 1, 128 + signal where a signal ended it; None while it runs."""
        return None if self._process is None else self._process.poll()

    def wait(self, timeout_s: float) -> int:
        """The exit code; subprocess.TimeoutExpired if there is none by then."""
        assert self._process is not None, "not started"
        return self._process.wait(timeout_s)

    def signal(self, number: signal.Signals) -> None:
        """Send process 1 a signal."""
        self._call("kill", self.name, str(int(number)))

    def run(self, command: Sequence[str], timeout_s: float) -> tuple[int, str]:
        """Exit code and output of a command in the container; 124 if it takes too long."""
        process = subprocess.Popen(
            [*self._runc(), "exec", self.name, *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        try:
            output, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
            return 124, output.decode(errors="replace")
        return process.returncode, output.decode(errors="replace")

    def output(self) -> str:
        """What process 1 and its children have printed."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def close(self) -> None:
        """End what is left of the container."""
        self._call("delete", "--force", self.name)
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _runc(self) -> list[str]:
        return ["runc", "--root", str(self._state)]

    def _status(self) -> str:
        done = self._call("state", self.name)
        return str(json.loads(done.stdout)["status"]) if done.returncode == 0 else ""

    def _call(self, *arguments: str) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            [*self._runc(), *arguments], capture_output=True, check=False, timeout=30
        )
