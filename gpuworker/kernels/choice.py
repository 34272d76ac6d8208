"""Chooses the implementation of `Ops` for a device."""

import logging

import torch

from gpuworker.kernels.ops import Ops
from gpuworker.kernels.twins import TorchOps

logger = logging.getLogger(__name__)


def ops_for(device: torch.device) -> Ops:
    """Fused kernels on a GPU, torch on other devices; triton is imported only for a GPU.

    Raises:
        ValueError: triton is installed but cannot launch kernels.
    """
    if device.type != "cuda":
        return TorchOps()
    try:
        from gpuworker.kernels.fused import TritonOps
        from gpuworker.kernels.launch import make_ready
    except ImportError as error:
        logger.warning("norms, rotations and gates by torch, which is slower: %s", error)
        return TorchOps()
    make_ready()
    return TritonOps()
