"""The console: a page on the router's admin port that shows the pool, and what the page asks for.

Everything under /api/ is what the Inference service answers an administrator, as JSON. The page's
files are in `router/console`; they are served as they are, and load nothing from elsewhere.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Collection
from importlib.resources import files
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from google.protobuf.json_format import MessageToDict

from headrace.service.auth import act_as
from headrace.service.errors import ServiceError
from headrace.service.keys import ANYBODY, KeyRing
from headrace.service.watched import Watched
from headrace.v1 import inference_pb2, steps_pb2
from router.rpc.inference import InferenceService
from router.rpc.steps import MAX_HISTORY_S

if TYPE_CHECKING:
    from aiohttp import web

_TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self';"
        " connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}
# Pages that watch the steps at the same time.
_MAX_WATCHERS = 16
_HTTP_STATUS = {"NOT_FOUND": 404, "INVALID_ARGUMENT": 400, "UNIMPLEMENTED": 501}

# A step in /api/steps is an array of these; reasons to wait are an object.
_STEP_FIELDS = tuple(field.name for field in steps_pb2.Step.DESCRIPTOR.fields)
_NUMBERS = tuple(name for name in _STEP_FIELDS if name != "num_waiting_by_reason")


class Console:
    """The page and its API; the admin server decides who may call the API."""

    def __init__(self, service: InferenceService, keys: Watched[KeyRing] | None) -> None:
        """keys: those of the service's public port, or None where it asks for none."""
        self._service = service
        self._keys = keys
        self._num_watchers = 0
        folder = files("router") / "console"
        self._files = {
            ("/" if file.name == "index.html" else f"/console/{file.name}"): (
                file.read_bytes(),
                _TYPES[file.name[file.name.rindex(".") :]],
            )
            for file in folder.iterdir()
        }

    @property
    def open_paths(self) -> Collection[str]:
        """The page's files."""
        return self._files.keys()

    @property
    def keys(self) -> Watched[KeyRing] | None:
        """The public port's."""
        return self._keys

    def add_to(self, app: "web.Application") -> None:
        """Serve the page and its API."""
        for path in self._files:
            app.router.add_get(path, self._file)
        app.router.add_get("/api/pool", self._pool)
        app.router.add_get("/api/queue", self._queue)
        app.router.add_get("/api/batch", self._batch)
        app.router.add_get("/api/explain", self._explain)
        app.router.add_post("/api/steps", self._steps)

    async def _file(self, request: "web.Request") -> "web.Response":
        from aiohttp import web

        body, content_type = self._files[request.path]
        return web.Response(body=body, content_type=content_type, charset="utf-8", headers=_HEADERS)

    async def _pool(self, _request: "web.Request") -> "web.Response":
        return await _answer(self._service.GetPool(inference_pb2.GetPoolRequest(), None))

    async def _queue(self, request: "web.Request") -> "web.Response":
        asked = steps_pb2.ListQueueRequest(
            offset=_number(request, "offset"), limit=_number(request, "limit")
        )
        return await _answer(self._service.ListQueue(asked, None))

    async def _batch(self, request: "web.Request") -> "web.Response":
        asked = steps_pb2.GetStepBatchRequest(
            worker_id=request.query.get("worker_id", ""), position=_number(request, "position", 18)
        )
        return await _answer(self._service.GetStepBatch(asked, None))

    async def _explain(self, request: "web.Request") -> "web.Response":
        act_as(ANYBODY)
        # Of several completions the first is explained.
        request_id = request.query.get("request_id", "").partition("#")[0]
        asked = inference_pb2.ExplainRequest(request_id=request_id)
        return await _answer(self._service.Explain(asked, None))

    async def _steps(self, request: "web.Request") -> "web.StreamResponse":
        """Steps as lines of JSON, for as long as the caller reads: {"after": …, "history_s": …}."""
        from aiohttp import web

        if request.content_type != "application/json":
            return _refusal(415, "send content-type: application/json")
        if self._num_watchers >= _MAX_WATCHERS:
            return _refusal(503, f"{_MAX_WATCHERS} pages watch already")
        try:
            asked = msgspec.json.decode(await request.read(), type=_Watch)
        except msgspec.DecodeError as error:
            return _refusal(400, str(error))
        response = web.StreamResponse(
            headers={"content-type": "application/x-ndjson", "cache-control": "no-store"}
        )
        self._num_watchers += 1
        try:
            await response.prepare(request)
            with contextlib.suppress(ConnectionError):
                async with contextlib.aclosing(self._lines(asked)) as lines:
                    async for line in lines:
                        await response.write(line)
        finally:
            self._num_watchers -= 1
        return response

    async def _lines(self, asked: "_Watch") -> AsyncGenerator[bytes, None]:
        after = [
            steps_pb2.StepPosition(worker_id=worker_id, position=position)
            for worker_id, position in asked.after.items()
        ]
        watched = steps_pb2.WatchStepsRequest(after=after, history_s=asked.history_s)
        yield _line({"fields": [*_NUMBERS, "num_waiting_by_reason"]})
        async with contextlib.aclosing(self._service.WatchSteps(watched, None)) as responses:
            async for response in responses:
                if not response.workers:
                    yield _line([])
                # A worker at a time: tokens must not wait for a long history.
                for worker in response.workers:
                    yield _line([_worker_steps(worker)])
                    await asyncio.sleep(0)


class _Watch(msgspec.Struct):
    """What /api/steps is asked: positions by worker, and how much of the past."""

    after: dict[str, Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]] = {}
    history_s: Annotated[float, msgspec.Meta(ge=0, le=MAX_HISTORY_S)] = 0.0


def _worker_steps(worker: steps_pb2.WorkerSteps) -> dict[str, Any]:
    return {
        "worker_id": worker.worker_id,
        "model": worker.model,
        "has_gap": worker.has_gap,
        "steps": [
            [*(getattr(step, name) for name in _NUMBERS), dict(step.num_waiting_by_reason)]
            for step in worker.steps
        ],
    }


def _line(value: Any) -> bytes:
    return msgspec.json.encode(value) + b"\n"


async def _answer(answering: Any) -> "web.Response":
    from aiohttp import web

    try:
        message = await answering
    except ServiceError as error:
        return _refusal(_HTTP_STATUS.get(error.code.name, 503), error.message)
    found = MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return web.Response(body=msgspec.json.encode(found), content_type="application/json")


def _refusal(status: int, message: str) -> "web.Response":
    from aiohttp import web

    body = msgspec.json.encode({"error": message})
    return web.Response(status=status, body=body, content_type="application/json")


def _number(request: "web.Request", name: str, max_digits: int = 9) -> int:
    """A number of the query that fits; what does not is 0, which each method has a rule for."""
    text = request.query.get(name, "0")
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= max_digits else 0
