"""`python -m router`: builds the service from its settings and runs it until SIGTERM.

Health says SERVING as soon as calls are answered, whether or not a worker is ready: a router
without workers says UNAVAILABLE itself, with a RetryInfo, and ListModels tells how many are ready.
"""

import asyncio
import contextlib
import functools
import logging
import platform
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from headrace.service import config, telemetry
from headrace.service.admin import AdminConfig
from headrace.service.channels import ChannelConfig, open_channel
from headrace.service.discovery import DiscoveryConfig, open_source
from headrace.service.keys import watch_keys
from headrace.service.model_files import ModelFilesError, resolve
from headrace.service.monitoring import publish_metrics
from headrace.service.peers import PeerSource
from headrace.service.process import ProcessConfig, keep_for_good, run, write_address
from headrace.service.serving import GrpcServer, ServingConfig, stop_asked
from headrace.status.states import Writer
from headrace.status.store import StatusStore
from router import metrics
from router.aborts import Aborts
from router.config import (
    DrainMode,
    PublicServing,
    RecoveryConfig,
    RouterConfig,
    StreamsConfig,
    TenantConfig,
    TenantsConfig,
    rules_of,
)
from router.core.placement import WorkerPool
from router.prompts import PromptReader
from router.recovery import Recovery
from router.router import Router
from router.rpc import stored_spec
from router.rpc.access import FULL_NAME, TENANT_METHODS
from router.rpc.console import Console
from router.rpc.inference import InferenceService, Services
from router.rpc.model_defaults import ModelDefaults, read_defaults
from router.rpc.scheduler_client import SchedulerClient
from router.rpc.schedulers import Schedulers
from router.rules import Rules
from router.status_log import Identity, StatusLog
from router.take_up import TakeUps
from router.text.errors import ChatTemplateError, UnsupportedTokenizerError
from router.text.tokenizer import ModelText, load_model_text

logger = logging.getLogger("router")

_STORE_FLUSH_S = 2.0
_CLOSE_STREAMS_S = 2.0


@click.command(context_settings={"max_content_width": 100})
@config.with_settings({
    "router": (RouterConfig, ""),
    "streams": (StreamsConfig, ""),
    "recovery": (RecoveryConfig, ""),
    "tenant": (TenantConfig, "tenant"),
    "tenants": (TenantsConfig, None),
    "serving": (PublicServing, ""),
    "admin": (AdminConfig, "admin"),
    "channel": (ChannelConfig, "scheduler"),
    "discovery": (DiscoveryConfig, "discovery"),
    "process": (ProcessConfig, ""),
})  # fmt: skip
def main(settings: dict[str, Any]) -> None:
    """Admit, queue and dispatch requests, and stream their text back to clients."""
    router = settings["router"]
    streams, tenant, tenants = (settings.pop(key) for key in ("streams", "tenant", "tenants"))
    rules = rules_of(router, streams, settings["recovery"], tenant, tenants)
    discovery = settings.pop("discovery")
    source = open_source(discovery, router.scheduler, router.scheduler_selector, flag="scheduler")
    if not router.model:
        raise config.ConfigError("give --model, where the tokenizer is")
    models, defaults = load_models(router)
    prompts = PromptReader(
        models, has_spelled_control_tokens=router.allow_control_tokens_in_messages
    )
    # Now, while this process has no threads.
    prompts.fork()
    run(
        "router",
        settings["process"],
        serve(
            **settings,
            source=source,
            rules=rules,
            models=models,
            defaults=defaults,
            prompts=prompts,
        ),
    )


