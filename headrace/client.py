"""Async client of the public API (headrace.v1.Inference)."""
