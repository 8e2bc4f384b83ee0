"""AMX, the matrix unit of some CPUs, on virtual machines that announce it and do not have it."""

import ctypes
import mmap
import os
import platform
from pathlib import Path

# mov eax, edi; mov ecx, esi; push rbx; cpuid; pop rbx; ret: (leaf, subleaf) -> eax, on Linux
_CPUID = bytes.fromhex("89f8 89f1 53 0fa2 5b c3")
_TILES = 0x1D


def avoid_missing_amx(processors: Path = Path("/proc/cpuinfo")) -> bool:
    """Keep oneDNN, which multiplies torch's matrices on a CPU, from an AMX that is not there.

    Some hypervisors pass on the flag of AMX, but not the description of its tiles, and refuse its
    instructions. oneDNN trusts the flag: the first product in bf16 ends the process ("illegal
    instruction"), or no other succeeds ("could not create a primitive"). It reads its setting at
    the first product; one that the user has made stays.

    Returns:
        Whether there was something to avoid.
    """
    if not _announces_amx(processors) or _has_tiles():
        return False
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
    return True


def _announces_amx(processors: Path) -> bool:
    if platform.machine() != "x86_64":
        return False
    try:
        with processors.open() as lines:  # of the first processor only: a server may have hundreds
            flags = next((line for line in lines if line.startswith("flags")), "")
    except OSError:  # not Linux, or not ours to read
        return False
    return "amx_tile" in flags.split()


def _has_tiles() -> bool:
    """Whether CPUID describes tiles; so, too, where it cannot be asked. Of leaves behind the last
    one it would repeat another's."""
    last = _cpuid(0)
    return last is None or (last >= _TILES and _cpuid(_TILES) != 0)


def _cpuid(leaf: int) -> int | None:
    """Register EAX of a leaf; None where a process may not execute what it has written."""
    try:
        page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    except OSError:
        return None
    page.write(_CPUID)
    address = ctypes.addressof(ctypes.c_char.from_buffer(page))
    read = ctypes.CFUNCTYPE(ctypes.c_uint32, ctypes.c_uint32, ctypes.c_uint32)(address)
    found: int = read(leaf, 0)
    return found
