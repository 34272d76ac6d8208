"""Triton kernels besides attention, and how kernels are launched."""
