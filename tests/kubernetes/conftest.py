"""The chart's fixture, whose Roles are tried out here."""

from tests.helm.conftest import chart

__all__ = ["chart"]
