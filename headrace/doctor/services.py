"""What router, scheduler and gpuworker say of themselves."""

import asyncio
import time
from typing import Any

import grpc.aio

from headrace.doctor.findings import Report
from headrace.doctor.ports import TIMEOUT_S, Port, ask, check_port, refused
from headrace.service.channels import ChannelConfig, open_channel
from headrace.service.errors import from_rpc_error
from headrace.service.versions import version
from headrace.v1 import (
    common_pb2,
    gpuworker_pb2,
    gpuworker_pb2_grpc,
    inference_pb2,
    inference_pb2_grpc,
    scheduler_pb2,
    scheduler_pb2_grpc,
)

_GIB = 2**30


async def check_router(address: str, config: ChannelConfig, report: Report) -> None:
    """A router's port, its models, and the pool as it sees it."""
    port = Port("router", address, "headrace.v1.Inference", config)
    if not await check_port(port, report):
        return
    async with open_channel(address, config) as channel:
        stub: Any = inference_pb2_grpc.InferenceStub(channel)
        call = stub.ListModels(inference_pb2.ListModelsRequest(), timeout=TIMEOUT_S)
        models: Any = await ask(port, report, "models", call)
        if models is not None:
            _models(port, report, models)
        asked_at = time.time()
        call = stub.GetPool(inference_pb2.GetPoolRequest(), timeout=TIMEOUT_S)
        pool: Any = await ask(port, report, "pool", call)
    if pool is None:
        return
    report.versions[port.target] = pool.version
    if pool.time_unix_s:
        # The router's clock was read in the middle of the call, as far as can be told.
        report.clocks[port.target] = pool.time_unix_s - (asked_at + time.time()) / 2
    for link in pool.schedulers:
        _link(port, report, link)
    for worker in pool.workers:
        _worker(report, worker)
    if not pool.has_store:
        text = "keeps no status store: requests do not survive the loss of all services"
        report.warning(port.target, "store", text, "give the services a store_url")
    elif not pool.is_store_up:
        advice = "check the store itself: --store-url URL"
        report.problem(port.target, "store", "does not reach its store, or lags", advice)
    else:
        report.ok(port.target, "store", "reaches its store")


async def check_scheduler(address: str, config: ChannelConfig, report: Report) -> None:
    """A scheduler's port and its first snapshot of the pool."""
    port = Port("scheduler", address, "headrace.v1.Scheduler", config)
    if not await check_port(port, report):
        return
    async with open_channel(address, config) as channel:
        stub: Any = scheduler_pb2_grpc.SchedulerStub(channel)
        call = stub.WatchPool(scheduler_pb2.WatchPoolRequest(), timeout=TIMEOUT_S)
        try:
            snapshot = await call.read()
        except grpc.aio.AioRpcError as error:
            refused(port, report, "pool", from_rpc_error(error))
            return
        finally:
            call.cancel()
    report.versions[port.target] = snapshot.version
    if snapshot.time_unix_s:
        report.clocks[port.target] = snapshot.time_unix_s - time.time()
    if snapshot.draining:
        report.warning(port.target, "pool", "is draining", "it ends soon; start another")
    if not snapshot.workers:
        report.problem(port.target, "pool", "has no worker", "see its log for why none connects")
    for worker in snapshot.workers:
        _worker(report, worker)


async def check_worker(address: str, config: ChannelConfig, report: Report) -> None:
    """A gpuworker's port and its description."""
    port = Port("worker", address, "headrace.v1.GpuWorker", config)
    if not await check_port(port, report):
        return
    async with open_channel(address, config) as channel:
        stub: Any = gpuworker_pb2_grpc.GpuWorkerStub(channel)
        request = gpuworker_pb2.DescribeRequest(version=version())
        call = stub.Describe(request, timeout=TIMEOUT_S)
        answer: Any = await ask(port, report, "worker", call)
    if answer is not None:
        _worker(report, answer.worker)


async def check_all(
    routers: list[tuple[str, ChannelConfig]],
    schedulers: list[tuple[str, ChannelConfig]],
    workers: list[tuple[str, ChannelConfig]],
    report: Report,
) -> None:
    """Checks the services, those of a kind at the same time."""
    kinds = ((check_router, routers), (check_scheduler, schedulers), (check_worker, workers))
    for check, ports in kinds:
        await asyncio.gather(*(check(address, config, report) for address, config in ports))


def _models(port: Port, report: Report, found: inference_pb2.ListModelsResponse) -> None:
    if not found.models:
        text = "no worker serves a model now: requests are refused"
        report.problem(port.target, "models", text, "see why the workers are not ready")
    for model in found.models:
        report.ok(port.target, "models", f"{model.name}: {model.num_ready_workers} workers ready")


def _link(port: Port, report: Report, link: inference_pb2.SchedulerLink) -> None:
    name = f"scheduler {link.address}"
    if link.connected:
        report.ok(port.target, "scheduler", f"connected to {link.scheduler_id} at {link.address}")
        report.versions.setdefault(name, link.version)
        if link.version and port.target in report.clocks:
            offset_s = report.clocks[port.target] + link.clock_offset_s
            report.clocks.setdefault(name, offset_s)
    else:
        text = f"is not connected to {link.address}: {link.error or 'no attempt has ended yet'}"
        report.problem(port.target, "scheduler", text, "check that scheduler: --scheduler ADDRESS")


def _worker(report: Report, worker: common_pb2.Worker) -> None:
    target = f"worker {worker.worker_id}"
    if target in report.versions:
        return  # several services know the worker
    report.versions[target] = worker.version
    state = common_pb2.WorkerState.Name(worker.state).removeprefix("WORKER_STATE_").lower()
    memory = f", {worker.device_memory_bytes / _GIB:.1f} GiB" if worker.device_memory_bytes else ""
    driver = f", {worker.driver}" if worker.driver else ""
    text = f"{worker.model} on {worker.device}{memory}{driver}: {state}"
    if worker.state == common_pb2.WORKER_STATE_READY:
        report.ok(target, "worker", text)
    elif worker.state == common_pb2.WORKER_STATE_STARTING:
        report.warning(target, "worker", text, "wait until the model is loaded")
    elif worker.state == common_pb2.WORKER_STATE_DRAINING:
        advice = "it shuts down, or an operator has drained it: headrace pool undrain"
        report.warning(target, "worker", text, f"{advice} {worker.worker_id}")
    else:
        report.warning(target, "worker", text, "see the worker's log and that of its scheduler")
