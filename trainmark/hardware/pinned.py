"""Host memory that CUDA copies to and from at full speed, and that its kernels may use in place."""

import torch
from torch import Tensor

_FROM_ALL_CONTEXTS = 3  # cudaHostRegisterPortable | cudaHostRegisterMapped
_PAGE = 4096


def pin(zeros: Tensor, device: torch.device) -> int:
    """Pin a tensor of the CPU, to which nothing but zeros may have been written.

    Returns:
        0, or CUDA's number of what was wrong.
    """
    # The kernel provides the pages to all cores at a time: CUDA would ask for one after another.
    zeros.view(-1).view(torch.uint8)[::_PAGE].zero_()
    cudart = torch.cuda.cudart()
    with torch.cuda.device(device):
        return int(cudart.cudaHostRegister(zeros.data_ptr(), zeros.nbytes, _FROM_ALL_CONTEXTS))


def unpin(pinned: Tensor) -> None:
    """Unpin a tensor, before its memory is freed."""
    torch.cuda.cudart().cudaHostUnregister(pinned.data_ptr())
