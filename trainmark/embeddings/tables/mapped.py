"""Host memory that a GPU reads and writes by itself."""

import weakref

import torch
from torch import Tensor

from trainmark.errors import InputError
from trainmark.formatting import readable_size

_FROM_ALL_CONTEXTS = 3  # cudaHostRegisterPortable | cudaHostRegisterMapped
_NUMBERS_OF_A_PAGE = 1024  # fp32, 4 KiB


def map_to_gpu(zeros: Tensor, device: torch.device, *, owner: object) -> None:
    """Let kernels on `device` use a tensor of the CPU in place, for as long as `owner` lives.

    Nothing but zeros may have been written to it. Where there is no GPU, this does nothing.
    """
    if device.type != "cuda" or zeros.numel() == 0:
        return
    # The kernel provides the pages to all cores at a time: CUDA would ask for one after another.
    zeros.view(-1)[::_NUMBERS_OF_A_PAGE].zero_()
    cudart = torch.cuda.cudart()
    with torch.cuda.device(device):
        status = int(cudart.cudaHostRegister(zeros.data_ptr(), zeros.nbytes, _FROM_ALL_CONTEXTS))
    if status != 0:
        raise InputError(
            f"CUDA could not map {readable_size(zeros.nbytes)} of host memory for tables (error "
            f"{status}). Check 'ulimit -l' and the free memory, or keep fewer host_tables."
        )
    # Not at exit: the process takes the mapping with it, and CUDA may be gone before.
    weakref.finalize(owner, _unmap, zeros).atexit = False


def _unmap(tensor: Tensor) -> None:
    """Before its memory is freed: until then the finaliser keeps it."""
    torch.cuda.cudart().cudaHostUnregister(tensor.data_ptr())
