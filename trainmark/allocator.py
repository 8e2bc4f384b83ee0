"""Host memory for CPU training: what a step frees, the next step gets back without asking."""

import ctypes
import platform

# From glibc's malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4


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
