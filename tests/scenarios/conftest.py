"""Scenarios end with the leak check of every scheduler test."""

from tests.scheduler.core.conftest import make_core

__all__ = ["make_core"]
