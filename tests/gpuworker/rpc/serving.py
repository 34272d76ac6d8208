"""A worker service on a loopback port with a tiny model behind it, and plans for it."""

import threading
from pathlib import Path
from typing import Any

import grpc.aio
from grpc_health.v1 import health_pb2_grpc

from gpuworker.core.plan import ExecutedStep, ReceivedPlan
from gpuworker.engine import LoadedModel
from gpuworker.rpc.service import GpuWorkerService
from gpuworker.runner import PendingStep
from headrace.service.columns import pack_int32, unpack_int32
from headrace.v1 import common_pb2, gpuworker_pb2, gpuworker_pb2_grpc
from tests.gpuworker.driver import GREEDY, Driver, int32
from tests.gpuworker.tiny import make_runner

PROMPT = [9, 20, 31, 42, 53]


class GatedRunner:
    """A runner whose steps wait until the gate is open: a long step, of a length we decide."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self.limits = runner.limits
        self.num_spec_tokens = runner.num_spec_tokens
        self.gate = threading.Event()
        self.gate.set()
        self.has_begun = threading.Event()
        self.threads: set[str] = set()

    @property
    def num_requests(self) -> int:
        return self._runner.num_requests

    def reset(self) -> None:
        self._runner.reset()

    def launch(self, plan: ReceivedPlan) -> PendingStep:
        self.threads.add(threading.current_thread().name)
        self.has_begun.set()
        assert self.gate.wait(30)
        return self._runner.launch(plan)


class DeviceRunner(GatedRunner):
    """A runner whose steps are launched at once, and then take the device until it may go on.

    `launched` and `finished` are step ids in their order.
    """

    def __init__(self, runner: Any) -> None:
        super().__init__(runner)
        self.device_may_go_on = threading.Event()
        self.launched: list[int] = []
        self.finished: list[int] = []

    def launch(self, plan: ReceivedPlan) -> Any:
        step = super().launch(plan)
        self.launched.append(plan.step_id)
        return DeviceStep(self, step)


class DeviceStep:
    def __init__(self, runner: DeviceRunner, step: PendingStep) -> None:
        self._runner = runner
        self._step = step

    @property
    def is_done(self) -> bool:
        return self._runner.device_may_go_on.is_set()

    def wait(self) -> None:
        assert self._runner.device_may_go_on.wait(30)

    def finish(self) -> ExecutedStep:
        self._runner.threads.add(threading.current_thread().name)
        result = self._step.finish()
        self._runner.finished.append(result.step_id)
        return result


class Worker:
    def __init__(self, service: GpuWorkerService, channel: grpc.aio.Channel, runner: Any) -> None:
        self.server: Any = None
        self.service = service
        self.stub = gpuworker_pb2_grpc.GpuWorkerStub(channel)
        self.health = health_pb2_grpc.HealthStub(channel)
        self.runner = runner


def load(worker: Worker) -> None:
    worker.service.set_engine(
        LoadedModel(worker.runner, "cpu", "float32", "float32", pipeline_depth=2)
    )


def first_plan(row: int = 2, block: int = 5) -> gpuworker_pb2.StepPlan:
    return gpuworker_pb2.StepPlan(
        step_id=1,
        row_requests=[
            gpuworker_pb2.RowRequest(
                row=row,
                request_id="a",
                token_ids=pack_int32(int32(*PROMPT)),
                num_prompt_tokens=len(PROMPT),
                sampling=common_pb2.SamplingParams(temperature=0.0),
            )
        ],
        appended_block_rows=pack_int32(int32(row)),
        appended_block_ids=pack_int32(int32(block)),
        rows=pack_int32(int32(row)),
        num_computed_tokens=pack_int32(int32(0)),
        num_scheduled_tokens=pack_int32(int32(len(PROMPT))),
    )


def next_plan(step_id: int, row: int = 2) -> gpuworker_pb2.StepPlan:
    return gpuworker_pb2.StepPlan(
        step_id=step_id,
        rows=pack_int32(int32(row)),
        num_computed_tokens=pack_int32(int32(len(PROMPT) + step_id - 2)),
        num_scheduled_tokens=pack_int32(int32(1)),
    )


def tokens_of(result: gpuworker_pb2.StepResult) -> list[int]:
    return unpack_int32(result.token_ids, "token_ids").tolist()


def expected_tokens(checkpoint: Path, count: int) -> list[int]:
    driver = Driver(make_runner(checkpoint, num_kv_blocks=20))
    driver.add(0, PROMPT, GREEDY)
    return driver.finish(0, count)
