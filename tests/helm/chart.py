"""The chart as tests see it: values in, Kubernetes objects out."""

import json
import subprocess
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).parents[2] / "helm" / "headrace"
# Otherwise made up anew in each rendering.
KEPT_SECRETS = {
    "auth": {
        "tokens": {
            "router": "hidden-1",
            "scheduler": "hidden-2",
            "gpuworker": "hidden-3",
            "metrics": "hidden-5",
        }
    },
    "store": {"valkey": {"password": "hidden-4"}},
}

Object = dict[str, Any]


class RefusedError(Exception):
    """helm refused the values; the message is helm's."""


class Chart:
    """The chart; renderings are kept by their values."""

    def __init__(self, helm: Path) -> None:
        self._helm = helm
        self._rendered: dict[str, list[Object]] = {}

    def render(
        self,
        values: Object | None = None,
        *,
        release: str = "hr",
        kube: str = "1.33",
        is_secret_given: bool = True,
    ) -> "Objects":
        """The objects of a release with these values; RefusedError if helm refuses them."""
        given = json.dumps(merged(KEPT_SECRETS if is_secret_given else {}, values or {}))
        key = f"{release} {kube} {given}"
        if key not in self._rendered:
            output = self.run(
                *("template", release, str(CHART), "--namespace", "space", "--kube-version", kube),
                *("--values", "-"),
                given=given,
            )
            documents = yaml.load_all(output, yaml.CSafeLoader)
            self._rendered[key] = [document for document in documents if document]
        return Objects(self._rendered[key])

    def run(self, *arguments: str, given: str = "") -> str:
        """What helm prints."""
        done = subprocess.run(
            [str(self._helm), *arguments], input=given, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RefusedError(done.stderr)
        return done.stdout


class Objects(list[Object]):
    """Kubernetes objects of one rendering."""

    def of(self, kind: str) -> dict[str, Object]:
        """The objects of a kind by name."""
        return {each["metadata"]["name"]: each for each in self if each["kind"] == kind}

    def one(self, kind: str, name: str) -> Object:
        """The object of that kind and name; name lacks the release's beginning."""
        return self.of(kind)[f"hr-headrace-{name}"]

    def pods(self) -> dict[str, Object]:
        """The spec of each pod and pod template, by the name of its object."""
        found = {name: pod["spec"] for name, pod in self.of("Pod").items()}
        for kind in ("Deployment", "StatefulSet", "Job"):
            for name, each in self.of(kind).items():
                found[name] = each["spec"]["template"]["spec"]
        for name, each in self.of("LeaderWorkerSet").items():
            found[name] = each["spec"]["leaderWorkerTemplate"]["workerTemplate"]["spec"]
        return found

    def file(self, name: str, key: str) -> str:
        """A file of a ConfigMap."""
        return self.one("ConfigMap", name)["data"][key]


def merged(below: Object, above: Object) -> Object:
    """Both values, those of `above` where both have one."""
    result = dict(below)
    for key, value in above.items():
        both = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = merged(result[key], value) if both else value
    return result
