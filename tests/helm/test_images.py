"""The images' files, read as text, and the health check that they hold, run against a real port."""

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest
import trustme

from headrace.service.serving import GrpcServer, ServingConfig
from tests.images.containerfile import IMAGES, instructions, last_stage

ROOT = Path(__file__).parents[2]
PORTS = {"router": 8700, "scheduler": 8701, "gpuworker": 8702}


@pytest.mark.parametrize("service", PORTS)
def test_an_image_starts_its_service_as_nobody(service):
    stage = dict(last_stage(service))
    assert stage["USER"] == "65532:65532"
    assert stage["ENTRYPOINT"] == f'["tini", "--", "python", "-m", "{service}"]'
    assert stage["CMD"] == f'["--listen", "0.0.0.0:{PORTS[service]}"]'
    assert stage["EXPOSE"] == str(PORTS[service])
    assert f"127.0.0.1:{PORTS[service]}" in stage["HEALTHCHECK"]
    assert stage["STOPSIGNAL"] == "SIGTERM"


@pytest.mark.parametrize("service", PORTS)
def test_an_image_can_be_built_on_another_base_and_has_no_compiler_it_does_not_need(service):
    found = instructions(service)
    assert found[0][0] == "ARG"
    assert found[0][1].startswith("BASE_IMAGE=")
    assert not found[0][1].endswith(":latest")
    stages = [arguments for name, arguments in found if name == "FROM"]
    assert stages == ["${BASE_IMAGE} AS base", "base AS build", "base"]
    packages = " ".join(arguments for name, arguments in found if name == "RUN")
    assert ("g++" in packages) == (service == "gpuworker")
    assert "--no-install-recommends" in packages
    assert "rm -rf /var/lib/apt/lists/*" in packages


@pytest.mark.parametrize("service", PORTS)
def test_every_version_is_locked_and_torch_is_in_the_workers_image_only(service):
    found = instructions(service)
    installs = [a for name, a in found if name == "RUN" and "pip install" in a]
    assert any(a.startswith("PIP_CONSTRAINT=/src/requirements.lock ") for _, a in found)
    assert any("torch" in each for each in installs) == (service == "gpuworker")
    extras = {
        "router": '".[router,kubernetes]"',
        "scheduler": '".[kubernetes]"',
        "gpuworker": '".[gpuworker]"',
    }
    assert installs[-2].endswith(extras[service])


@pytest.mark.parametrize("service", PORTS)
def test_a_change_of_the_code_leaves_the_layer_of_the_dependencies_as_it_is(service):
    found = instructions(service)
    code = found.index(("COPY", "headrace ./headrace"))
    (after,) = [a for name, a in found[code:] if name == "RUN" and "pip" in a]
    assert after == "/opt/pip/bin/pip install --no-deps --force-reinstall ."


def test_images_share_their_first_layers():
    stages = [instructions(service) for service in PORTS]
    ends = [stage.index(("FROM", "base AS build")) for stage in stages]
    assert len({tuple(stage[:end]) for stage, end in zip(stages, ends, strict=True)}) == 1


def test_a_build_is_given_what_the_images_copy_and_nothing_else():
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    admitted = {line[1:] for line in lines if line.startswith("!")}
    copied = set()
    for service in PORTS:
        for name, arguments in instructions(service):
            if name == "COPY" and not arguments.startswith("--from"):
                copied |= set(arguments.split()[:-1])
    assert lines[1] == "*"
    assert admitted == copied


@pytest.mark.parametrize("service", PORTS)
def test_what_an_image_copies_is_there(service):
    for name, arguments in instructions(service):
        if name == "COPY" and not arguments.startswith("--from"):
            *sources, _ = arguments.split()
            assert all((ROOT / source).exists() for source in sources), arguments


@pytest.mark.parametrize("service", PORTS)
def test_an_image_says_what_it_is(service):
    labels = " ".join(arguments for name, arguments in last_stage(service) if name == "LABEL")
    for label in ("title", "description", "version", "licenses"):
        assert f"org.opencontainers.image.{label}=" in labels


def health(*arguments):
    command = [sys.executable, str(IMAGES / "health.py"), *arguments]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


async def ended(process):
    """The exit code and what was printed; the server goes on meanwhile."""
    _, errors = await asyncio.to_thread(process.communicate)
    return process.returncode, errors


async def test_the_health_check_tells_serving_from_not_serving():
    server = GrpcServer(ServingConfig(), [])
    address = await server.start()
    code, errors = await ended(health(address))
    assert (code, errors.strip()) == (1, f"{address} is not serving")
    server.set_serving(True)
    assert await ended(health(address)) == (0, "")
    await server.stop(0)
    code, errors = await ended(health(address, "--timeout-s", "0.2"))
    assert code == 1
    assert address in errors


async def test_the_health_check_speaks_tls_and_shows_a_certificate(tmp_path):
    authority = trustme.CA()
    pair = authority.issue_cert("*.workers.space.svc")
    authority.cert_pem.write_to_path(tmp_path / "ca.crt")
    pair.cert_chain_pems[0].write_to_path(tmp_path / "tls.crt")
    pair.private_key_pem.write_to_path(tmp_path / "tls.key")
    server = GrpcServer(
        ServingConfig(
            tls_cert_file=str(tmp_path / "tls.crt"),
            tls_key_file=str(tmp_path / "tls.key"),
            tls_client_ca_file=str(tmp_path / "ca.crt"),
        ),
        [],
    )
    address = await server.start()
    server.set_serving(True)
    tls = f"--tls-dir={tmp_path}"
    assert await ended(health(address, tls, "--server-name=w-0.workers.space.svc")) == (0, "")
    wrong = health(address, tls, "--server-name=other.space.svc", "--timeout-s=1")
    assert (await ended(wrong))[0] == 1
    await server.stop(0)
