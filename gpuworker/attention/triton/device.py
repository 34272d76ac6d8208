"""Detects the kind of device through torch, without importing Triton."""

import torch

from gpuworker.attention.triton.configs import Target


def detect(device: torch.device) -> Target:
    """The target that kernels are compiled for on a CUDA or ROCm device.

    Raises:
        RuntimeError: torch finds no such device.
    """
    properties = torch.cuda.get_device_properties(device)
    arch = f"sm{properties.major}{properties.minor}"
    if torch.version.hip is not None:
        # For example "gfx942:sramecc+:xnack-".
        arch = properties.gcnArchName.split(":")[0]
    return Target(arch, properties.multi_processor_count)


def float8_type(target: Target) -> torch.dtype | None:
    """The eight-bit float type that a device supports."""
    if not target.has_float8:
        return None
    return torch.float8_e4m3fnuz if target.is_amd else torch.float8_e4m3fn
