"""Each image is built, holds what it must and nothing else, and starts, answers and stops."""

import email.parser
import re
import signal
import subprocess
import time

import pytest

from headrace.service.model_files import cache_dir, resolve
from tests.chaos import stub_model
from tests.containers.runtime import Container, ContainerSpec, Mount
from tests.images.builder import ROOT, revision

pytestmark = [pytest.mark.slow, pytest.mark.system, pytest.mark.timeout(1200)]

PORTS = {"router": 8700, "scheduler": 8701, "gpuworker": 8702}
# What would let somebody who got in build or fetch more.
TOOLS = {"gcc", "cc", "c++", "g++", "ld", "make", "pip", "pip3", "curl", "wget", "git", "buildah"}
COMPILER = {"gcc", "c++", "g++", "ld", "cc"}  # Triton needs one where it runs
SECRET = re.compile(r"\.(pem|key|p12|netrc)$|^(\.git|\.netrc|\.env|pip\.conf|id_rsa|\.cache)$")


@pytest.fixture(scope="module")
def image(builder, service, pytestconfig):
    """The image of the service, built from this folder."""
    start = time.monotonic()
    name = builder.build(service)
    took_s = time.monotonic() - start
    with pytestconfig.pluginmanager.get_plugin("capturemanager").global_and_fixture_disabled():
        print(f"\n{service}: {builder.size(name)}, built in {took_s:.0f} s", flush=True)
    return name


@pytest.fixture(scope="module")
def config(builder, image):
    return builder.inspect(image)


@pytest.fixture(scope="module")
def root(builder, image):
    """The folder with the image's files."""
    container, folder = builder.mount(image)
    yield folder
    builder.remove(container)


def test_an_image_says_which_version_it_is_and_who_runs(service, config):
    labels = config["Labels"]
    assert labels["org.opencontainers.image.title"] == f"headrace-{service}"
    assert labels["org.opencontainers.image.revision"] == revision()
    assert f'version = "{labels["org.opencontainers.image.version"]}"' in (
        ROOT / "pyproject.toml"
    ).read_text(encoding="utf-8")
    assert config["User"] == "65532:65532"
    assert config["StopSignal"] == "SIGTERM"
    assert set(config["ExposedPorts"]) == {f"{PORTS[service]}/tcp"}


def test_an_image_has_no_build_tools_and_no_secrets(service, root, config):
    programs = {file.name for folder in _bin_folders(root) for file in folder.iterdir()}
    assert {"python3", "tini"} <= programs
    assert programs & TOOLS == (COMPILER if service == "gpuworker" else set())
    assert not list((root / "opt/headrace/venv/lib/python3.11/site-packages").glob("pip*"))
    assert not list((root / "var/lib/apt/lists").glob("*_*"))
    # Certificates of public authorities, and the empty files where the test's build mounts pip's.
    public = re.compile(
        r"^(usr/share/ca-certificates/|etc/ssl/certs/|usr/lib/ssl/).*|.*/(cacert|roots)\.pem$"
    )
    found = [
        file.relative_to(root).as_posix()
        for file in root.rglob("*")
        if SECRET.search(file.name) and (file.is_dir() or file.lstat().st_size)
    ]
    assert [name for name in found if not public.match(name)] == []
    assert not any(
        re.search("token|password|secret", each, re.IGNORECASE) for each in config["Env"]
    )


def _bin_folders(root):
    names = ("usr/bin", "usr/sbin", "usr/local/bin", "opt/headrace/venv/bin")
    return [root / name for name in names if (root / name).is_dir()]


def test_every_package_of_an_image_has_the_locked_version(service, root):
    lock = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    locked = dict(line.split("==") for line in lock.lower().splitlines() if "==" in line)
    found = {}
    for file in (root / "opt/headrace/venv/lib/python3.11/site-packages").glob("*.dist-info"):
        metadata = email.parser.HeaderParser().parsestr((file / "METADATA").read_text())
        name = re.sub(r"[-_.]+", "-", metadata["Name"].lower())
        found[name] = metadata["Version"].partition("+")[0]
    assert found.pop("headrace")
    locked = {re.sub(r"[-_.]+", "-", name): version for name, version in locked.items()}
    strange = {name: version for name, version in found.items() if locked.get(name) != version}
    # torch for GPUs brings NVIDIA's libraries, whose versions torch itself pins.
    assert [name for name in strange if not name.startswith(("nvidia-", "cuda-"))] == []
    assert ("torch" in found) == (service == "gpuworker")
    assert ("tokenizers" in found) == (service == "router")


def _arguments(service):
    listen = ["--listen", f"0.0.0.0:{PORTS[service]}"]
    if service == "router":
        return [*listen, "--scheduler", "127.0.0.1:1", "--model", "/model"]
    if service == "scheduler":
        return [*listen, "--worker", "127.0.0.1:1"]
    return [*listen, "--model", "smollm2-135m-instruct", "--num-kv-blocks", "64"]


@pytest.fixture
def started(service, root, config, tmp_path):
    """The service as process 1 of a container of the image, with nothing but memory to write to."""
    stub_model.write_model(tmp_path / "model")
    mounts = [Mount("/tmp"), Mount("/model", str(tmp_path / "model"), is_read_only=True)]
    env = dict(each.split("=", 1) for each in config["Env"])
    if service == "gpuworker":
        resolve("smollm2-135m-instruct")
        mounts += [Mount("/var/cache/headrace", str(cache_dir()), is_read_only=True)]
        env |= {"HEADRACE_CACHE": "/var/cache/headrace"}
    spec = ContainerSpec(
        command=[*config["Entrypoint"], *_arguments(service)],
        root=root,
        env=env,
        folder=config["WorkingDir"],
        mounts=mounts,
        has_own_network=True,
    )
    container = Container(f"headrace-image-{service}", spec, tmp_path / "container")
    container.start()
    yield container
    container.close()


def test_an_image_serves_as_nobody_on_a_read_only_root_and_stops_on_sigterm(config, started):
    check = config["Healthcheck"]["Test"][1:]
    deadline = time.monotonic() + 300
    while (answer := started.run(check, 30))[0]:
        assert started.exit_code is None, started.output()
        assert time.monotonic() < deadline, answer
    status = started.run(["cat", "/proc/1/status"], 30)[1]
    assert re.search(r"^Uid:\s+65532\s+65532\s", status, re.MULTILINE)
    assert re.search(r"^CapEff:\s+0+$", status, re.MULTILINE)
    assert "Read-only" in started.run(["touch", "/opt/headrace/x"], 30)[1]
    started.signal(signal.SIGTERM)
    try:
        assert started.wait(60) == 0, started.output()
    except subprocess.TimeoutExpired:
        pytest.fail(f"it does not stop: {started.output()}")
    assert "Traceback" not in started.output()
