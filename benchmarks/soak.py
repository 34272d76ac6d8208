"""Sends many requests and measures how the memory of each process grows.

Every twentieth request is aborted while running, half by Abort and half by closing the call.
"""

import asyncio
import contextlib
from typing import Any

import grpc.aio
import numpy as np

from benchmarks.deployment import deployment, request
from headrace.v1 import inference_pb2

_NUM_CLIENTS = 64
_NUM_SAMPLES = 40
_ABORTED_EVERY = 20
# Few enough that the prefix cache has hashed every block long before the run's half.
_NUM_KV_BLOCKS = 10_000
# More tokens than the request ever gets, so that the abort finds it running.
_TOKENS_OF_ABORTED = 100_000


async def soak(num_requests: int) -> dict[str, Any]:
    """Memory at the start, half-way and at the end, and the slope of the second half."""
    result: dict[str, Any] = {}
    num_sent = num_aborted = 0
    samples: list[tuple[int, dict[str, int]]] = []

    async def one(stub: Any) -> None:
        nonlocal num_sent, num_aborted
        while num_sent < num_requests:
            num_sent += 1
            if num_sent % _ABORTED_EVERY == 0:
                num_aborted += 1
                await _aborted(stub, f"soak-{num_sent}", closes=num_aborted % 2 == 0)
            else:
                async for _ in stub.Generate(request(1)):
                    pass
            if num_sent >= len(samples) * num_requests // _NUM_SAMPLES:
                samples.append((num_sent, ours.rss_bytes()))

    async with deployment(num_kv_blocks=_NUM_KV_BLOCKS, has_store=True) as ours:
        with ours.measured(result, "request", lambda: num_sent):
            stubs = ours.stubs
            await asyncio.gather(*(one(stubs[n % len(stubs)]) for n in range(_NUM_CLIENTS)))
        samples.append((num_sent, ours.rss_bytes()))
    settled = samples[len(samples) // 2 :]
    result["aborted"] = num_aborted
    for name in samples[0][1]:
        begin, half, end = (s[0][1][name] / 1e6 for s in (samples, settled, samples[-1:]))
        result[f"{name} memory"] = {
            "begin_mb": round(begin, 1),
            "half_mb": round(half, 1),
            "end_mb": round(end, 1),
            "kb_more_per_10000_requests": round(_slope(settled, name) * 10_000 / 1000, 1),
        }
    return result


async def _aborted(stub: Any, request_id: str, *, closes: bool) -> None:
    """Sends a request and ends it while tokens are streaming."""
    call = stub.Generate(request(_TOKENS_OF_ABORTED, request_id))
    await call.read()
    if closes:
        call.cancel()
        return
    await stub.Abort(inference_pb2.AbortRequest(request_ids=[request_id]))
    with contextlib.suppress(grpc.aio.AioRpcError):
        while await call.read() is not grpc.aio.EOF:
            pass


def _slope(samples: list[tuple[int, dict[str, int]]], name: str) -> float:
    """Bytes per request: the slope of a line fitted to the samples."""
    counts = np.array([count for count, _ in samples], dtype=float)
    sizes = np.array([size[name] for _, size in samples], dtype=float)
    return float(np.polyfit(counts, sizes, 1)[0])
