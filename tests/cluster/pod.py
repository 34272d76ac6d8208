"""One pod: containers, probes, restarts, the way out; and the status that the API server gets."""

import contextlib
import datetime as dt
import logging
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.cluster.api import MERGE, Api, ApiError, Object
from tests.cluster.images import Images
from tests.cluster.network import DOMAIN, Network
from tests.cluster.probes import Probe, ask
from tests.cluster.volumes import PodFiles, expanded
from tests.containers.runtime import Container, ContainerSpec, Mount

logger = logging.getLogger("kubelet")
_TICK_S = 0.05
_RESTART_AFTER_S = 1.0  # the kubelet's first backoff is ten


@dataclass(frozen=True, slots=True)
class Machine:
    """What all pods share."""

    api: Api
    images: Images
    network: Network
    root: Path  # files below every container


@dataclass(slots=True)
class Running:
    """One container of the pod, through all its restarts."""

    wanted: Object
    container: Container | None = None
    num_starts: int = 0
    started_at: str = ""
    finished_at: str = ""
    ended_s: float = 0.0
    last: Object | None = None
    probes: dict[str, Probe] = field(default_factory=dict)

    @property
    def exit_code(self) -> int | None:
        return self.container.exit_code if self.container else None

    @property
    def is_started(self) -> bool:
        startup = self.probes.get("startupProbe")
        return self.is_alive and (startup is None or startup.has_succeeded)

    @property
    def is_alive(self) -> bool:
        return self.container is not None and self.exit_code is None

    @property
    def is_ready(self) -> bool:
        ready = self.probes.get("readinessProbe")
        return self.is_started and (ready is None or ready.is_succeeding)

    def status(self) -> Object:
        """The container's part of the pod's status."""
        if self.container is None:
            state: Object = {"waiting": {"reason": "ContainerCreating"}}
        elif self.exit_code is None:
            state = {"running": {"startedAt": self.started_at}}
        else:
            state = {"terminated": self._terminated()}
        return {
            "name": self.wanted["name"],
            "image": self.wanted["image"],
            "imageID": self.wanted["image"],
            "ready": self.is_ready,
            "started": self.is_started,
            "restartCount": max(0, self.num_starts - 1),
            "state": state,
            **({"lastState": {"terminated": self.last}} if self.last else {}),
        }

    def _terminated(self) -> Object:
        return {
            "exitCode": self.exit_code,
            "reason": "Completed" if self.exit_code == 0 else "Error",
            "startedAt": self.started_at,
            "finishedAt": self.finished_at or now(),
        }


