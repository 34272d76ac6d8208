"""Paged attention for GPUs, in Triton."""
