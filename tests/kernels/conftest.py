"""These tests run under Triton's interpreter, in a process of their own: `make test-kernels`.

Whether kernels are interpreted is decided when triton is imported, for the whole process.
"""

import os

import torch

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
collect_ignore_glob = [] if IS_INTERPRETED else ["test_*.py"]
if IS_INTERPRETED:
    torch.set_num_threads(1)
