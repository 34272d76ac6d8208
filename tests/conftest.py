"""Fixtures of every test."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def model_path() -> Path:
    """SmolLM2-135M-Instruct's GGUF file, fetched once into the cache."""
    from headrace.service.model_files import resolve

    return resolve("smollm2-135m-instruct")
