"""Builds the images as a person does, on a Debian that debootstrap makes: no registry is asked.

Images and layers stay in the cache of the models, so that a second run builds what has changed.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from headrace.service.model_files import cache_dir

ROOT = Path(__file__).parents[2]
RELEASE = "bookworm"
_BASE = f"localhost/headrace-test-base:{RELEASE}"
_CA_FILE = "/run/ca.pem"


class Builder:
    """buildah with a storage of its own."""

    def __init__(self) -> None:
        self._folder = cache_dir() / "images"
        self._storage = [
            *("--root", str(self._folder / "storage")),
            *("--runroot", str(self._folder / "run")),
            *("--storage-driver", os.environ.get("STORAGE_DRIVER", "overlay")),
        ]

    def build(self, service: str) -> str:
        """Build the image of a service; returns its name."""
        self._make_base()
        name = f"localhost/headrace-{service}:test"
        with tempfile.TemporaryDirectory() as folder:
            self._run(
                *("build", "--layers", "--isolation", "chroot", "--format", "docker"),
                *("--build-arg", f"BASE_IMAGE={_BASE}", "--build-arg", f"REVISION={revision()}"),
                *_package_index(Path(folder)),
                *("--file", f"helm/images/{service}.Containerfile", "--tag", name, "."),
            )
        return name

    def inspect(self, image: str) -> dict[str, Any]:
        """The image's configuration as Docker writes it."""
        found: dict[str, Any] = json.loads(self._run("inspect", "--type", "image", image))
        return found["Docker"]["config"]

    def size(self, image: str) -> str:
        """Size of all layers, uncompressed, for people."""
        return str(json.loads(self._run("images", "--json", image))[0]["size"])

    def mount(self, image: str) -> tuple[str, Path]:
        """A container of the image, to be removed, and the folder with its files."""
        container = self._run("from", "--pull-never", image).strip()
        return container, Path(self._run("mount", container).strip())

    def remove(self, container: str) -> None:
        """Remove a container of `mount`."""
        self._run("rm", container)

    def _make_base(self) -> None:
        if self._run("images", "--quiet", "--filter", f"reference={_BASE}").strip():
            return
        with tempfile.TemporaryDirectory() as folder:
            subprocess.run(
                ["debootstrap", "--variant=minbase", RELEASE, folder],
                check=True,
                stdout=subprocess.DEVNULL,
            )
            container = self._run("from", "scratch").strip()
            self._run("add", "--quiet", container, folder, "/")
        self._run("commit", "--quiet", "--rm", container, _BASE)

    def _run(self, *arguments: str) -> str:
        done = subprocess.run(
            ["buildah", *self._storage, *arguments],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            said = (done.stdout + done.stderr)[-4000:]
            raise RuntimeError(f"buildah {' '.join(arguments)} failed:\n{said}")
        return done.stdout


def revision() -> str:
    """The commit that is checked out."""
    done = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def _package_index(folder: Path) -> list[str]:
    """Flags that give pip in the build this machine's index and authorities, for the build only."""
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    ).stdout
    settings: dict[str, str] = {}
    for line in listed.splitlines():
        name, _, value = line.partition("=")
        settings[name.rpartition(".")[2]] = value.strip("'")
    lines, volumes = ["[global]"], list[Path]()
    for name in ("index-url", "extra-index-url", "find-links", "trusted-host", "timeout"):
        if name in settings:
            lines.append(f"{name} = {settings[name]}")
            paths = [Path(each.removeprefix("file://")) for each in settings[name].split()]
            # An index `simple` points to files beside it.
            volumes += [p.parent if p.name == "simple" else p for p in paths if p.is_dir()]
    if authorities := settings.get("cert"):
        lines.append(f"cert = {_CA_FILE}")
    (folder / "pip.conf").write_text("\n".join(lines) + "\n")
    flags = ["--volume", f"{folder}/pip.conf:/etc/pip.conf:ro"]
    flags += ["--volume", f"{authorities}:{_CA_FILE}:ro"] if authorities else []
    for path in dict.fromkeys(volumes):
        flags += ["--volume", f"{path}:{path}:ro"]
    return flags
