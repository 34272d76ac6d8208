"""What kind of device this is; knows torch, and nothing of Triton."""

import torch

from gpuworker.attention.triton.configs import Target


def detect(device: torch.device) -> Target:
    """The target that kernels are built for on a CUDA or ROCm device.

    Raises:
        RuntimeError: torch finds no such device.
    """
    properties = torch.cuda.get_device_properties(device)
    arch = f"sm{properties.major}{properties.minor}"
    if torch.version.hip is not None:
        # gfx942:sramecc+:xnack- and the like.
        arch = properties.gcnArchName.split(":")[0]
    return Target(arch, properties.multi_processor_count)


def float8_type(target: Target) -> torch.dtype | None:
    """The eight-bit float that a device computes with."""
    if not target.has_float8:
        return None
    return torch.float8_e4m3fnuz if target.is_amd else torch.float8_e4m3fn
