"""Images without building them: a container has this machine's files below, and our code on top.

Entrypoint, environment and folder are those of the Containerfile. What differs is said here: the
virtual environment is the one that runs the tests, the code this checkout, and Valkey the wheel's.
"""

import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from headrace.status.embedded import find_server
from tests.containers.runtime import Mount
from tests.images.containerfile import IMAGES, ImageConfig, image_config

ROOT = Path(__file__).parents[2]
_SOURCE = "/opt/headrace/src"
_BIN = "/opt/headrace/bin"
# A stand-in for a program of an image; $POD_IP is set by the kubelet.
_PROGRAMS = {
    "headrace": 'exec python -m headrace "$@"',
    # The wheel's Valkey has no TLS.
    "valkey-server": (
        'if grep -q ^tls- "$1"; then\n'
        '    exec /opt/headrace/venv/bin/python -m tests.cluster.tls_valkey {valkey} "$1"\n'
        "fi\n"
        'exec {valkey} "$@" --bind "$POD_IP"'
    ),
    # Where it is not installed. Process 1 gets no signal that it does not handle, so the service,
    # which handles none until it has started, must be another.
    "tini": (
        'shift\n"$@" &\nchild=$!\n'
        "trap 'kill -TERM $child' TERM\n"
        "while kill -0 $child 2>/dev/null; do wait $child; code=$?; done\n"
        "exit $code"
    ),
}


class Images:
    """Finds the image of a container by the last part of its name."""

    def __init__(self, folder: Path, replaced: Mapping[str, Sequence[str]]) -> None:
        """replaced: other entrypoints, by service."""
        self._replaced = replaced
        self._bin = folder / "bin"
        self._bin.mkdir(parents=True)
        for name, line in _PROGRAMS.items():
            if name == "tini" and shutil.which(name):
                continue
            file = self._bin / name
            file.write_text(f"#!/bin/sh\n{line.format(valkey=find_server())}\n")
            file.chmod(0o755)

    def find(self, name: str) -> ImageConfig:
        """How a container of this image starts."""
        service = name.rpartition("/")[2].partition(":")[0].partition("@")[0]
        if service == "valkey":
            return ImageConfig([], [], self._env({"PATH": "/usr/bin:/bin"}), "/")
        service = service.removeprefix("headrace-")
        config = image_config(service)
        config = replace(config, env=self._env(config.env))
        if service in self._replaced:
            return replace(config, entrypoint=list(self._replaced[service]))
        return config

    def mounts(self) -> list[Mount]:
        """The code, as it is in every image."""
        return [
            Mount("/opt/headrace/venv", sys.prefix, is_read_only=True),
            Mount("/opt/headrace/health.py", str(IMAGES / "health.py"), is_read_only=True),
            Mount(_SOURCE, str(ROOT), is_read_only=True),
            Mount(_BIN, str(self._bin), is_read_only=True),
        ]

    def _env(self, env: Mapping[str, str]) -> dict[str, str]:
        return {**env, "PATH": f"{_BIN}:{env['PATH']}", "PYTHONPATH": _SOURCE}


def parse_replaced(text: str) -> dict[str, Sequence[str]]:
    """`replaced` from the command line, as JSON."""
    found: dict[str, Sequence[str]] = json.loads(text)
    return found
