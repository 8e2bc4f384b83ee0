"""Host memory that a GPU reads and writes by itself."""

import weakref

import torch
from torch import Tensor

from trainmark.errors import InputError
from trainmark.formatting import readable_size
from trainmark.hardware.pinned import pin, unpin


def map_to_gpu(zeros: Tensor, device: torch.device, *, owner: object) -> None:
    """Let kernels on `device` use a tensor of the CPU in place, for as long as `owner` lives.

    Nothing but zeros may have been written to it. Where there is no GPU, this does nothing.
    """
    if device.type != "cuda" or zeros.numel() == 0:
        return
    if status := pin(zeros, device):
        raise InputError(
            f"CUDA could not map {readable_size(zeros.nbytes)} of host memory for tables (error "
            f"{status}). Check 'ulimit -l' and the free memory, or keep fewer host_tables."
        )
    # Not at exit: the process takes the mapping with it, and CUDA may be gone before. Until then
    # the finaliser keeps the memory.
    weakref.finalize(owner, unpin, zeros).atexit = False
