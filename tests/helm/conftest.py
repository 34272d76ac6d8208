"""Renders the chart with helm."""

import os

import pytest

from tests.helm.chart import Chart
from tests.helm.helm_binary import HelmUnavailableError, find_helm


@pytest.fixture(scope="session")
def chart() -> Chart:
    """The chart, rendered by a real helm."""
    try:
        return Chart(find_helm())
    except HelmUnavailableError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))
