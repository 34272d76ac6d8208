"""The files that images are built from, as instructions."""

import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

IMAGES = Path(__file__).parents[2] / "helm" / "images"


def instructions(service: str) -> list[tuple[str, str]]:
    """Instruction and arguments, in order."""
    text = (IMAGES / f"{service}.Containerfile").read_text(encoding="utf-8")
    text = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", " ")
    lines = (line.split(maxsplit=1) for line in text.splitlines() if line.strip())
    return [(name, arguments) for name, arguments in lines]


def last_stage(service: str) -> list[tuple[str, str]]:
    """Those behind the last FROM, and it."""
    found = instructions(service)
    start = max(i for i, (name, _) in enumerate(found) if name == "FROM")
    return found[start:]


@dataclass(frozen=True, slots=True)
class ImageConfig:
    """How a container of an image starts."""

    entrypoint: list[str]
    arguments: list[str]
    env: dict[str, str]
    folder: str


def image_config(service: str) -> ImageConfig:
    """How a container of the service's image starts, without building the image."""
    stage = dict(last_stage(service))
    env = dict(each.split("=", 1) for each in shlex.split(stage["ENV"]))
    return ImageConfig(
        json.loads(stage["ENTRYPOINT"]), json.loads(stage["CMD"]), env, stage["WORKDIR"]
    )
