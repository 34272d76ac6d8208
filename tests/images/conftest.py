"""Builds the images once; `HEADRACE_IMAGES` names the services, without torch's by default."""

import os

import pytest

from tests.containers.runtime import RuntimeUnavailableError, need_programs
from tests.images.builder import Builder


def pytest_generate_tests(metafunc):
    if "service" in metafunc.fixturenames:
        services = (os.environ.get("HEADRACE_IMAGES") or "router scheduler").split()
        metafunc.parametrize("service", services, scope="module")


@pytest.fixture(scope="session")
def builder():
    """buildah, on a machine that can run containers."""
    try:
        need_programs("buildah", "debootstrap")
    except RuntimeUnavailableError as error:
        pytest.skip(f"images cannot be built here: {error}")
    return Builder()
