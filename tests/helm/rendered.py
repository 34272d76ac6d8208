"""The services as the chart starts them, as processes on this machine.

Files, arguments, probes and the command of `helm test` are those of the rendered pods; only what a
cluster brings (mounts, names of hosts, port numbers) is replaced.
"""

import asyncio
import contextlib
import re
import sys
from pathlib import Path
from typing import Any

import trustme

from tests.headrace.status.servers import HOST, free_ports
from tests.helm.chart import Objects

ROOT = Path(__file__).parents[2]
# The Secrets of tests/helm/cases.py SUPPLIED, and the names that docs/kubernetes.md asks for.
_DOMAIN = "space.svc.cluster.local"
_NAMES = {
    "router": f"hr-headrace-router.{_DOMAIN}",
    "scheduler": f"*.hr-headrace-scheduler.{_DOMAIN}",
    "gpuworker": f"*.hr-headrace-gpuworker-default.{_DOMAIN}",
}
# In the order in which requests come.
PODS = {"router": "router", "scheduler": "scheduler", "gpuworker": "gpuworker-default"}
_PORTS = {"router": 8700, "scheduler": 8701, "gpuworker": 8702}


class Rendered:
    """Starts each service from its rendered pod."""

    def __init__(self, objects: Objects, folder: Path) -> None:
        self._objects = objects
        self._folder = folder
        self._ports = dict(zip(_PORTS.values(), free_ports(len(_PORTS)), strict=True))
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._write_secrets()

    def pod(self, service: str) -> dict[str, Any]:
        """The service's container."""
        return self._objects.pods()[f"hr-headrace-{PODS.get(service, service)}"]["containers"][0]

    async def start(self, service: str) -> None:
        """Starts the service with the arguments and the settings file of its pod."""
        pod = self._objects.one("ConfigMap", PODS[service])
        for name, text in pod["data"].items():
            (self._folder / name).write_text(self._here(text, service))
        arguments = [
            self._here(argument.replace("$(POD_NAME)", "hr-headrace-scheduler-0"), service)
            for argument in self.pod(service)["args"]
        ]
        self._processes[service] = await self._run("-m", service, *arguments)

    async def probe(self, service: str) -> bool:
        """What the readiness probe of the service says."""
        command = self.pod(service)["readinessProbe"]["exec"]["command"]
        process = await self._run(*(self._here(part, service) for part in command[1:]))
        return await process.wait() == 0

    async def helm_test(self) -> tuple[int, str]:
        """Exit code and output of the pod of `helm test`."""
        program, *arguments = self.pod("test")["command"]
        process = await self._run("-m", program, *(self._here(a, "router") for a in arguments))
        output, _ = await process.communicate()
        assert process.returncode is not None
        return process.returncode, output.decode()

    async def stop(self, service: str) -> int:
        """Ends the service as Kubernetes does; returns the exit code."""
        process = self._processes.pop(service)
        process.terminate()
        return await process.wait()

    async def close(self) -> None:
        """Kills what is left."""
        for process in self._processes.values():
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def _run(self, *arguments: str) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            sys.executable, *arguments, cwd=ROOT, stdout=asyncio.subprocess.PIPE
        )

    def _here(self, text: str, service: str) -> str:
        """The text with this machine's folders, hosts and ports."""
        text = re.sub(
            r"\b(?:0\.0\.0\.0|127\.0\.0\.1):(\d+)",
            lambda found: f"{HOST}:{self._ports[int(found[1])]}",
            text,
        )
        # Every pod but the first of its kind is missing.
        text = re.sub(r"[\w-]+-[1-9]\.[\w.-]+:\d+", "missing.invalid:1", text)
        text = re.sub(
            r"[\w.-]+\.svc\.cluster\.local:(\d+)",
            lambda found: f"localhost:{self._ports[int(found[1])]}",
            text,
        )
        for there, here in (
            ("/etc/headrace/config", self._folder),
            ("/etc/headrace/tokens", self._folder / "tokens"),
            ("/etc/headrace/tls", self._folder / service),
            ("/opt/headrace", ROOT / "helm" / "images"),
        ):
            text = text.replace(there, str(here))
        return text

    def _write_secrets(self) -> None:
        (self._folder / "tokens").mkdir()
        for key, token in self._objects.one("Secret", "tokens")["stringData"].items():
            (self._folder / "tokens" / key).write_text(token)
        authority = trustme.CA()
        for service, name in _NAMES.items():
            folder = self._folder / service
            folder.mkdir()
            pair = authority.issue_cert(name, "localhost")
            authority.cert_pem.write_to_path(folder / "ca.crt")
            pair.cert_chain_pems[0].write_to_path(folder / "tls.crt")
            pair.private_key_pem.write_to_path(folder / "tls.key")
