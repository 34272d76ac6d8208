"""Commands that the chart runs or tells to run are commands of this version."""

import re
import shlex

import pytest

from headrace.cli.app import main
from tests.helm.cases import CERT_MANAGER, SUPPLIED
from tests.helm.chart import CHART


def parse(command):
    """Raises where the command line has no such command or flag."""
    program, name, *arguments = command
    assert program == "headrace"
    context = main.make_context("headrace", [name, *arguments])
    with context:
        _, found, rest = main.resolve_command(context, [name, *arguments])
        return found.make_context(name, list(rest), parent=context).params


@pytest.mark.parametrize("values", [{}, {"tls": CERT_MANAGER}, {"tls": SUPPLIED}])
def test_the_test_is_a_command(chart, values):
    pod = chart.render({**values, "tests": {"prompt": "-v 'x'"}}).pods()["hr-headrace-test"]
    params = parse(pod["containers"][0]["command"])
    assert params["prompt"] == "-v 'x'"
    assert params["max_tokens"] == params["min_tokens"] == 8


@pytest.mark.parametrize("flags", ["", "tls.enabled=true,tls.certManager.enabled=true"])
def test_the_notes_tell_the_next_command(chart, flags):
    output = chart.run(
        *("install", "hr", str(CHART), "--namespace", "space", "--dry-run=client"),
        *(("--set", flags) if flags else ()),
    )
    notes = output.partition("NOTES:")[2]
    assert "helm test --namespace space hr" in notes
    command = re.search(r"^ *(headrace generate .*)$", notes, re.MULTILINE)
    params = parse(shlex.split(command[1]))
    assert params["server"] == "localhost:8700"
    assert params["auth_token_file"] == "token"
    assert bool(params["tls_ca_file"]) == bool(flags)
