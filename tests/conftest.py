"""What all tests share."""

import os

# One thread each: two test processes with two threads each on two cores wait for one another.
# Set before torch is imported, and inherited by the processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

# Triton reads this when it is imported. Without a GPU, kernels are tested in its interpreter.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
