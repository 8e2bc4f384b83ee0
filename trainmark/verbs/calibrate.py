"""`trainmark calibrate`: measure this machine, and write the `hardware.toml` that `plan` reads.

Under torchrun, all ranks measure at the same time, as they would train, and the links between them
are measured, too. Rates of GPUs are of one device; rates of CPUs are of all ranks of a machine
together.
"""

import dataclasses
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainmark import __version__
from trainmark.distributed import launched
from trainmark.distributed import mesh as meshes
from trainmark.embeddings.placement.costs import MIN_ACCESS, STATE_BYTES
from trainmark.embeddings.tables.row_update import Settings
from trainmark.embeddings.tables.store import TableStore, whole_table
from trainmark.embeddings.tables.update import make_rule
from trainmark.files import write_atomically
from trainmark.hardware import backends, devices, hardware_file, known
from trainmark.hardware.allocator import use_huge_pages
from trainmark.hardware.backends import DeviceChoice
from trainmark.hardware.devices import Peak, peak_flops
from trainmark.hardware.known import CPU, ByWidth, Figure, Known, Measured
from trainmark.hardware.nvidia import capability
from trainmark.kernels.compiled import in_threads
from trainmark.kernels.interaction import dot_interaction
from trainmark.training.precision import set_matmul_precision

GEMM_WIDTHS = (16, 64, 256, 1024, 4096)
TABLE_WIDTHS = (16, 64, 128)
"""Columns, of 4 bytes."""
VECTORS = 27
"""Vectors of a sample whose dot products are timed: as many as Criteo's log has."""
LONG_S = 0.005
"""Seconds of work on a device, compared with which the host's waiting is short."""
DTYPES = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


@dataclass(frozen=True)
class Scale:
    """How much work to time: enough for some milliseconds."""

    rows: int
    """Rows of the tall matrix in a GEMM."""
    widest: int
    """Widest square matrix of a GEMM."""
    table_bytes: int
    lookups: int
    copy_bytes: int
    file_bytes: int
    budget_s: float = 0.3
    """Seconds to spend on each figure."""


CPU_SCALE = Scale(2048, 1024, 2**28, 2**18, 2**27, 2**27)
GPU_SCALE = Scale(65536, 4096, 2**32, 2**21, 2**31, 2**29)


def calibrate(device: DeviceChoice, output: Path) -> Path | None:
    """Measure, and write the file; returns its path on the rank that wrote it."""
    if output.is_dir():
        output = output / hardware_file.FILE_NAME
    kind = backends.chosen(device)
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
    own = _measured(here, scale, folder)
    peaks = {name: peak_flops(device, name) for name in devices.PRECISIONS}
    table = known.from_tables(device.key) or Known(key=device.key, name="")
    who = "the kernel, or the container's limit" if device.key == CPU else "the driver"
    return dataclasses.replace(
        table,
        name=device.name,
        memory=Figure(device.memory_bytes, who),
        peaks={n: Figure(p.flops, p.source) for n, p in peaks.items() if isinstance(p, Peak)},
        measured=_over_ranks(own, shared=device.key == CPU),
    )


def _measured(here: torch.device, scale: Scale, folder: Path) -> Measured:
    names = [name for name in (*DTYPES, "fp8") if _multiplies(here, name)]
    widths = [width for width in GEMM_WIDTHS if width <= scale.widest]
    updates = {
        name: {4 * width: _update(here, scale, width, name) for width in TABLE_WIDTHS}
        for name in ("sgd", "adagrad", "rowwise_adagrad")
    }
    node, network, collective_s = _links(here, scale)
    ranks = meshes.launched_ranks()
    return Measured(
        source=f"trainmark {__version__} calibrate, {datetime.now(UTC):%Y-%m-%d}, {ranks} rank(s)",
        copy=_copy(here, scale),
        gather={4 * width: _gather(here, scale, width) for width in TABLE_WIDTHS},
        update=updates["sgd"],
        adagrad=updates["adagrad"],
        rowwise_adagrad=updates["rowwise_adagrad"],
        interaction={width: _interaction(here, scale, width) for width in TABLE_WIDTHS},
        gemm={name: {width: _gemm(here, scale, name, width) for width in widths} for name in names},
        launch_s=_launch(here, scale),
        threads_s=_threads(here, scale),
        collective_s=collective_s,
        node=node,
        network=network,
        host=_from_host(here, scale),
        disk=_disk(folder, scale),
    )


