"""What only NVIDIA's software tells: of NVML, NCCL and compute capabilities."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass
class Nvml:
    """NVIDIA's management library, opened for one device; without a handle, the reason."""

    library: Any = None
    handle: Any = None
    reason: str | None = None


@contextmanager
def nvml_device(device: Any) -> Iterator[Nvml]:
    """Open NVML for a `torch.device`, whatever CUDA_VISIBLE_DEVICES renumbered it to."""
    if not is_nvidia(device):
        named = "CPU" if device.type == "cpu" else f"{device.type} device"
        yield Nvml(reason=f"a {named} has no NVML")
        return
    try:
        import pynvml
        import torch

        pynvml.nvmlInit()
    except Exception as error:  # every failure is a reason, none may stop a training run
        yield Nvml(reason=f"NVML cannot be opened: {error}")
        return
    try:
        try:
            uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
            opened = Nvml(pynvml, pynvml.nvmlDeviceGetHandleByUUID(uuid))
        except Exception as error:
            opened = Nvml(reason=f"NVML does not know the device: {error}")
        yield opened
    finally:
        pynvml.nvmlShutdown()


def is_nvidia(device: Any) -> bool:
    import torch

    return device.type == "cuda" and torch.version.hip is None


def capability(device: Any) -> tuple[int, int] | None:
    """(8, 0) of an A100, (9, 0) of an H100; None of any other device."""
    import torch

    return torch.cuda.get_device_capability(device) if is_nvidia(device) else None


def nccl_version() -> str | None:
    import torch

    try:
        version = torch.cuda.nccl.version()
    except Exception:  # a PyTorch without it
        return None
    return ".".join(map(str, version))