class PodRunner(threading.Thread):
    """Runs one pod that is bound to a node of ours, to its end."""

    def __init__(self, machine: Machine, pod: Object, folder: Path) -> None:
        super().__init__(name=pod["metadata"]["name"], daemon=True)
        self._machine = machine
        self._pod = pod
        self._ip = ip = machine.network.new_pod_ip()
        self._folder = folder
        self._path = f"/api/v1/namespaces/{pod['metadata']['namespace']}/pods/{self.name}"
        self._files = PodFiles(machine.api, pod, ip, folder / "volumes")
        spec = pod["spec"]
        self._initial = [Running(each) for each in spec.get("initContainers") or []]
        self._mains = [Running(each) for each in spec["containers"]]
        self._is_deleted = threading.Event()
        self._is_gone = threading.Event()
        self._grace_s = float(spec.get("terminationGracePeriodSeconds", 30))
        self._said: Object = {}
        self._begun = now()
        self._begun_s = time.monotonic()
        self._end = ""

    def delete(self, grace_s: float) -> None:
        """The API server wants the pod to go."""
        self._grace_s = grace_s
        self._is_deleted.set()

    def forget(self) -> None:
        """The API server has no such pod any more."""
        self._is_gone.set()
        self._is_deleted.set()

    def refresh(self, kind: str, name: str) -> None:
        """A ConfigMap or Secret (by the key of its volumes) of the pod's namespace has changed."""
        try:
            self._files.refresh(kind, name)
        except ApiError as error:
            logger.warning("%s: %s %s: %s", self.name, kind, name, error)

    def log(self, container: str) -> str:
        """What a container has printed, over all its starts."""
        logs = (self._folder / f"{container}-{i}" / "log" for i in range(1, 100))
        return "".join(log.read_text(errors="replace") for log in logs if log.exists())

    def run(self) -> None:
        try:
            self._prepare()
            if self._run_initial():
                self._run_mains()
            self._leave()
        except Exception:
            logger.exception("%s", self.name)
        finally:
            for each in (*self._initial, *self._mains):
                if each.container:
                    each.container.close()
            if self._is_deleted.is_set() and not self._is_gone.is_set():
                self._remove()

    def _prepare(self) -> None:
        while not self._is_deleted.is_set():
            try:
                self._files.prepare()
                return self._write_names()
            except ApiError as error:
                if error.status != 404:
                    raise
                self._is_deleted.wait(0.2)
        return None

    def _run_initial(self) -> bool:
        """Whether all init containers have ended well."""
        for each in self._initial:
            while not self._is_deleted.is_set():
                self._keep(each)
                self._say()
                if each.exit_code == 0:
                    break
                if each.exit_code is not None and self._restart_policy == "Never":
                    self._end = "Failed"
                    return False
                self._is_deleted.wait(_TICK_S)
        return not self._is_deleted.is_set()

    def _run_mains(self) -> None:
        while not self._is_deleted.wait(_TICK_S):
            for each in self._mains:
                self._keep(each)
                self._probe(each)
            deadline_s = self._pod["spec"].get("activeDeadlineSeconds")
            if deadline_s and time.monotonic() - self._begun_s > deadline_s:
                self._end = "Failed"
            if all(self._is_over(each) for each in self._mains):
                ended_well = all(each.exit_code == 0 for each in self._mains)
                self._end = "Succeeded" if ended_well else "Failed"
            self._say()
            if self._end:
                return

    @property
    def _restart_policy(self) -> str:
        return str(self._pod["spec"].get("restartPolicy", "Always"))

    def _is_over(self, each: Running) -> bool:
        if each.exit_code is None or self._restart_policy == "Always":
            return False
        return each.exit_code == 0 or self._restart_policy == "Never"

    def _keep(self, each: Running) -> None:
        """Start a container that is to run and does not."""
        if each.exit_code is not None and not each.finished_at:
            each.finished_at, each.ended_s = now(), time.monotonic()
            logger.info("%s: %s ended (%s)", self.name, each.wanted["name"], each.exit_code)
        if each.container is None:
            return self._start(each)
        if each.exit_code is None or self._is_over(each):
            return None
        if each in self._initial and each.exit_code == 0:
            return None
        if time.monotonic() - each.ended_s >= _RESTART_AFTER_S:
            self._start(each)
        return None

    def _start(self, each: Running) -> None:
        wanted = each.wanted
        if each.container:
            each.last = each.status()["state"].get("terminated")
            each.container.close()
        each.num_starts += 1
        name = f"{wanted['name']}-{each.num_starts}"
        uid = self._pod["metadata"]["uid"]
        each.container = Container(f"{uid}-{name}", self._spec(wanted), self._folder / name)
        each.started_at, each.finished_at = now(), ""
        each.probes = {
            kind: Probe(wanted[kind], time.monotonic())
            for kind in ("startupProbe", "readinessProbe", "livenessProbe")
            if kind in wanted
        }
        each.container.start()

    def _spec(self, wanted: Object) -> ContainerSpec:
        image = self._machine.images.find(wanted["image"])
        env = self._files.env(wanted, image.env)
        command = wanted.get("command") or image.entrypoint
        arguments = wanted.get("args") or ([] if wanted.get("command") else image.arguments)
        security = {**self._security(self._pod["spec"]), **self._security(wanted)}
        return ContainerSpec(
            command=[self._files.here(expanded(part, env)) for part in (*command, *arguments)],
            root=self._machine.root,
            env=env,
            folder=wanted.get("workingDir", image.folder),
            mounts=[*self._common_mounts(), *self._files.mounts(wanted)],
            hostname=self.name[:63],
            user=security.get("runAsUser", 0),
            group=security.get("runAsGroup", 0),
            extra_groups=[security["fsGroup"]] if "fsGroup" in security else [],
            is_root_read_only=security.get("readOnlyRootFilesystem", False),
        )

    def _common_mounts(self) -> list[Mount]:
        return [
            *self._machine.images.mounts(),
            Mount("/etc/hosts", str(self._folder / "hosts"), is_read_only=True),
            Mount("/etc/resolv.conf", str(self._folder / "resolv.conf"), is_read_only=True),
        ]

    def _write_names(self) -> None:
        """The files that resolvers read, as the kubelet writes them."""
        namespace = self._pod["metadata"]["namespace"]
        domains = " ".join((f"{namespace}.svc.{DOMAIN}", f"svc.{DOMAIN}", DOMAIN))
        (self._folder / "resolv.conf").write_text(
            f"search {domains}\nnameserver {self._machine.network.name_server}\noptions ndots:5\n"
        )
        (self._folder / "hosts").write_text(f"127.0.0.1 localhost\n{self._ip} {self.name}\n")

    @staticmethod
    def _security(spec: Object) -> Object:
        return spec.get("securityContext") or {}

    def _probe(self, each: Running) -> None:
        container = each.container
        if container is None or not each.is_alive:
            return
        for kind, probe in each.probes.items():
            if (kind != "startupProbe" and not each.is_started) or not probe.is_due():
                continue
            if kind == "startupProbe" and probe.has_succeeded:
                continue
            probe.take(ask(probe.wanted, container, self._ip, each.wanted, self._files.here))
            if probe.has_failed and kind != "readinessProbe":
                logger.warning("%s: %s failed: %s", self.name, kind, probe.said)
                self._end_container(each, self._grace_s)

    def _leave(self) -> None:
        """The way out of a pod: preStop, SIGTERM, and SIGKILL when the grace period is over."""
        self._say()
        threads = [
            threading.Thread(target=self._end_container, args=(each, self._grace_s))
            for each in self._mains
            if each.is_alive
        ]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            time.sleep(_TICK_S)
            self._say()
        self._say()

    def _end_container(self, each: Running, grace_s: float) -> None:
        container, deadline_s = each.container, time.monotonic() + grace_s
        assert container is not None
        hook = (each.wanted.get("lifecycle") or {}).get("preStop")
        if hook:
            container.run([self._files.here(part) for part in hook["exec"]["command"]], grace_s)
        container.signal(signal.SIGTERM)
        while container.exit_code is None and time.monotonic() < deadline_s:
            time.sleep(_TICK_S)
        if container.exit_code is None:
            logger.warning("%s: %s outlives its grace period", self.name, each.wanted["name"])
            container.signal(signal.SIGKILL)
            container.wait(30)
        logger.info("%s: %s ended (%s)", self.name, each.wanted["name"], container.exit_code)

    def _say(self) -> None:
        """Tell the API server what has changed."""
        status = self._status()
        if status == self._said or self._is_gone.is_set():
            return
        try:
            self._machine.api.patch(f"{self._path}/status", {"status": status}, MERGE)
        except ApiError as error:
            if error.status != 404:
                raise
            self._is_gone.set()
        self._said = status

    def _status(self) -> Object:
        # A pod that is going away takes no new connections.
        is_ready = all(e.is_ready for e in self._mains) and not self._is_deleted.is_set()
        has_begun = all(e.exit_code == 0 for e in self._initial)
        return {
            "phase": self._end or ("Running" if has_begun else "Pending"),
            "podIP": self._ip,
            "podIPs": [{"ip": self._ip}],
            "hostIP": "127.0.0.1",
            "startTime": self._begun,
            "containerStatuses": [each.status() for each in self._mains],
            "initContainerStatuses": [each.status() for each in self._initial],
            "conditions": self._conditions(
                {
                    "PodScheduled": True,
                    "Initialized": has_begun,
                    "ContainersReady": is_ready,
                    "Ready": is_ready,
                }
            ),
        }

    def _conditions(self, values: dict[str, bool]) -> Sequence[Object]:
        before = {each["type"]: each for each in self._said.get("conditions", [])}
        found = []
        for kind, is_true in values.items():
            status = "True" if is_true else "False"
            changed = kind not in before or before[kind]["status"] != status
            since = now() if changed else before[kind]["lastTransitionTime"]
            found.append({"type": kind, "status": status, "lastTransitionTime": since})
        return found

    def _remove(self) -> None:
        with contextlib.suppress(ApiError):
            uid = self._pod["metadata"]["uid"]
            self._machine.api.delete(
                self._path, {"gracePeriodSeconds": 0, "preconditions": {"uid": uid}}
            )


def now() -> str:
    """The time as Kubernetes writes it."""
    return dt.datetime.now(dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
