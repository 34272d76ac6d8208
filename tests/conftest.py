"""Fixtures of every test, and how long any of them may take."""

import asyncio
import functools
import gc
import inspect
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from xdist.scheduler import LoadScopeScheduling

from gpuworker.machine import prepare_libraries
from tests.headrace.ports import free_ports

if TYPE_CHECKING:
    from tests.kubernetes.control_plane import ControlPlane

KUBERNETES = ("tests/kubernetes/", "tests/cluster/")

# How long an example takes says how busy the machine is. Shrinking a failure takes minutes, and no
# timeout ends it: hypothesis takes the timeout for one more failure, and shrinks that too.
settings.register_profile("shrink", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile(
    "busy",
    settings.get_profile("shrink"),
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    print_blob=True,
)
settings.load_profile("busy")

# Before any test imports torch: a busy machine must not stall us.
prepare_libraries()


# `make test &` in a script starts us deaf to Ctrl-C, and what we start would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Coroutines get three quarters of a test's timeout.

    So the traceback shows the await that hangs, and what the test holds is closed. pytest-timeout
    would leave the coroutine in its loop, where it goes on beside the module's next tests.
    """
    for item in items:
        if isinstance(item, pytest.Function) and inspect.iscoroutinefunction(item.obj):
            marker = item.get_closest_marker("timeout")
            timeout_s = marker.args[0] if marker else float(config.getini("timeout"))
            item.obj = _bounded(item.obj, 0.75 * timeout_s)
    if hasattr(config, "workerinput"):
        # The files that take long come first: at the end no process waits long for the others.
        items.sort(key=lambda item: not any(map(item.get_closest_marker, ("system", "model"))))


class _Places(LoadScopeScheduling):
    """Which tests run in one process: those of a file, and those with the Kubernetes API server."""

    def _split_scope(self, nodeid: str) -> str:
        file, _, _ = nodeid.partition("::")
        return KUBERNETES[0] if file.startswith(KUBERNETES) else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> _Places:
    """What `-n` does with the tests."""
    return _Places(config, log)


def pytest_collection_finish() -> None:
    """What was imported is garbage for no test: a collection costs 1 ms then, and not 300."""
    gc.collect()
    gc.freeze()


def _bounded(test, timeout_s: float):
    @functools.wraps(test)
    async def bounded(*args, **kwargs):
        async with asyncio.timeout(timeout_s):
            await test(*args, **kwargs)

    return bounded


@pytest.fixture
def unused_tcp_port() -> int:
    """Not one that the kernel gives to a test beside this one."""
    return free_ports(1)[0]


@pytest.fixture(scope="session")
def model_path() -> Path:
    """SmolLM2-135M-Instruct's GGUF file, fetched once into the cache."""
    from headrace.service.model_files import resolve

    return resolve("smollm2-135m-instruct")


@pytest.fixture(scope="session")
def control_plane(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[ControlPlane]":
    """A real Kubernetes API server, for all tests that want one."""
    from tests.kubernetes.control_plane import ASSETS, ControlPlane, ControlPlaneUnavailableError

    try:
        plane = ControlPlane(tmp_path_factory.mktemp("kubernetes"))
    except ControlPlaneUnavailableError as error:
        if ASSETS in os.environ:
            raise
        pytest.skip(str(error))
    with plane:
        yield plane