async def serve(
    router: RouterConfig,
    recovery: RecoveryConfig,
    serving: ServingConfig,
    channel: ChannelConfig,
    *,
    admin: AdminConfig,
    process: ProcessConfig,
    rules: Rules,
    source: PeerSource,
    models: Mapping[str, ModelText],
    defaults: Mapping[str, ModelDefaults],
    prompts: PromptReader,
) -> None:
    """Serve until SIGTERM or SIGINT, then let live requests finish, and stop."""
    identity = Identity(router.router_id or platform.node(), uuid.uuid4().hex)
    traces = telemetry.setup("headrace-router", process.otlp_endpoint)
    async with contextlib.AsyncExitStack() as stack:
        store = await stack.enter_async_context(StatusStore(router.store_url, Writer.ROUTER))
        stack.callback(prompts.close)
        try:
            await prompts.start()
        except ChatTemplateError as error:
            raise config.ConfigError(f"--model {router.model}: {error}") from error
        live = build_router(router, rules, store, identity)
        schedulers = Schedulers(
            source,
            lambda address: open_channel(address, channel),
            functools.partial(SchedulerClient, router=live, router_id=identity.router_id),
        )
        take_ups = build_take_ups(live, store, identity, models)
        services = Services(
            router=live,
            models=models,
            defaults=defaults,
            prompts=prompts,
            schedulers=schedulers,
            status=store,
            take_ups=take_ups,
            aborts=Aborts(live, take_ups, store, schedulers),
            max_prompt_bytes=router.max_prompt_bytes,
        )
        lost = Recovery(
            *(live, take_ups, store),
            identity=identity,
            max_recoveries=recovery.max_recoveries,
        )
        server = GrpcServer(
            serving, [FULL_NAME], traces.server_interceptors, tenant_methods=TENANT_METHODS
        )
        inference = InferenceService(services)
        inference.add_to(server.server)
        keep_for_good()
        stop = stop_asked()
        write_address(process, await server.start())
        publishing = publish_metrics(
            "headrace-router",
            lambda: [*metrics.read(live, models, store), *server.meter.read()],
            admin=admin,
            otlp_endpoint=process.otlp_endpoint,
            is_ready=server.is_serving,
            site=Console(inference, watch_keys(serving.auth_token_file, serving.api_keys_file)),
        )
        async with publishing, asyncio.TaskGroup() as tasks:
            background = [
                tasks.create_task(store.run()),
                tasks.create_task(
                    store.hold_lease("router", identity.router_id, identity.incarnation)
                ),
                tasks.create_task(lost.run()),
                tasks.create_task(live.run_deadlines()),
                tasks.create_task(schedulers.run()),
            ]
            server.set_serving(True)
            await stop.wait()
            server.set_serving(False)
            await drain(live, serving.drain_timeout_s, recovery.drain_mode)
            await server.stop(_CLOSE_STREAMS_S)
            await store.flush(_STORE_FLUSH_S)
            for task in background:
                task.cancel()
    traces.shutdown()


def build_router(
    settings: RouterConfig, rules: Rules, store: StatusStore, identity: Identity
) -> Router:
    """The router's state, empty."""
    return Router(
        WorkerPool(
            waiting_allowance=settings.waiting_allowance,
            max_report_age_s=settings.max_report_age_s,
            worker_grace_s=settings.worker_grace_s,
        ),
        rules,
        StatusLog(store, identity, encode=stored_spec.encode, wall_clock=time.time),
    )


def build_take_ups(
    router: Router, store: StatusStore, identity: Identity, models: Mapping[str, ModelText]
) -> TakeUps:
    """What finds the requests that callers come back to."""
    decode = functools.partial(stored_spec.decode, models=models)
    return TakeUps(router, store, identity, models, decode=decode, body_of=stored_spec.body_of)


def load_models(
    settings: RouterConfig,
) -> tuple[dict[str, ModelText], dict[str, ModelDefaults]]:
    """The text side and the sampling defaults of each model, by the name that requests use."""
    try:
        path = resolve(settings.model)
        text, defaults = load_model_text(path), read_defaults(path)
    except (ModelFilesError, UnsupportedTokenizerError, ChatTemplateError) as error:
        raise config.ConfigError(f"--model {settings.model}: {error}") from error
    name = settings.model_name or Path(settings.model).name.removesuffix(".gguf")
    return {name: text}, {name: defaults}


async def drain(router: Router, timeout_s: float, mode: DrainMode) -> None:
    """Refuse new requests, wait timeout_s seconds for the live ones, then give up the rest."""
    router.is_draining = True
    logger.info("draining %d requests", router.num_live)
    if mode == "handover":
        router.hand_over(is_unread=True)
    try:
        await asyncio.wait_for(router.calls.wait_idle(), timeout_s)
    except TimeoutError:
        fate = "are left to other routers" if mode == "handover" else "are ended"
        logger.warning(
            "requests that were not done in %g s %s: %d", timeout_s, fate, router.num_live
        )
        if mode == "handover":
            router.hand_over()
        else:
            router.abort_all()


if __name__ == "__main__":
    main()
