"""Every test of the worker computes on one thread: the machine may be busy."""

import torch

torch.set_num_threads(1)