def _over_ranks(own: Measured, shared: bool) -> Measured:
    """The mean over ranks; for CPUs, the sum of the ranks of a machine."""
    every = meshes.of_all_ranks(own)
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", str(len(every)))) if shared else 1

    def mean(rates: list[ByWidth]) -> ByWidth:
        return {width: statistics.mean(one[width] for one in rates) for width in rates[0]}

    rates: dict[str, Any] = {
        name: mean([getattr(one, name) for one in every]) for name in known.BY_WIDTH
    }
    return dataclasses.replace(
        own,
        **rates,
        copy=statistics.mean(one.copy or 0.0 for one in every),
        gemm={name: mean([one.gemm[name] for one in every]) for name in own.gemm},
    ).scaled(per_node)


# --- the figures


def seconds_of(action: Callable[[], object], here: torch.device, budget_s: float) -> float:
    """The mean of at least five times, after two that do not count.

    Not the median: a step of training is made of many operations, and sees the mean of what a busy
    machine leaves it. A device is given several to do before the host waits for it, which takes as
    long as a small operation.
    """
    wait = backends.synchronizer(here)
    times: list[float] = []
    end, repeats = math.inf, 1
    for attempt in range(100):
        wait()
        begin = time.perf_counter()
        for _ in range(repeats):
            action()
        wait()
        now = time.perf_counter()
        if attempt == 1:
            end = now + budget_s
            repeats = 1 if here.type == "cpu" else max(1, round(LONG_S / (now - begin)))
        if attempt > 1:
            times.append((now - begin) / repeats)
        if len(times) >= 5 and now > end:
            break
    return statistics.mean(times)


