"""Copies between host and device, CUDA graphs, and device memory."""
