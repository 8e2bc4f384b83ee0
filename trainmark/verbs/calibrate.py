"""`trainmark calibrate`: measure this machine, and write the `hardware.toml` that `plan` reads.

Under torchrun, all ranks measure at the same time, as they would train, and the links between them
are measured, too. Rates of GPUs are of one device; rates of CPUs are of all ranks of a machine
together. CPUs are measured in several rounds, and the median counts, because other programs may use
them. `calibrate_steps.py` measures what whole steps take beyond the parts measured here.
"""

import dataclasses
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
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
from trainmark.hardware.allocator import keep_freed_memory, use_huge_pages
from trainmark.hardware.backends import DeviceChoice
from trainmark.hardware.devices import Peak, peak_flops
from trainmark.hardware.known import CPU, LARGE_TABLE, SMALL_TABLE, Figure, Known, Measured
from trainmark.hardware.nvidia import capability
from trainmark.kernels.gather_interaction import gather_interaction
from trainmark.kernels.gather_rows import gather_rows_into
from trainmark.kernels.relu_mlp import relu_mlp
from trainmark.kernels.table_formats import Rows, Tables
from trainmark.training.precision import autocast, set_matmul_precision
from trainmark.verbs.calibrate_steps import with_whole_steps

GEMM_WIDTHS = (16, 64, 256, 1024, 4096)
TABLE_WIDTHS = (16, 64, 128)
"""Columns of a table, 4 bytes each."""
FEW_SAMPLES, LAYERS = 256, 2
"""Samples and layers of an MLP, which is timed once more with `Scale.samples`."""
FEATURES = 26
"""Features of a sample, each with a table: as many as Criteo's log has."""
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
    """Size of each table."""
    lookups: int
    """Rows to look up, over all tables."""
    copy_bytes: int
    file_bytes: int
    tables: int = 1
    budget_s: float = 0.3
    """Seconds to spend on each figure, in each round."""
    rounds: int = 1
    samples: int = 8192
    """On a CPU: samples for layers and interactions, forward and backward."""
    activations: int = 2**20
    """On a CPU: the most activations of one layer."""


CPU_SCALE = Scale(
    2048, 1024, LARGE_TABLE, FEATURES * 2**13, 2**27, 2**27,
    tables=FEATURES, budget_s=0.1, rounds=3,
)  # fmt: skip
GPU_SCALE = Scale(65536, 4096, 2**32, 2**21, 2**31, 2**29)


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
    own = _combined([_rates(here, scale) for _ in range(scale.rounds)], statistics.median)
    node, network, collective_s = _links(here, scale)
    own = dataclasses.replace(
        own,
        node=node,
        network=network,
        collective_s=collective_s,
        disk=_disk(folder, scale),
    )
    peaks = {name: peak_flops(device, name) for name in devices.PRECISIONS}
    table = known.from_tables(device.key) or Known(key=device.key, name="")
    who = "the kernel, or the container's limit" if device.key == CPU else "the driver"
    found = dataclasses.replace(
        table,
        name=device.name,
        memory=Figure(device.memory_bytes, who),
        peaks={n: Figure(p.flops, p.source) for n, p in peaks.items() if isinstance(p, Peak)},
        measured=_over_ranks(own, shared=device.key == CPU),
    )
    return with_whole_steps(found, here) if device.key == CPU else found


def _rates(here: torch.device, scale: Scale) -> Measured:
    """What one device reaches by itself."""
    names = [name for name in (*DTYPES, "fp8") if _multiplies(here, name)]
    widths = [width for width in GEMM_WIDTHS if width <= scale.widest]
    on_cpu = here.type == "cpu"
    layers = _layers(here, scale, names) if on_cpu else {}
    ranks = meshes.launched_ranks()
    return Measured(
        source=f"trainmark {__version__} calibrate, {datetime.now(UTC):%Y-%m-%d}, {ranks} rank(s)",
        copy=_copy(here, scale),
        **_of_rows(here, scale, scale.table_bytes),
        small=_of_rows(here, scale, SMALL_TABLE) if on_cpu else {},
        interaction={w: _interaction(here, scale, w) for w in TABLE_WIDTHS} if on_cpu else {},
        gemm={name: {width: _gemm(here, scale, name, width) for width in widths} for name in names},
        layer={name: {w: rate for w, (rate, _) in of.items()} for name, of in layers.items()},
        layer_s={name: {w: start for w, (_, start) in of.items()} for name, of in layers.items()},
        launch_s=_launch(here, scale),
        host=_from_host(here, scale),
    )


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


def _of_rows(here: torch.device, scale: Scale, table_bytes: int) -> dict[str, Any]:
    """Reading and changing random rows of a table, by the engine's own operations, and by bytes of
    a row; bytes are counted as `placement/costs.py` counts them."""
    optimizers = {"update": "sgd", "adagrad": "adagrad", "rowwise_adagrad": "rowwise_adagrad"}
    found = {"gather": {4 * w: _gather(here, scale, table_bytes, w) for w in TABLE_WIDTHS}}
    for name, optimizer in optimizers.items():
        found[name] = {4 * w: _update(here, scale, table_bytes, w, optimizer) for w in TABLE_WIDTHS}
    return found


