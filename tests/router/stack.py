"""A whole router in the test's process, between a fake scheduler and a real client."""

import asyncio
import contextlib
import uuid
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import grpc.aio

from headrace.service.channels import ChannelConfig, open_channel
from headrace.service.serving import GrpcServer, ServingConfig
from headrace.status.states import Writer
from headrace.status.store import StatusStore
from headrace.v1 import inference_pb2, inference_pb2_grpc
from router.__main__ import build_router, build_take_ups
from router.aborts import Aborts
from router.config import (
    RecoveryConfig,
    RouterConfig,
    StreamsConfig,
    TenantConfig,
    TenantsConfig,
    rules_of,
)
from router.prompts import PromptReader
from router.recovery import Recovery
from router.router import Router
from router.rpc.access import FULL_NAME, TENANT_METHODS
from router.rpc.inference import InferenceService, Services
from router.rpc.model_defaults import ModelDefaults
from router.rpc.scheduler_client import SchedulerClient
from router.status_log import Identity
from tests.router.fake_scheduler import MODEL, FakeScheduler
from tests.router.tiny_models import byte_level_model


@dataclass
class Stack:
    """Everything of one test."""

    router: Router
    scheduler: FakeScheduler
    stub: Any
    channel: grpc.aio.Channel
    address: str
    services: Services
    store: StatusStore
    recovery: Recovery

    def generate(self, text="hello", *, timeout=20, metadata=(), **fields):
        sampling = fields.pop("sampling", {"max_tokens": 8})
        if not {"token_ids", "chat"} & fields.keys():
            fields["text"] = text
        request = inference_pb2.GenerateRequest(sampling=sampling, **fields)
        return self.stub.Generate(request, timeout=timeout, metadata=metadata)

    def resume(self, request_id, *from_token, timeout=20):
        """from_token: one for all completions, or one for each."""
        by_index = from_token if len(from_token) > 1 else ()
        first = 0 if by_index else from_token[0]
        request = inference_pb2.ResumeRequest(
            request_id=request_id, from_token=first, from_token_by_index=by_index
        )
        return self.stub.Resume(request, timeout=timeout)

    @staticmethod
    async def rest(call):
        """The messages that a call has not given yet, when some were taken with read."""
        messages = []
        while (message := await call.read()) is not grpc.aio.EOF:
            messages.append(message)
        return messages

    async def answer(self, *args, **kwargs):
        """All messages of a call that ends well."""
        return [message async for message in self.generate(*args, **kwargs)]

    async def text(self, *args, **kwargs):
        messages = await self.answer(*args, **kwargs)
        return "".join(output.text for message in messages for output in message.outputs)

    async def until(self, condition):
        """Wait until something is so; the test's own timeout ends it."""
        async with asyncio.timeout(20):
            while not condition():  # noqa: ASYNC110 the conditions are of many kinds
                await asyncio.sleep(0.002)

    @property
    def is_empty(self):
        router = self.router
        return not (
            router.num_live
            or router.num_queued
            or router.num_in_flight
            or router.live._requests
            or router._gate.num_reading
            or len(router.live._deadlines)
            or len(router._orphans)
            or router._dispatcher._restraint.num_streams
            or router.num_paused
            or router._dispatcher.queue.load.num_tokens
            or router.pool.num_in_flight()
        )


@contextlib.asynccontextmanager
async def running_stack(
    *,
    schedulers=None,
    models=None,
    defaults=None,
    scheduler=None,
    store_url="",
    router_id="router-0",
    serving=None,
    **settings,
):
    tenant = TenantConfig(**settings.pop("tenant", {}))
    named = {name: TenantConfig(**values) for name, values in settings.pop("named", {}).items()}
    streams = StreamsConfig(**settings.pop("streams", {}))
    recovery = RecoveryConfig(**settings.pop("recovery", {}))
    config = RouterConfig(**settings)
    rules = rules_of(config, streams, recovery, tenant, TenantsConfig(named=named))
    async with contextlib.AsyncExitStack() as stack:
        if schedulers is None:
            schedulers = [await stack.enter_async_context(scheduler or FakeScheduler())]
        store = await stack.enter_async_context(StatusStore(store_url, Writer.ROUTER))
        models = models or {MODEL: byte_level_model()}
        prompts = PromptReader(models)
        stack.callback(prompts.close)
        identity = Identity(router_id, uuid.uuid4().hex)
        router = build_router(config, rules, store, identity)
        clients = []
        for one in schedulers:
            channel = open_channel(one.address, ChannelConfig())
            stack.push_async_callback(channel.close)
            clients.append(SchedulerClient(one.address, channel, router, router_id=router_id))
        take_ups = build_take_ups(router, store, identity, models)
        services = Services(
            router=router,
            models=models,
            defaults=defaultdict(ModelDefaults, defaults or {}),
            prompts=prompts,
            schedulers=clients,
            status=store,
            take_ups=take_ups,
            aborts=Aborts(router, take_ups, store, clients),
            max_prompt_bytes=config.max_prompt_bytes,
        )
        lost = Recovery(
            *(router, take_ups, store),
            identity=identity,
            max_recoveries=recovery.max_recoveries,
        )
        server = GrpcServer(serving or ServingConfig(), [FULL_NAME], tenant_methods=TENANT_METHODS)
        InferenceService(services).add_to(server.server)
        address = await server.start()
        stack.push_async_callback(server.stop, 0)
        tasks = [
            asyncio.create_task(store.run()),
            asyncio.create_task(store.hold_lease("router", router_id, identity.incarnation)),
            asyncio.create_task(router.run_deadlines()),
            *(asyncio.create_task(client.run()) for client in clients),
        ]
        channel = open_channel(address, ChannelConfig())
        stack.push_async_callback(channel.close)
        stub = inference_pb2_grpc.InferenceStub(channel)
        ours = Stack(router, schedulers[0], stub, channel, address, services, store, lost)
        try:
            await ours.until(router.pool.reports)
            yield ours
            await ours.until(lambda: ours.is_empty)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
