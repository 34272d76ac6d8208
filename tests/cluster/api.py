"""The API server over plain HTTP: objects are what JSON says, of any version of Kubernetes."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import urllib3

Object = dict[str, Any]
MERGE = "application/merge-patch+json"
STRATEGIC = "application/strategic-merge-patch+json"


class ApiError(Exception):
    """The API server refused a call; status 0: it could not be reached, or did not answer."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status


class Api:
    """Calls with one user's token; from any thread."""

    def __init__(self, address: str, token: str, ca_file: Path) -> None:
        """address: host:port."""
        self.address = address
        self._base = f"https://{address}"
        self._pool = urllib3.PoolManager(
            ca_certs=str(ca_file),
            maxsize=16,
            headers={"Authorization": f"Bearer {token}"},
            retries=False,
        )

    def get(self, path: str) -> Object:
        return self._call("GET", path)

    def items(self, path: str) -> list[Object]:
        """The objects of a list."""
        found: list[Object] = self.get(path)["items"]
        return found

    def create(self, path: str, body: Object) -> Object:
        return self._call("POST", path, body)

    def patch(self, path: str, body: Object, kind: str = STRATEGIC) -> Object:
        return self._call("PATCH", path, body, kind)

    def delete(self, path: str, body: Object | None = None) -> None:
        self._call("DELETE", path, body)

    def text(self, path: str) -> str:
        """What is not JSON, such as a log."""
        return self._answer("GET", path).decode(errors="replace")

    def watch(self, path: str, timeout_s: int) -> Iterator[tuple[str, Object]]:
        """Each object of a list, then its changes until the time is over, with their types."""
        listed = self.get(path)
        for item in listed["items"]:
            yield "ADDED", item
        sign = "&" if "?" in path else "?"
        version = listed["metadata"]["resourceVersion"]
        answer = self._pool.request(
            "GET",
            f"{self._base}{path}{sign}watch=1&resourceVersion={version}&timeoutSeconds={timeout_s}",
            preload_content=False,
            timeout=urllib3.Timeout(connect=5, read=timeout_s + 15),
        )
        rest = b""
        try:
            with _connection_errors():
                for part in answer.stream(None):
                    *lines, rest = (rest + part).split(b"\n")
                    for line in lines:
                        event = json.loads(line)
                        if event["type"] == "ERROR":
                            return
                        yield event["type"], event["object"]
        finally:
            answer.close()

    def _call(self, method: str, path: str, body: Object | None = None, kind: str = "") -> Object:
        found: Object = json.loads(self._answer(method, path, body, kind))
        return found

    def _answer(self, method: str, path: str, body: Object | None = None, kind: str = "") -> bytes:
        with _connection_errors():
            answer = self._pool.request(
                method,
                self._base + path,
                body=None if body is None else json.dumps(body).encode(),
                headers={**self._pool.headers, "Content-Type": kind or "application/json"},
                timeout=30,
            )
        if answer.status >= 400:
            raise ApiError(answer.status, answer.data.decode(errors="replace")[:500])
        return answer.data


@contextlib.contextmanager
def _connection_errors() -> Iterator[None]:
    try:
        yield
    except urllib3.exceptions.HTTPError as error:
        raise ApiError(0, str(error)) from error