def _copy(here: torch.device, scale: Scale) -> float:
    source = torch.ones(scale.copy_bytes // 4, device=here)
    target = torch.empty_like(source)
    return 2 * scale.copy_bytes / seconds_of(lambda: target.copy_(source), here, scale.budget_s)


def _gather(here: torch.device, scale: Scale, width: int) -> float:
    """Reading random rows, by the engine's own operations; the bytes are those that
    `placement/costs.py` counts."""
    store, ids, rows = _table(here, scale, width, "sgd")
    read = scale.lookups * (max(MIN_ACCESS, 4 * width) + 4 * width)
    return read / seconds_of(lambda: store.gather_into(ids, rows), here, scale.budget_s)


def _update(here: torch.device, scale: Scale, width: int, optimizer: str) -> float:
    """Updating random rows, by the engine's own operations."""
    store, ids, grads = _table(here, scale, width, optimizer)
    settings = Settings(lr=0.0, gate=torch.ones((), device=here))
    per_element, per_row = STATE_BYTES[optimizer]
    changed = max(MIN_ACCESS, 4 * width) + per_element * width + per_row
    moved = scale.lookups * (4 * width + MIN_ACCESS) + 2 * len(ids.unique()) * changed

    def change() -> None:
        store.update(store.plan_update(ids), grads, settings)

    return moved / seconds_of(change, here, scale.budget_s)


def _table(
    here: torch.device, scale: Scale, width: int, optimizer: str
) -> tuple[TableStore, Tensor, Tensor]:
    """A table, the rows of it that are looked up, and as many rows to read into or to add."""
    rows = scale.table_bytes // (4 * width)
    rule = make_rule(optimizer, eps=1e-8, beta1=0, beta2=0)
    store = TableStore([whole_table("table", rows, width)], width, rule)
    store.weight = torch.empty(rows, width, device=here)
    use_huge_pages(store.weight)
    store.weight.zero_()
    store.create_state()
    generator = torch.Generator(here).manual_seed(0)
    ids = torch.randint(rows, (scale.lookups,), device=here, generator=generator)
    return store, ids, torch.zeros(scale.lookups, width, device=here)


def _interaction(here: torch.device, scale: Scale, width: int) -> float:
    """Products of all pairs of a sample's rows, forward and backward."""
    x = torch.randn(scale.rows, width, device=here, requires_grad=True)
    rows = torch.randn(scale.rows, VECTORS - 1, width, device=here, requires_grad=True)

    def products() -> None:
        dot_interaction(x, rows).sum().backward()
        x.grad = rows.grad = None

    done = 3 * VECTORS * (VECTORS - 1) * width * scale.rows
    return done / seconds_of(products, here, scale.budget_s)


def _multiplies(here: torch.device, precision: str) -> bool:
    """Whether there are fast products of a precision; few CPUs have any of fp16."""
    if here.type == "cpu":
        return precision in ("fp32", "bf16")
    found = capability(here)
    if found is None:  # another vendor's, of which the usual ones are tried
        return precision in ("fp32", "bf16", "fp16")
    return found >= {"fp32": (0, 0), "fp16": (7, 0), "fp8": (8, 9)}.get(precision, (8, 0))


def _gemm(here: torch.device, scale: Scale, precision: str, width: int) -> float:
    """A tall matrix by a square one, as layers have them."""
    set_matmul_precision(precision)
    product = _product(here, scale.rows, width, precision)
    seconds = seconds_of(product, here, scale.budget_s)
    set_matmul_precision("fp32")
    return 2 * scale.rows * width * width / seconds


def _product(here: torch.device, rows: int, width: int, precision: str) -> Callable[[], Tensor]:
    if precision == "fp8":
        tall, square = (
            torch.randn(shape, device=here).to(torch.float8_e4m3fn)
            for shape in ((rows, width), (width, width))
        )
        one = torch.ones((), device=here)
        return lambda: torch._scaled_mm(
            tall, square.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16
        )
    dtype = DTYPES[precision]
    tall = torch.randn(rows, width, device=here).to(dtype)
    square = torch.randn(width, width, device=here).to(dtype)
    out = torch.empty(rows, width, device=here, dtype=dtype)
    return lambda: torch.mm(tall, square, out=out)


def _launch(here: torch.device, scale: Scale) -> float:
    small, count = torch.zeros(8, device=here), 1000

    def many() -> None:
        for _ in range(count):
            small.add_(1)

    return seconds_of(many, here, scale.budget_s) / count


def _threads(here: torch.device, scale: Scale) -> float | None:
    """A kernel of ours that has nothing to do, on all threads."""
    if here.type != "cpu":
        return None
    return seconds_of(lambda: in_threads(_nothing, 2**16), here, scale.budget_s)


def _nothing(begin: int, end: int) -> None:
    pass


def _from_host(here: torch.device, scale: Scale) -> float | None:
    if here.type == "cpu":
        return None
    size = scale.copy_bytes // 8
    source = torch.ones(size // 4, pin_memory=True)
    target = torch.empty_like(source, device=here)
    copy = lambda: target.copy_(source, non_blocking=True)  # noqa: E731
    return size / seconds_of(copy, here, scale.budget_s)


def _disk(folder: Path, scale: Scale) -> float | None:
    """Reading where the file will be, after the system was asked to forget what it holds."""
    if not meshes.is_main_process():
        return None
    folder.mkdir(parents=True, exist_ok=True)
    block = os.urandom(2**20)
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        for _ in range(scale.file_bytes // len(block)):
            file.write(block)
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        begin = time.perf_counter()
        while file.read(2**22):
            pass
        return scale.file_bytes / (time.perf_counter() - begin)


# --- between ranks


def _links(here: torch.device, scale: Scale) -> tuple[float | None, float | None, float | None]:
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
    return _sent_per_s(here, scale, within), _sent_per_s(here, scale, between), small


def _sent_per_s(here: torch.device, scale: Scale, groups: list[list[int]]) -> float | None:
    """Bytes per second that a rank sends in an all-reduce, while all groups run one."""
    size, numbers = len(groups[0]), scale.copy_bytes // 32
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