def _gather(here: torch.device, scale: Scale, table_bytes: int, width: int) -> float:
    store, ids, rows = _table(here, scale, table_bytes, width, "sgd")
    read = scale.lookups * (max(MIN_ACCESS, 4 * width) + 4 * width)
    gather = partial(gather_rows_into, rows, ids, Tables(store.rows))
    return read / seconds_of(gather, here, scale.budget_s)


def _update(
    here: torch.device, scale: Scale, table_bytes: int, width: int, optimizer: str
) -> float:
    store, ids, grads = _table(here, scale, table_bytes, width, optimizer)
    settings = Settings(lr=0.0, gate=torch.ones((), device=here))
    per_element, per_row = STATE_BYTES[optimizer]
    changed = max(MIN_ACCESS, 4 * width) + per_element * width + per_row
    moved = scale.lookups * (4 * width + MIN_ACCESS) + 2 * len(ids.unique()) * changed

    def change() -> None:
        store.update(store.plan_update(ids), grads, settings)

    return moved / seconds_of(change, here, scale.budget_s)


def _table(
    here: torch.device, scale: Scale, table_bytes: int, width: int, optimizer: str
) -> tuple[TableStore, Tensor, Tensor]:
    """Tables, their rows that are looked up, and as many rows to read into or to add."""
    rows, each = table_bytes // (4 * width), scale.lookups // scale.tables
    rule = make_rule(optimizer, eps=1e-8, beta1=0, beta2=0)
    parts = [whole_table(f"table {number}", rows, width) for number in range(scale.tables)]
    store = TableStore(parts, width, rule)
    store.weight = torch.empty(rows * scale.tables, width, device=here)
    use_huge_pages(store.weight)
    store.weight.zero_()
    store.create_state()
    generator = torch.Generator(here).manual_seed(0)
    ids = torch.randint(rows, (scale.tables, each), device=here, generator=generator)
    ids += rows * torch.arange(scale.tables, device=here)[:, None]
    return store, ids.flatten(), torch.zeros(ids.numel(), width, device=here)


def _interaction(here: torch.device, scale: Scale, width: int) -> float:
    """Products of all pairs of a sample's rows, forward and backward, without the lookup."""
    samples, weight = scale.samples, torch.randn(SMALL_TABLE // (4 * width), width)
    ids_FB = torch.randint(len(weight), (FEATURES, samples))
    rows_FBD = torch.empty(FEATURES, samples, width)
    x = torch.randn(samples, width, requires_grad=True)
    tables = Tables(Rows(weight))

    def interact() -> Tensor:
        return gather_interaction(x, ids_FB.t(), tables, rows_FBD.transpose(0, 1))

    gradient = torch.ones_like(interact())

    def all_of_it() -> None:
        interact().backward(gradient)
        x.grad = None

    def lookup() -> None:
        gather_rows_into(rows_FBD.view(-1, width), ids_FB.flatten(), tables)

    whole_s, lookup_s = (seconds_of(part, here, scale.budget_s) for part in (all_of_it, lookup))
    done = 3 * (FEATURES + 1) * FEATURES * width * samples
    return done / max(whole_s - lookup_s, whole_s / 2)


def _layers(
    here: torch.device, scale: Scale, precisions: Sequence[str]
) -> dict[str, dict[int, tuple[float, float]]]:
    """`_layer` for each precision and width."""
    widths = [width for width in GEMM_WIDTHS if width <= scale.widest]
    return {name: {w: _layer(here, scale, name, w) for w in widths} for name in precisions}


def _layer(here: torch.device, scale: Scale, precision: str, width: int) -> tuple[float, float]:
    """Operations per second of a layer, forward and backward, and its fixed seconds per call."""
    many = max(2 * FEW_SAMPLES, min(scale.samples, scale.activations // width))
    few_s, many_s = (_mlp_s(here, scale, precision, width, n) for n in (FEW_SAMPLES, many))
    start_s = few_s - (many_s - few_s) * FEW_SAMPLES / (many - FEW_SAMPLES)
    start_s = min(max(start_s, 1e-7), few_s / 2)  # whatever else the machine did meanwhile
    return 6 * width * width * many / max(many_s - start_s, many_s / 2), start_s


def _mlp_s(here: torch.device, scale: Scale, precision: str, width: int, samples: int) -> float:
    """Seconds of one layer of an MLP, forward and backward."""
    x = torch.randn(samples, width, device=here, requires_grad=True)
    weights = [torch.randn(width, width, requires_grad=True) for _ in range(LAYERS)]
    biases = [torch.zeros(width, requires_grad=True) for _ in range(LAYERS)]
    gradient = torch.ones(samples, width, device=here)

    def learn() -> None:
        with autocast(precision, here):
            y = relu_mlp(x, weights, biases, last_relu=True)
        y.float().backward(gradient)

    return seconds_of(learn, here, scale.budget_s) / LAYERS


def _multiplies(here: torch.device, precision: str) -> bool:
    """Whether there are fast products of a precision; few CPUs have any of fp16."""
    if here.type == "cpu":
        return precision in ("fp32", "bf16")
    found = capability(here)
    if found is None:  # another vendor's: try the usual ones
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
