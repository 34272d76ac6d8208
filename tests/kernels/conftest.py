"""These tests run under Triton's interpreter, in a process of their own: `make test-kernels`.

Whether kernels are interpreted is decided when triton is imported, for the whole process. Without
the interpreter there are only the tests that need a GPU.
"""

import os
from pathlib import Path

import torch

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ON_DEVICE = "test_on_device.py"
collect_ignore = [
    path.name
    for path in Path(__file__).parent.glob("test_*.py")
    if (path.name == ON_DEVICE) == IS_INTERPRETED
]
if IS_INTERPRETED:
    torch.set_num_threads(1)
