"""Headrace on one machine: router, scheduler and gpuworker as child processes."""
