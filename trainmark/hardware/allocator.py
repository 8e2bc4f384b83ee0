"""Host memory for CPU training: what a step frees, the next step gets back without asking."""

import ctypes
import mmap
import platform
from typing import Any

# From glibc's malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4
_HUGE_PAGE = 2**21


def keep_freed_memory() -> bool:
    """Let malloc keep what is freed, instead of returning large blocks to the kernel at once.

    glibc maps every block over 32 MiB anew. A step's large tensors then fault in all their pages,
    in every step: as expensive as the mathematics that fills them. The price is that a process
    stays as large as it once was; so this is for training, where all steps are alike.

    Returns:
        Whether it was done: only glibc has the settings.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    libc.malloc_trim(0)  # what an earlier run in this process has freed is not for this one
    return bool(libc.mallopt(_M_MMAP_MAX, 0)) and bool(libc.mallopt(_M_TRIM_THRESHOLD, -1))


def use_huge_pages(tensor: Any) -> bool:
    """Ask the kernel to back a tensor that nothing was written to yet by pages of 2 MiB.

    Rows of a large table are read from all over it, and with pages of 4 KiB nearly each one costs
    a walk through the page tables besides: a third of the time of a lookup.

    Returns:
        Whether it was asked: the tensor must be in Linux's memory, and larger than such a page.
    """
    begin = -(-tensor.data_ptr() // _HUGE_PAGE) * _HUGE_PAGE
    end = (tensor.data_ptr() + tensor.nbytes) // _HUGE_PAGE * _HUGE_PAGE
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if tensor.device.type != "cpu" or advice is None or end <= begin:
        return False
    arguments = ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), ctypes.c_int(advice)
    return bool(ctypes.CDLL(None).madvise(*arguments) == 0)
