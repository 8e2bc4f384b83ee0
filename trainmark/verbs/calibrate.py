"""`trainmark calibrate`: measure this machine, and write the `hardware.toml` that `plan` reads.

Under torchrun, all ranks measure at the same time, as they would train, and the links between them
are measured, too. Rates of GPUs are of one device; rates of CPUs are of all ranks of a machine
together. CPUs are measured in several rounds, and the median counts, because other programs may use
them. `bench.py` measures a device, `calibrate_steps.py` what whole steps take beyond its rates.
"""

import dataclasses
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trainmark import __version__
from trainmark.distributed import launched
from trainmark.distributed import mesh as meshes
from trainmark.files import write_atomically
from trainmark.hardware import backends, devices, hardware_file, known
from trainmark.hardware.allocator import keep_freed_memory
from trainmark.hardware.backends import DeviceChoice
from trainmark.hardware.devices import Peak, peak_flops
from trainmark.hardware.known import CPU, Figure, Known, Measured
from trainmark.verbs.bench import CPU_SCALE, GPU_SCALE, Bench, Scale
from trainmark.verbs.calibrate_steps import with_whole_steps


def calibrate(device: DeviceChoice, output: Path) -> Path | None:
    """Measure, and write the file; returns its path on the rank that wrote it."""
    if output.is_dir():
        output = output / hardware_file.FILE_NAME
    kind = backends.chosen(device)
    if kind == "cpu":
        keep_freed_memory()  # as training does
    with _ranks(kind) as here:
        found = measure(here, CPU_SCALE if kind == "cpu" else GPU_SCALE, output.parent)
        if not meshes.is_main_process():
            return None
        output.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(output, hardware_file.text(found))
        return output


@contextmanager
def _ranks(kind: str) -> Iterator[torch.device]:
    """This process's device; joins the other ranks where a launcher started several."""
    here = meshes.local_device(kind)
    if kind != "cpu":
        backends.make_current(here)
    several = meshes.launched_ranks() > 1
    if several:
        launched.join(backends.collectives(here))
    yield here
    if several:
        dist.destroy_process_group()


def measure(here: torch.device, scale: Scale, folder: Path) -> Known:
    """All that is known of this device, the vendor's figures and what was measured now."""
    device = devices.identify(here)
    bench = Bench(here, scale)
    own = _combined([bench.rates() for _ in range(scale.rounds)], statistics.median)
    node, network, collective_s = _links(here, scale.copy_bytes)
    who = f"trainmark {__version__} calibrate"
    own = dataclasses.replace(
        own,
        source=f"{who}, {datetime.now(UTC):%Y-%m-%d}, {meshes.launched_ranks()} rank(s)",
        node=node,
        network=network,
        collective_s=collective_s,
        disk=_disk(folder, scale.file_bytes),
    )
    peaks = {name: peak_flops(device, name) for name in devices.PRECISIONS}
    table = known.from_tables(device.key) or Known(key=device.key, name="")
    system = "the kernel, or the container's limit" if device.key == CPU else "the driver"
    found = dataclasses.replace(
        table,
        name=device.name,
        memory=Figure(device.memory_bytes, system),
        peaks={n: Figure(p.flops, p.source) for n, p in peaks.items() if isinstance(p, Peak)},
        measured=_over_ranks(own, shared=device.key == CPU),
    )
    return with_whole_steps(found, here) if device.key == CPU else found


def _over_ranks(own: Measured, shared: bool) -> Measured:
    """The mean over ranks; for CPUs, the sum of the ranks of a machine."""
    every = meshes.of_all_ranks(own)
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", str(len(every)))) if shared else 1
    return _combined(every, statistics.mean).scaled(per_node)


def _combined(found: Sequence[Measured], how: Callable[[Sequence[float]], float]) -> Measured:
    """Combine measurements figure by figure: the mean, or the median, of those that have it."""

    def of(values: Sequence[Any]) -> Any:
        values = [value for value in values if value is not None]
        if not values or isinstance(values[0], str):
            return values[0] if values else None
        if isinstance(values[0], Mapping):
            return {key: of([value[key] for value in values]) for key in values[0]}
        return how(values)

    names = [field.name for field in dataclasses.fields(Measured)]
    return Measured(**{name: of([getattr(one, name) for one in found]) for name in names})


# --- besides the device itself


def _disk(folder: Path, file_bytes: int) -> float | None:
    """Reading where the file will be, after the system was asked to forget what it holds."""
    if not meshes.is_main_process():
        return None
    folder.mkdir(parents=True, exist_ok=True)
    block = os.urandom(2**20)
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        for _ in range(file_bytes // len(block)):
            file.write(block)
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        begin = time.perf_counter()
        while file.read(2**22):
            pass
        return file_bytes / (time.perf_counter() - begin)


def _links(here: torch.device, copy_bytes: int) -> tuple[float | None, float | None, float | None]:
    """Bytes per second that leave a device in an all-reduce: within a node, and between nodes; and
    seconds of one of a single number among all ranks."""
    ranks = meshes.launched_ranks()
    if ranks == 1:
        return None, None, None
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", str(ranks)))
    nodes = ranks // per_node
    within = [[node * per_node + i for i in range(per_node)] for node in range(nodes)]
    between = [[node * per_node + i for node in range(nodes)] for i in range(per_node)]
    small = _all_reduce_s(here, 1, [list(range(ranks))], repeats=100)
    return _sent_per_s(here, copy_bytes, within), _sent_per_s(here, copy_bytes, between), small


def _sent_per_s(here: torch.device, copy_bytes: int, groups: list[list[int]]) -> float | None:
    """Bytes per second that a rank sends in an all-reduce, while all groups run one."""
    size, numbers = len(groups[0]), copy_bytes // 32
    if size == 1:
        return None
    sent = meshes.all_reduce_sent_bytes(numbers * 4, size)
    return sent / _all_reduce_s(here, numbers, groups, repeats=1)


def _all_reduce_s(here: torch.device, numbers: int, groups: list[list[int]], repeats: int) -> float:
    """Seconds of an all-reduce on the slowest rank; every rank is in one of the groups."""
    made = [(ranks, dist.new_group(ranks)) for ranks in groups]
    own = next(group for ranks, group in made if dist.get_rank() in ranks)
    tensor = torch.zeros(numbers, device=here)
    wait = backends.synchronizer(here)
    dist.all_reduce(tensor, group=own)
    times = []
    for _ in range(5):  # the same on all ranks, or they would wait for each other
        dist.barrier()
        wait()
        begin = time.perf_counter()
        for _ in range(repeats):
            dist.all_reduce(tensor, group=own)
        wait()
        times.append((time.perf_counter() - begin) / repeats)
    return max(meshes.of_all_ranks(statistics.median(times)))
