"""The kinds of devices that `--device` names, and how PyTorch reaches each.

Whoever has a question about the device of this process asks here or, about streams and events,
`torch.accelerator`; `torch.cuda` is for kernels and counters that are NVIDIA's own. What a new back
end needs is in docs/other_hardware.md. Importing this is cheap; torch is imported on use.
"""

from __future__ import annotations

import ctypes
import importlib.util
import runpy
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from trainmark.errors import InputError

if TYPE_CHECKING:
    import torch

Kind = Literal["cpu", "cuda", "rocm", "xpu", "npu", "mps"]
DeviceChoice = Literal["auto", Kind]
"""What `--device` may say. `auto` is a GPU that PyTorch calls cuda, if there is one, else the CPU:
devices that nobody has trained on here yet are taken by name only."""


@dataclass(frozen=True, kw_only=True)
class Backend:
    """How one kind of device is reached."""

    what: str
    """What it is, after `no`."""
    torch_type: str
    """What PyTorch calls it."""
    collectives: str
    """The backend of torch.distributed between such devices."""
    comes_with: str
    """The software that brings it."""
    own_kernels: bool = False
    """Whether there are kernels for it here, in Triton or numba. Others compute by plain PyTorch,
    and torch.compile is off by default."""
    cannot_train: str | None = None
    """Why only plans and dry runs are possible."""


BACKENDS: dict[Kind, Backend] = {
    "cpu": Backend(
        what="CPU",
        torch_type="cpu",
        collectives="gloo",
        comes_with="any PyTorch",
        own_kernels=True,
    ),
    "cuda": Backend(
        what="CUDA device",
        torch_type="cuda",
        collectives="nccl",
        comes_with="PyTorch for CUDA",
        own_kernels=True,
    ),
    "rocm": Backend(
        what="AMD GPU",
        torch_type="cuda",  # ROCm's PyTorch has CUDA's names, and calls RCCL nccl
        collectives="nccl",
        comes_with="PyTorch for ROCm",
        own_kernels=True,
    ),
    "xpu": Backend(
        what="Intel GPU", torch_type="xpu", collectives="xccl", comes_with="PyTorch for XPU"
    ),
    "npu": Backend(what="Ascend NPU", torch_type="npu", collectives="hccl", comes_with="torch_npu"),
    "mps": Backend(
        what="Apple GPU",
        torch_type="mps",
        collectives="gloo",
        comes_with="PyTorch for macOS",
        cannot_train="it has no float64, in which metrics are computed",
    ),
}


# --- which one


def here() -> Kind | None:
    """The kind of accelerator that this process sees; None without one, or of one unknown."""
    import torch

    if not torch.accelerator.is_available():
        return None
    accelerator = torch.accelerator.current_accelerator()
    return None if accelerator is None else kind_of(accelerator)


def kind_of(device: torch.device) -> Kind | None:
    """What `--device` calls a device of PyTorch's; None for a stranger."""
    import torch

    if device.type == "cuda":
        return "rocm" if torch.version.hip else "cuda"
    return device.type if device.type in BACKENDS else None


def chosen(choice: str) -> Kind:
    """The kind of device that `--device` means on this machine; refuses what is not here."""
    if choice == "cpu" or (choice == "auto" and _surely_without_gpu()):
        return "cpu"
    found = here()
    if choice == "auto":
        return found if found in ("cuda", "rocm") else "cpu"
    kind = cast(Kind, choice)
    backend = BACKENDS[kind]
    is_it = found == kind or (kind == "cuda" and found == "rocm")  # as PyTorch calls AMD's, too
    if found is None or not is_it:
        raise InputError(
            f"--device {choice}: PyTorch finds no {backend.what} here (it takes "
            f"{backend.comes_with}). Use --device {found or 'cpu'}."
        )
    if backend.cannot_train:
        raise InputError(f"--device {choice}: {backend.cannot_train}. Use --device cpu.")
    return found


