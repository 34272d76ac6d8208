"""Fixtures of every test."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from gpuworker.machine import prepare_libraries

if TYPE_CHECKING:
    from tests.kubernetes.control_plane import ControlPlane

# How long an example takes says how busy the machine is.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")

# Before any test imports torch: a busy machine must not stall us.
prepare_libraries()


# `make test &` in a script starts us deaf to Ctrl-C, and what we start would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


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
