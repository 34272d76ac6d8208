"""What a pod reads: its environment, and its volumes as folders of this machine."""

import base64
import os
import re
import shutil
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.cluster.api import Api, ApiError, Object
from tests.containers.runtime import Mount


class PodFiles:
    """Resolves what a pod's containers refer to."""

    def __init__(self, api: Api, pod: Object, ip: str, folder: Path) -> None:
        self._api = api
        self._pod = pod
        self._ip = ip
        self._folder = folder
        self._num_written = 0
        self._shown: dict[Path, Sequence[tuple[str, bytes, int]]] = {}
        self._lock = threading.Lock()
        self._namespace = pod["metadata"]["namespace"]
        security = pod["spec"].get("securityContext") or {}
        self._group = security.get("fsGroup", security.get("runAsGroup", 0))

    def here(self, text: str) -> str:
        """All pods share the machine's loopback: every address and our own are the pod's own."""
        return re.sub(r"\b(?:0\.0\.0\.0|127\.0\.0\.1):(?=\d)", f"{self._ip}:", text)

    def env(self, container: Object, below: Mapping[str, str]) -> dict[str, str]:
        """The environment of a container; below is its image's."""
        host, _, port = self._api.address.rpartition(":")
        found = {
            **below,
            "HOSTNAME": self._pod["metadata"]["name"],
            "POD_IP": self._ip,
            "KUBERNETES_SERVICE_HOST": host,
            "KUBERNETES_SERVICE_PORT": port,
        }
        for source in container.get("envFrom") or []:
            for kind, key in (("configMapRef", "configmaps"), ("secretRef", "secrets")):
                if kind in source:
                    found |= self._data(key, source[kind])
        for each in container.get("env") or []:
            value = each.get("value", "")
            if "valueFrom" in each:
                resolved = self._value_from(each["valueFrom"])
                if resolved is None:
                    continue
                value = resolved
            found[each["name"]] = expanded(value, found)
        return found

    def prepare(self) -> None:
        """Make the folder of each volume; ApiError 404 while something is missing."""
        for volume in self._pod["spec"].get("volumes") or []:
            self._write(volume)

    def refresh(self, kind: str, name: str) -> None:
        """Write the volumes again that show a ConfigMap or Secret, which has changed."""
        for volume in self._pod["spec"].get("volumes") or []:
            shown = volume.get(kind) or {}
            if name in (shown.get("name"), shown.get("secretName")):
                self._write(volume)

    def mounts(self, container: Object) -> list[Mount]:
        """What a container sees of the volumes."""
        volumes = {each["name"]: each for each in self._pod["spec"].get("volumes") or []}
        found = []
        # Outer folders first.
        for mount in sorted(container.get("volumeMounts") or [], key=lambda m: m["mountPath"]):
            source = self._source(volumes[mount["name"]])
            if "subPath" in mount:
                source /= mount["subPath"]
            found.append(Mount(mount["mountPath"], str(source), mount.get("readOnly", False)))
        return found

    def _source(self, volume: Object) -> Path:
        if "hostPath" in volume:
            return Path(volume["hostPath"]["path"])
        return self._folder / str(volume["name"])

    def _write(self, volume: Object) -> None:
        folder = self._source(volume)
        folder.mkdir(parents=True, exist_ok=True)
        if "hostPath" in volume:
            return
        if "emptyDir" in volume:
            self._give(folder, 0o2777)
            return
        self._swap(folder, self._files(volume))

    def _swap(self, folder: Path, files: Sequence[tuple[str, bytes, int]]) -> None:
        """Show all files at once, behind the link ..data, as the kubelet does."""
        with self._lock:
            if self._shown.get(folder) != files:
                self._write_anew(folder, files)
                self._shown[folder] = files

    def _write_anew(self, folder: Path, files: Sequence[tuple[str, bytes, int]]) -> None:
        shown = folder / "..data"
        before = shown.resolve() if shown.is_symlink() else None
        self._num_written += 1
        content = folder / f"..{self._num_written}"
        for path, data, mode in files:
            file = content / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(data)
            self._give(file, mode)
        content.mkdir(exist_ok=True)
        draft = folder / "..data_tmp"
        draft.symlink_to(content.name)
        draft.replace(shown)
        for first in {Path(path).parts[0] for path, _, _ in files}:
            if not (folder / first).is_symlink():
                (folder / first).symlink_to(f"..data/{first}")
        if before is not None:
            shutil.rmtree(before)

    def _give(self, path: Path, mode: int) -> None:
        shutil.chown(path, 0, self._group)
        os.chmod(path, mode)  # noqa: PTH101 beside chown

    def _files(self, volume: Object) -> list[tuple[str, bytes, int]]:
        for kind, key, name in (
            ("configMap", "configmaps", "name"),
            ("secret", "secrets", "secretName"),
        ):
            if kind in volume:
                return self._objects_files(key, volume[kind], volume[kind][name])
        if "projected" in volume:
            found = []
            for source in volume["projected"]["sources"]:
                found += self._projected(source, volume["projected"].get("defaultMode", 0o644))
            return found
        raise NotImplementedError(f"volume {volume}")

    def _projected(self, source: Object, mode: int) -> list[tuple[str, bytes, int]]:
        if "serviceAccountToken" in source:
            wanted = source["serviceAccountToken"]
            account = self._pod["spec"].get("serviceAccountName", "default")
            answer = self._api.create(
                f"/api/v1/namespaces/{self._namespace}/serviceaccounts/{account}/token",
                {
                    "spec": {
                        "audiences": [wanted["audience"]] if "audience" in wanted else [],
                        "expirationSeconds": wanted.get("expirationSeconds", 3600),
                    }
                },
            )
            # The kubelet gives the file to the pod's group.
            return [(wanted["path"], answer["status"]["token"].encode(), 0o640)]
        for kind, key in (("configMap", "configmaps"), ("secret", "secrets")):
            if kind in source:
                return self._objects_files(
                    key, {"defaultMode": mode, **source[kind]}, source[kind]["name"]
                )
        if "downwardAPI" in source:
            items = source["downwardAPI"]["items"]
            return [(i["path"], self._field(i["fieldRef"]).encode(), mode) for i in items]
        raise NotImplementedError(f"source {source}")

    def _objects_files(self, kind: str, wanted: Object, name: str) -> list[tuple[str, bytes, int]]:
        data = self._data(kind, {"name": name, "optional": wanted.get("optional", False)})
        mode = wanted.get("defaultMode", 0o644)
        items = wanted.get("items") or [{"key": key, "path": key} for key in data]
        # Only settings name addresses; a certificate or token is given as it is.
        change = self.here if kind == "configmaps" else str
        return [(i["path"], change(data[i["key"]]).encode(), i.get("mode", mode)) for i in items]

    def _value_from(self, source: Object) -> str | None:
        for kind, key in (("configMapKeyRef", "configmaps"), ("secretKeyRef", "secrets")):
            if kind in source:
                return self._data(key, source[kind]).get(source[kind]["key"])
        if "fieldRef" in source:
            return self._field(source["fieldRef"])
        raise NotImplementedError(f"valueFrom {source}")

    def _field(self, field: Object) -> str:
        path = field["fieldPath"]
        if path == "status.podIP":
            return self._ip
        found: Any = self._pod
        for part in path.split("."):
            found = found[part]
        return str(found)

    def _data(self, kind: str, wanted: Object) -> dict[str, str]:
        """The values of a ConfigMap or Secret by key."""
        try:
            found = self._api.get(f"/api/v1/namespaces/{self._namespace}/{kind}/{wanted['name']}")
        except ApiError as error:
            if error.status == 404 and wanted.get("optional"):
                return {}
            raise
        data: dict[str, str] = found.get("data") or {}
        if kind == "secrets":
            return {key: base64.b64decode(value).decode() for key, value in data.items()}
        return data


def expanded(text: str, env: Mapping[str, str]) -> str:
    """The text with $(NAME) replaced, as the kubelet does."""
    return re.sub(r"\$\((\w+)\)", lambda found: env.get(found[1], found[0]), text)