def _surely_without_gpu() -> bool:
    """Whether PyTorch, which takes seconds to load, need not be asked for one: it was built for
    CPUs, or the driver that it would ask is not installed."""
    found = importlib.util.find_spec("torch")
    if "torch" in sys.modules or found is None or found.origin is None:
        return False
    built = runpy.run_path(str(Path(found.origin).with_name("version.py")))
    if built.get("hip"):
        return not Path("/dev/kfd").exists()
    if built.get("cuda") is None:
        return True
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return sys.platform == "linux"
    return False


def is_accelerator(choice: str) -> bool:
    """Whether a resolved run's device has memory of its own."""
    return choice not in ("auto", "cpu")


def has_own_kernels(choice: str) -> bool:
    """Whether there are kernels for it; `auto` takes no other."""
    return choice == "auto" or BACKENDS[cast(Kind, choice)].own_kernels


def sentence(choice: DeviceChoice) -> str:
    """What a run would use, also on machines without it; empty for `auto`."""
    if choice == "auto":
        return ""
    backend = BACKENDS[choice]
    compute = "trainmark's own kernels" if backend.own_kernels else "plain PyTorch"
    lacking = f" No training yet: {backend.cannot_train}." if backend.cannot_train else ""
    return (
        f"--device {choice}: PyTorch's {backend.torch_type!r} ({backend.comes_with}), {compute}, "
        f"collectives by {backend.collectives}.{lacking}"
    )


def collectives(device: torch.device) -> str:
    """The backend of torch.distributed between devices like this one."""
    kind = kind_of(device)
    return BACKENDS[kind or "cpu"].collectives


# --- the device of this process


def device_of(kind: str, index: int) -> torch.device:
    """PyTorch's device of that kind and number; there is one CPU."""
    import torch

    name = BACKENDS[cast(Kind, kind)].torch_type
    return torch.device(name) if name == "cpu" else torch.device(name, index)


def all_here() -> list[torch.device]:
    """Every accelerator that this process sees."""
    import torch

    kind = here()
    count = torch.accelerator.device_count() if kind else 0
    return [device_of(cast(str, kind), index) for index in range(count)]


def make_current(device: torch.device) -> None:
    """Streams, barriers and broadcasts of objects take the current device: this rank's."""
    import torch

    found = torch.accelerator.device_count()
    if (device.index or 0) >= found:
        raise InputError(
            f"A rank was started for device {device.index} of this machine, which has {found}. "
            f"Start at most {found} ranks here (launch -j NODESx{found}), or use --device cpu."
        )
    torch.accelerator.set_device_index(device)


def is_in_use() -> bool:
    """Whether this process has begun to use an accelerator."""
    import torch

    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return False
    module = torch.get_device_module(accelerator)
    return bool(getattr(module, "is_initialized", lambda: False)())


def synchronizer(device: torch.device) -> Callable[[], None]:
    """A function that waits for the device; a CPU is always done."""
    import torch

    if device.type == "cpu":
        return lambda: None
    return lambda: torch.accelerator.synchronize(device)


def name_and_memory(accelerator: torch.device) -> tuple[str, int]:
    """Name and memory, as the driver gives them; PyTorch's name where a back end has none."""
    import torch

    module = torch.get_device_module(accelerator)
    properties: Any = getattr(module, "get_device_properties", lambda device: None)(accelerator)
    if properties is None:
        return accelerator.type, _memory_info(accelerator)[1]
    return str(properties.name), int(properties.total_memory)


# --- memory


def free_bytes(accelerator: torch.device) -> int:
    return _memory_info(accelerator)[0]


def _memory_info(accelerator: torch.device) -> tuple[int, int]:
    """Free and total bytes."""
    import torch

    torch.accelerator.current_device_index()  # which makes the back end ready, where nothing has
    free, total = torch.accelerator.get_memory_info(accelerator)
    return free, total


def peak_bytes(accelerator: torch.device) -> tuple[int, int]:
    """The most that PyTorch has allocated for tensors, and the most that it has reserved."""
    import torch

    return (
        torch.accelerator.max_memory_allocated(accelerator),
        torch.accelerator.max_memory_reserved(accelerator),
    )


def reset_peaks(device: torch.device) -> None:
    import torch

    if device.type != "cpu":
        torch.accelerator.reset_peak_memory_stats(device)


def empty_cache() -> None:
    """Give back what PyTorch keeps of freed memory."""
    import torch

    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()
