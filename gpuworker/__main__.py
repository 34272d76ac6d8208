"""`python -m gpuworker`: loads a model and runs a scheduler's plans until SIGTERM."""

import asyncio
import contextlib
import logging
import os
import platform
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import click

from gpuworker import metrics
from gpuworker.config import KvCacheSettings, WorkerSettings
from gpuworker.machine import prepare_libraries
from headrace.service import config, telemetry
from headrace.service.admin import AdminConfig
from headrace.service.model_files import ModelFilesError, resolve
from headrace.service.monitoring import publish_metrics
from headrace.service.process import ProcessConfig, keep_for_good, run, write_address
from headrace.service.progress import say
from headrace.service.serving import GrpcServer, ServingConfig, stop_asked
from headrace.vocabulary import WorkerRole

logger = logging.getLogger("gpuworker")

_CLOSE_STREAMS_S = 1.0
_PROGRESS_EVERY_S = 2.0
# Exit status after a device failure: an illegal access, a double-bit error, a lost PCIe link.
_DEVICE_LOST = 3


@click.command(context_settings={"max_content_width": 100})
@config.with_settings({
    "gpuworker": (WorkerSettings, ""),
    "kv_cache": (KvCacheSettings, ""),
    "serving": (ServingConfig, ""),
    "admin": (AdminConfig, "admin"),
    "process": (ProcessConfig, ""),
})  # fmt: skip
def main(settings: dict[str, Any]) -> None:
    """Run a model: turn a scheduler's step plans into tokens."""
    if (num_pods := os.environ.get("LWS_GROUP_SIZE", "1")) != "1":
        raise config.ConfigError(
            f"this pod is one of a group of {num_pods} (LeaderWorkerSet), and a gpuworker cannot"
            " split a model over nodes yet: give each GPU a worker of its own, without"
            " leaderWorkerSet"
        )
    if not settings["gpuworker"].model:
        raise config.ConfigError("give --model: a GGUF file, a Hugging Face folder, or a name")
    prepare_libraries()
    run("gpuworker", settings["process"], serve(**settings))


async def serve(
    gpuworker: WorkerSettings,
    kv_cache: KvCacheSettings,
    serving: ServingConfig,
    admin: AdminConfig,
    process: ProcessConfig,
) -> None:
    """Listen, load, serve until SIGTERM or SIGINT, then finish the steps in flight and stop."""
    # torch takes seconds to import: only here, so that --help and errors in flags are quick.
    started = time.monotonic()
    from gpuworker.rpc.service import FULL_NAME, GpuWorkerService, WorkerIdentity

    logger.info("imported torch in %.1f s", time.monotonic() - started)
    traces = telemetry.setup("headrace-gpuworker", process.otlp_endpoint)
    identity = WorkerIdentity(
        gpuworker.worker_id or platform.node(),
        gpuworker.model_name or Path(gpuworker.model).stem,
        WorkerRole(gpuworker.role),
    )
    model_thread = ThreadPoolExecutor(1, thread_name_prefix="model")
    service = GpuWorkerService(identity, model_thread)
    server = GrpcServer(serving, [FULL_NAME], traces.server_interceptors)
    service.add_to(server.server)
    stop = stop_asked()
    write_address(process, await server.start())
    publishing = contextlib.AsyncExitStack()
    await publishing.enter_async_context(
        publish_metrics(
            "headrace-gpuworker",
            lambda: [*metrics.read(service.meter, service.engine), *server.meter.read()],
            admin=admin,
            otlp_endpoint=process.otlp_endpoint,
            is_ready=server.is_serving,
        )
    )
    stopping = asyncio.create_task(stop.wait())
    loading = asyncio.get_running_loop().run_in_executor(model_thread, _load, gpuworker, kv_cache)
    is_thread_busy, status = True, 0
    try:
        await asyncio.wait([stopping, loading], return_when=asyncio.FIRST_COMPLETED)
        if loading.done():
            is_thread_busy = False
            service.set_engine(loading.result())
            keep_for_good()
            following = asyncio.create_task(
                server.follow(service.waits_s, gpuworker.stalled_after_s)
            )
            lost = asyncio.create_task(service.device_lost())
            await asyncio.wait([lost, stopping], return_when=asyncio.FIRST_COMPLETED)
            following.cancel()
            server.set_serving(False)
            if not lost.cancel():
                logger.critical("the device has failed; start this worker again")
                is_thread_busy, status = True, _DEVICE_LOST
            elif not await service.drain(serving.drain_timeout_s):
                logger.warning("stopping with requests that are not finished")
                is_thread_busy = True
    finally:
        stopping.cancel()
        # Otherwise the server would cancel an open stream while its handler cleans up, which
        # needs the model's thread.
        service.close_stream()
        await server.stop(_CLOSE_STREAMS_S)
        await publishing.aclose()
        traces.shutdown()
    model_thread.shutdown(wait=False, cancel_futures=True)
    if is_thread_busy:
        # A load or a step cannot be interrupted, and the interpreter would wait for its thread;
        # after a fault, freeing the device's memory can wait for ever.
        sys.stderr.flush()
        os._exit(status)


def _load(settings: WorkerSettings, kv_cache: KvCacheSettings) -> Any:
    """Loads the engine, on the model's thread; what cannot be loaded is a ConfigError."""
    import torch

    from gpuworker.engine import load_engine
    from gpuworker.kv_pool import KvPoolError
    from gpuworker.machine import keep_freed_memory, num_compute_threads
    from gpuworker.models.errors import UnsupportedModelError, WeightError
    from gpuworker.models.source import open_source

    keep_freed_memory()
    torch.set_num_threads(settings.num_threads or num_compute_threads())
    started = time.monotonic()
    say("reading the weights")
    try:
        engine = load_engine(
            settings,
            kv_cache,
            open_source(resolve(settings.model)),
            loading=_Progress("reading the weights: {} of {} tensors"),
            capturing=_Progress("capturing CUDA graphs: {} of {}"),
        )
    except (
        ModelFilesError,
        WeightError,
        UnsupportedModelError,
        KvPoolError,
        ValueError,
    ) as error:
        raise config.ConfigError(f"cannot serve {settings.model}: {error}") from error
    limits = engine.runner.limits
    logger.info(
        "loaded %s in %.1f s: %s on %s, %d threads, %d KV blocks of %d tokens (%s), "
        "max_model_len %d",
        settings.model_name or Path(settings.model).stem,
        time.monotonic() - started,
        engine.dtype,
        engine.device,
        torch.get_num_threads(),
        limits.num_kv_blocks - 1,
        limits.block_size,
        engine.kv_dtype,
        limits.max_model_len,
    )
    return engine


class _Progress:
    """Reports the progress of a stage every few seconds; text takes the done and total counts."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._next_s = time.monotonic() + _PROGRESS_EVERY_S

    def __call__(self, num_done: int, num_all: int) -> None:
        if time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + _PROGRESS_EVERY_S
            say(self._text.format(num_done, num_all))


if __name__ == "__main__":
    main()
