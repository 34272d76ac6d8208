"""The images' files, read as text, and the health check that they hold, run against a real port."""

import asyncio
import re
import subprocess
import sys
from pathlib import Path

import pytest
import trustme

from headrace.service.serving import GrpcServer, ServingConfig

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "helm" / "images"
PORTS = {"router": 8700, "scheduler": 8701, "gpuworker": 8702}


def instructions(service):
    """Instruction and arguments, in order; of the last stage those behind the last FROM."""
    text = (IMAGES / f"{service}.Containerfile").read_text(encoding="utf-8")
    text = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", " ")
    return [tuple(line.split(maxsplit=1)) for line in text.splitlines() if line.strip()]


def last_stage(service):
    found = instructions(service)
    start = max(i for i, (name, _) in enumerate(found) if name == "FROM")
    return found[start:]


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
    assert all(arguments.startswith("${BASE_IMAGE}") for name, arguments in found if name == "FROM")
    packages = " ".join(arguments for name, arguments in last_stage(service) if name == "RUN")
    assert ("g++" in packages) == (service == "gpuworker")
    assert "--no-install-recommends" in packages
    assert "rm -rf /var/lib/apt/lists/*" in packages


@pytest.mark.parametrize("service", PORTS)
def test_every_version_is_locked_and_torch_is_in_the_workers_image_only(service):
    installs = [a for name, a in instructions(service) if name == "RUN" and "pip install" in a]
    assert installs
    assert ("ENV", "PIP_CONSTRAINT=/src/requirements.lock") in instructions(service)
    assert any("torch" in each for each in installs) == (service == "gpuworker")
    extras = {"router": '".[router]"', "scheduler": '"."', "gpuworker": '".[gpuworker]"'}
    assert installs[-1].endswith(extras[service])


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
