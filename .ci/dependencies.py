"""Checks requirements.lock offline: every dependency is in it, once, in an exact version that fits.

Known vulnerabilities are looked for by `make audit`, which needs the internet.
"""

import re
import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
# Extras that the lock does not have: large, and for machines with a GPU of NVIDIA.
_LEFT_OUT = {"flashinfer"}
_PIN = re.compile(r"([A-Za-z0-9._-]+)==([A-Za-z0-9._+!-]+)")


def pins(lock: str) -> Iterator[tuple[str, str] | str]:
    """Name and version of each line, or what is wrong with it."""
    for line in lock.splitlines():
        if not line or line.startswith("#"):
            continue
        found = _PIN.fullmatch(line)
        yield (canonicalize_name(found[1]), found[2]) if found else f"not NAME==VERSION: {line!r}"


def wanted(project: str) -> list[Requirement]:
    """What pyproject.toml asks for, with build tools and the extras that `make setup` installs."""
    document = tomllib.loads(project)
    extras = document["project"]["optional-dependencies"]
    groups = [document["build-system"]["requires"], document["project"]["dependencies"]]
    groups += [group for name, group in extras.items() if name not in _LEFT_OUT]
    found = [Requirement(text) for group in groups for text in group]
    return [requirement for requirement in found if requirement.name != "headrace"]


def complaints(lock: str, project: str) -> list[str]:
    """What is wrong; the dependencies of dependencies are those of the installed versions."""
    found = list(pins(lock))
    wrong = [entry for entry in found if isinstance(entry, str)]
    names = [entry[0] for entry in found if not isinstance(entry, str)]
    wrong += [f"twice: {name}" for name in sorted({n for n in names if names.count(n) > 1})]
    versions = dict(entry for entry in found if not isinstance(entry, str))
    needed: set[str] = set()
    waiting = [(requirement, "pyproject.toml") for requirement in wanted(project)]
    while waiting:
        requirement, source = waiting.pop()
        name = canonicalize_name(requirement.name)
        if requirement.marker is not None and not any(
            requirement.marker.evaluate({"extra": extra}) for extra in ("", *requirement.extras)
        ):
            continue
        if name not in versions:
            wrong.append(f"missing: {requirement.name}, which {source} needs")
            continue
        version = versions[name]
        if not requirement.specifier.contains(version, prereleases=True):
            wrong.append(f"{name}=={version}: {source} needs {requirement.specifier}")
        if name in needed and not requirement.extras:
            continue
        needed.add(name)
        waiting += _dependencies(name, requirement.extras)
    return sorted(set(wrong))


def _dependencies(name: str, extras: set[str]) -> Iterator[tuple[Requirement, str]]:
    """What the installed distribution needs, for the extras that are asked for."""
    try:
        texts = metadata.requires(name) or []
    except metadata.PackageNotFoundError:
        return  # of another platform
    for text in texts:
        requirement = Requirement(text)
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            requirement.marker = None
            yield requirement, name


def main() -> None:
    lock = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    if wrong := complaints(lock, project):
        print("requirements.lock; `make lock` writes what is installed:", *wrong, sep="\n  ")
        sys.exit(1)


if __name__ == "__main__":
    main()
