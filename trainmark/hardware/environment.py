"""The environment block of a result: the machine, its accelerators and the software on it."""

import os
import platform
import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import trainmark
from trainmark.hardware import backends
from trainmark.hardware.devices import (
    cpu_name,
    host_memory_bytes,
    identify,
    read_if_there,
    usable_cores,
)
from trainmark.hardware.nvidia import Nvml, is_nvidia, nccl_version, nvml_device

PACKAGES = (
    "numpy", "numba", "pyarrow", "triton", "safetensors", "tokenizers", "transformers", "torchrec",
    "fbgemm-gpu", "pydantic", "tyro",
)  # fmt: skip


def environment(device: Any = "cpu") -> tuple[dict[str, Any], dict[str, Any]]:
    """The `hardware` and `software` of a result; null where something cannot be read."""
    import torch

    device = torch.device(device)
    on_accelerator = device.type != "cpu"
    with nvml_device(device) as nvml:
        hardware = {
            "machine": read_if_there("/sys/class/dmi/id/product_name"),
            "accelerator": identify(device).name if on_accelerator else None,
            "accelerators": len(backends.all_here()) if on_accelerator else 0,
            "cpu": cpu_name(),
            "cpu_cores": usable_cores(),
            "host_memory_bytes": host_memory_bytes(),
            "interconnect": _interconnect(nvml),
            "network": _network(),
        }
        driver = (
            _attempt(lambda: nvml.library.nvmlSystemGetDriverVersion()) if nvml.handle else None
        )
    software = {
        "os": _operating_system(),
        "kernel": platform.release(),
        "container": _container(),
        "container_image": _container_image(),
        "driver": driver,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "nccl": nccl_version() if device.type == "cuda" else None,
        "cudnn": _attempt(torch.backends.cudnn.version) if is_nvidia(device) else None,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "trainmark": trainmark.__version__,
        "packages": _packages(),
        "commit": commit(),
        "command": shlex.join(["trainmark", *sys.argv[1:]]),
    }
    return hardware, software


def _interconnect(nvml: Nvml) -> dict[str, Any] | None:
    """NVLink links that are up, and the PCIe link as the device could have it."""
    if nvml.handle is None:
        return None
    library, handle = nvml.library, nvml.handle
    return {
        "nvlink_links": _attempt(lambda: _active_nvlinks(library, handle)),
        "pcie_generation": _attempt(lambda: library.nvmlDeviceGetMaxPcieLinkGeneration(handle)),
        "pcie_width": _attempt(lambda: library.nvmlDeviceGetMaxPcieLinkWidth(handle)),
    }


def _active_nvlinks(library: Any, handle: Any) -> int:
    links = range(library.NVML_NVLINK_MAX_LINKS)
    return sum(
        _attempt(lambda link=link: library.nvmlDeviceGetNvLinkState(handle, link)) == 1
        for link in links
    )


def _attempt(query: Any) -> Any:
    """The answer of one NVML query, or None: drivers differ in what they answer."""
    try:
        return query()
    except Exception:
        return None


def _network(root: Path = Path("/sys/class")) -> dict[str, str]:
    """The rate of every InfiniBand port and network interface that tells one."""
    rates = {
        f"{port.parent.parent.name}/{port.name}": read_if_there(str(port / "rate"))
        for port in sorted(root.glob("infiniband/*/ports/*"))
    }
    for interface in sorted(root.glob("net/*")):
        megabits = read_if_there(str(interface / "speed"))  # -1, or an error, where there is none
        rates[interface.name] = f"{megabits} Mb/sec" if megabits and int(megabits) > 0 else None
    return {name: rate for name, rate in rates.items() if rate}


def _packages() -> dict[str, str]:
    """Versions of what computes, reads and writes."""
    versions = {name: _attempt(lambda name=name: metadata.version(name)) for name in PACKAGES}
    return {name: version for name, version in versions.items() if version}


def _operating_system() -> str:
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        return platform.platform(terse=True)


def _container() -> str:
    """The container runtime, by the marks that each leaves in the file system."""
    marks = {
        "/var/run/secrets/kubernetes.io": "kubernetes",
        "/.dockerenv": "docker",
        "/run/.containerenv": "podman",
        "/.singularity.d": "singularity",
    }
    return next((name for path, name in marks.items() if Path(path).exists()), "none")


def _container_image() -> str | None:
    """The container's image, where its runtime says so."""
    variables = ("APPTAINER_CONTAINER", "SINGULARITY_CONTAINER", "CONTAINER_IMAGE")
    return next((os.environ[name] for name in variables if os.environ.get(name)), None)


def commit() -> str | None:
    """The commit of the checkout that trainmark runs from; `-dirty` when files differ from it."""
    checkout = Path(trainmark.__file__).resolve().parent.parent
    # An installed copy may lie inside the checkout of another project; that commit is not ours.
    if not (checkout / ".git").exists():
        return None
    commit = _git(checkout, "rev-parse", "HEAD")
    changed = _git(checkout, "status", "--porcelain", "--untracked-files=no")
    return f"{commit}-dirty" if commit and changed else commit


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            timeout=5,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
