"""Stands in for gpuworker, scheduler and router: binds, says where, serves health, drains.

FAKE_<NAME> in the environment makes one misbehave: "crash" at start, "stubborn" at SIGTERM,
"late" in having its model ready. FAKE_READY_WORKERS is how many a router says are ready;
with FAKE_NO_CHAT_TEMPLATE its model takes text alone.
"""

import argparse
import asyncio
import os
import signal
import sys
from pathlib import Path

from headrace.service.config import load
from headrace.service.process import ProcessConfig, write_address
from headrace.service.progress import say
from headrace.service.serving import ServingConfig, stop_asked
from headrace.v1 import inference_pb2
from tests.headrace import fake_inference


class Unready(fake_inference.FakeInference):
    """Has no worker for the first answers."""

    num_asked = 0

    async def ListModels(self, request, context):
        self.num_asked += 1
        if self.num_asked < 3:
            return inference_pb2.ListModelsResponse()
        return await super().ListModels(request, context)


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("--listen")
    parser.add_argument("--address-file")
    parser.add_argument("--admin-listen")
    parser.add_argument("--admin-address-file", type=Path)
    parser.add_argument("--config", type=Path)
    parser.add_argument("--tls-cert-file")
    parser.add_argument("--tls-key-file")
    arguments, _ = parser.parse_known_args()
    behaviour = os.environ.get(f"FAKE_{arguments.name.upper()}", "")
    print(f"pid {os.getpid()} got {' '.join(sys.argv[2:])}", file=sys.stderr, flush=True)
    print(f"store {os.environ.get('HEADRACE_ROUTER_STORE_URL', '-')}", file=sys.stderr, flush=True)
    if behaviour == "crash":
        sys.exit("out of memory, or so")
    if behaviour == "late":
        fake_inference.FakeInference = Unready
    if arguments.name == "gpuworker":
        say("reading the weights: 1 of 2")
    names = ("listen", "tls_cert_file", "tls_key_file")
    config = load(
        ServingConfig,
        section="serving",
        file=arguments.config,
        environ=os.environ,
        overrides={name: getattr(arguments, name) for name in names},
    )
    _, server, address = await fake_inference.start(config)
    stop = stop_asked()
    write_address(ProcessConfig(address_file=arguments.address_file), address)
    if arguments.admin_listen:
        arguments.admin_address_file.write_text("http://127.0.0.1:1", encoding="utf-8")
    if behaviour == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        await asyncio.Event().wait()
    await stop.wait()
    print("draining", file=sys.stderr, flush=True)
    await server.stop(0)


asyncio.run(main())
