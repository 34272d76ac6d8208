"""`python -m scheduler`: builds the service from its settings and runs it until SIGTERM."""

import asyncio
import logging
import platform
import time
from typing import Any

import click

from headrace.service import config, telemetry
from headrace.service.admin import AdminConfig
from headrace.service.channels import ChannelConfig
from headrace.service.discovery import DiscoveryConfig, OwnershipConfig, open_source
from headrace.service.monitoring import publish_metrics
from headrace.service.peers import PeerSource
from headrace.service.process import ProcessConfig, keep_for_good, run, write_address
from headrace.service.serving import GrpcServer, ServingConfig, stop_asked
from headrace.status.states import Writer
from headrace.status.store import StatusStore
from scheduler import metrics
from scheduler.build import build_pool, keep_journal
from scheduler.config import PoolSettings, SchedulerSettings
from scheduler.following import AllWorkers, Share
from scheduler.orphans import Orphans
from scheduler.owning import OwnedWorkers, share_workers
from scheduler.request_log import RequestLog
from scheduler.rpc.gpuworker_client import GpuWorkerClient
from scheduler.rpc.service import FULL_NAME, SchedulerService
from scheduler.switchboard import Switchboard

logger = logging.getLogger("scheduler")

_STORE_FLUSH_S = 2.0
_CLOSE_STREAMS_S = 2.0


@click.command(context_settings={"max_content_width": 100})
@config.with_settings({
    "scheduler": (SchedulerSettings, ""),
    "pool": (PoolSettings, ""),
    "serving": (ServingConfig, ""),
    "admin": (AdminConfig, "admin"),
    "channel": (ChannelConfig, "worker"),
    "discovery": (DiscoveryConfig, "discovery"),
    "ownership": (OwnershipConfig, "ownership"),
    "process": (ProcessConfig, ""),
})  # fmt: skip
def main(settings: dict[str, Any]) -> None:
    """Decide each step of the gpuworkers it is given, and stream their tokens to routers."""
    scheduler, discovery = settings["scheduler"], settings["discovery"]
    source = open_source(discovery, scheduler.worker, scheduler.worker_selector, flag="worker")
    run("scheduler", settings["process"], serve(**settings, source=source))


async def serve(
    scheduler: SchedulerSettings,
    pool: PoolSettings,
    serving: ServingConfig,
    *,
    admin: AdminConfig,
    channel: ChannelConfig,
    process: ProcessConfig,
    discovery: DiscoveryConfig,
    ownership: OwnershipConfig,
    source: PeerSource,
) -> None:
    """Serve until SIGTERM or SIGINT, then finish what is live and stop."""
    scheduler_id = scheduler.scheduler_id or platform.node()
    try:
        traces = telemetry.setup("headrace-scheduler", process.otlp_endpoint)
        store = StatusStore(scheduler.store_url, Writer.SCHEDULER)
    except ValueError as error:
        raise config.ConfigError(f"store_url or otlp_endpoint: {error}") from error
    async with store:
        term = time.time_ns()
        log = RequestLog(store, scheduler_id, str(term), clock=time.time)
        switchboard = Switchboard(log)
        workers = build_pool(switchboard, scheduler, pool, clock=time.time)
        share: Share = AllWorkers(
            source, workers, lambda address: GpuWorkerClient(address, channel, term=term)
        )
        if discovery.type == "kubernetes":
            share = await share_workers(
                *(discovery, scheduler.worker_selector, ownership),
                scheduler_id=scheduler_id,
                drives=OwnedWorkers(workers, channel),
            )
        orphans = Orphans(
            switchboard.requests,
            ttl_s=pool.orphan_ttl_s,
            max_num_unread_tokens=pool.max_orphan_tokens,
        )
        keep_journal(store, switchboard, orphans)
        service = SchedulerService(
            scheduler_id, switchboard, workers, orphans, max_waiting_tokens=pool.max_waiting_tokens
        )
        server = GrpcServer(serving, [FULL_NAME], traces.server_interceptors)
        service.add_to(server.server)
        keep_for_good()
        stop = stop_asked()
        write_address(process, await server.start())
        publishing = publish_metrics(
            "headrace-scheduler",
            lambda: [*metrics.read(workers, log, store), *server.meter.read()],
            admin=admin,
            otlp_endpoint=process.otlp_endpoint,
            is_ready=server.is_serving,
        )
        async with publishing, asyncio.TaskGroup() as tasks:
            lease = store.hold_lease("scheduler", scheduler_id, str(term))
            jobs = (store.run(), lease, workers.run(), orphans.run(), share.run())
            background = [tasks.create_task(job) for job in jobs]
            server.set_serving(True)
            await stop.wait()
            server.set_serving(False)
            logger.info("draining %d requests", len(switchboard.requests))
            share.drain()
            if not await workers.drain(serving.drain_timeout_s):
                logger.warning("stopping with %d requests live", len(switchboard.requests))
            service.close_streams()
            await share.release()
            await server.stop(_CLOSE_STREAMS_S)
            await store.flush(_STORE_FLUSH_S)
            for task in background:
                task.cancel()
    traces.shutdown()


if __name__ == "__main__":
    main()
