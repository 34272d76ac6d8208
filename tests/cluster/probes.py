"""Probes of the kubelet: when they are due, and what they say."""

import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

import grpc
import urllib3

from tests.cluster.api import Object
from tests.containers.runtime import Container

_SERVING = b"\x08\x01"
# Each exec probe starts a Python. While it says that all is well, it is asked less often than
# wanted, or the probes of a whole cluster would leave its services no processor.
_WELL_FACTOR = 5
# Certificates are not checked, as by the kubelet.
urllib3.disable_warnings(urllib3.exceptions.InsecureRequestWarning)
_POOL = urllib3.PoolManager(cert_reqs="CERT_NONE", retries=False)


@dataclass(slots=True)
class Probe:
    """One probe of one container."""

    wanted: Object
    started_s: float
    asked_s: float = 0.0
    num_failures: int = 0
    num_successes: int = 0
    has_succeeded: bool = False
    is_succeeding: bool = False
    has_failed: bool = False
    said: str = ""

    def is_due(self) -> bool:
        """Whether it is time to ask."""
        now_s = time.monotonic()
        if now_s < self.started_s + self.wanted.get("initialDelaySeconds", 0):
            return False
        factor = _WELL_FACTOR if self.is_succeeding and not self.num_failures else 1
        return now_s >= self.asked_s + factor * self.wanted.get("periodSeconds", 10)

    def take(self, answer: str) -> None:
        """Count an answer; an empty one is a success."""
        self.asked_s, self.said = time.monotonic(), answer
        if answer:
            self.num_failures, self.num_successes = self.num_failures + 1, 0
        else:
            self.num_failures, self.num_successes = 0, self.num_successes + 1
        if self.num_successes >= self.wanted.get("successThreshold", 1):
            self.has_succeeded = self.is_succeeding = True
        if self.num_failures >= self.wanted.get("failureThreshold", 3):
            self.has_failed, self.is_succeeding = True, False


def ask(
    wanted: Object, container: Container, ip: str, spec: Object, here: Callable[[str], str]
) -> str:
    """What is wrong, or nothing."""
    timeout_s = float(wanted.get("timeoutSeconds", 1))
    if "exec" in wanted:
        code, said = container.run([here(part) for part in wanted["exec"]["command"]], timeout_s)
        return said or f"exit code {code}" if code else ""
    if "tcpSocket" in wanted:
        port = _port(wanted["tcpSocket"]["port"], spec)
        try:
            socket.create_connection((ip, port), timeout_s).close()
        except OSError as error:
            return str(error)
        return ""
    if "grpc" in wanted:
        with grpc.insecure_channel(f"{ip}:{wanted['grpc']['port']}") as channel:
            try:
                answer = channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=timeout_s)
            except grpc.RpcError as error:
                return str(error)
        return "" if answer == _SERVING else "not serving"
    if "httpGet" in wanted:
        return _http(wanted["httpGet"], ip, spec, timeout_s)
    raise NotImplementedError(f"probe {wanted}")


def _http(wanted: Object, ip: str, spec: Object, timeout_s: float) -> str:
    scheme = wanted.get("scheme", "HTTP").lower()
    url = f"{scheme}://{ip}:{_port(wanted['port'], spec)}{wanted.get('path', '/')}"
    try:
        answer = _POOL.request("GET", url, timeout=timeout_s)
    except urllib3.exceptions.HTTPError as error:
        return str(error)
    return "" if answer.status < 400 else f"{answer.status}: {answer.data[:200]!r}"


def _port(port: int | str, spec: Object) -> int:
    if isinstance(port, int):
        return port
    return next(int(each["containerPort"]) for each in spec["ports"] if each["name"] == port)
