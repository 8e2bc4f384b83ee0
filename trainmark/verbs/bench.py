"""What a device reaches, for `calibrate`: rates of copies, rows, GEMMs, layers and interactions."""

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from trainmark.embeddings.placement.costs import MIN_ACCESS, STATE_BYTES
from trainmark.embeddings.tables.row_update import Settings
from trainmark.embeddings.tables.store import TableStore, whole_table
from trainmark.embeddings.tables.update import make_rule
from trainmark.hardware import backends
from trainmark.hardware.allocator import use_huge_pages
from trainmark.hardware.known import LARGE_TABLE, SMALL_TABLE, Measured
from trainmark.hardware.nvidia import capability
from trainmark.kernels.gather_interaction import gather_interaction
from trainmark.kernels.gather_rows import gather_rows_into
from trainmark.kernels.relu_mlp import relu_mlp
from trainmark.kernels.table_formats import Rows, Tables
from trainmark.training.precision import autocast, set_matmul_precision

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


class Bench:
    """Times operations on one device.

    Args:
        here: the device.
        scale: how much work to time.
    """

    def __init__(self, here: torch.device, scale: Scale) -> None:
        self._here, self._scale = here, scale
        self._on_cpu = here.type == "cpu"

    def rates(self) -> Measured:
        """What one device reaches by itself."""
        names = [name for name in (*DTYPES, "fp8") if self._multiplies(name)]
        widths = [width for width in GEMM_WIDTHS if width <= self._scale.widest]
        of_layers = names if self._on_cpu else []
        layers = {name: {w: self._layer(name, w) for w in widths} for name in of_layers}
        return Measured(
            copy=self._copy(),
            **self._of_rows(self._scale.table_bytes),
            small=self._of_rows(SMALL_TABLE) if self._on_cpu else {},
            interaction={w: self._interaction(w) for w in TABLE_WIDTHS} if self._on_cpu else {},
            gemm={name: {width: self._gemm(name, width) for width in widths} for name in names},
            layer={name: {w: rate for w, (rate, _) in of.items()} for name, of in layers.items()},
            layer_s={name: {w: s for w, (_, s) in of.items()} for name, of in layers.items()},
            launch_s=self._launch(),
            host=self._from_host(),
        )

    def seconds_of(self, action: Callable[[], object]) -> float:
        """The mean of at least five times, after two that do not count.

        Not the median: a step of training is made of many operations, and sees the mean of what a
        busy machine leaves it. A device is given several to do before the host waits for it, which
        takes as long as a small operation.
        """
        wait = backends.synchronizer(self._here)
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
                end = now + self._scale.budget_s
                repeats = 1 if self._on_cpu else max(1, round(LONG_S / (now - begin)))
            if attempt > 1:
                times.append((now - begin) / repeats)
            if len(times) >= 5 and now > end:
                break
        return statistics.mean(times)

    def _copy(self) -> float:
        source = torch.ones(self._scale.copy_bytes // 4, device=self._here)
        target = torch.empty_like(source)
        return 2 * self._scale.copy_bytes / self.seconds_of(lambda: target.copy_(source))

    def _of_rows(self, table_bytes: int) -> dict[str, Any]:
        """Reading and changing random rows of a table, by the engine's own operations, and by bytes
        of a row; bytes are counted as `placement/costs.py` counts them."""
        optimizers = {"update": "sgd", "adagrad": "adagrad", "rowwise_adagrad": "rowwise_adagrad"}
        found = {"gather": {4 * w: self._gather(table_bytes, w) for w in TABLE_WIDTHS}}
        for name, optimizer in optimizers.items():
            found[name] = {4 * w: self._update(table_bytes, w, optimizer) for w in TABLE_WIDTHS}
        return found

    def _gather(self, table_bytes: int, width: int) -> float:
        store, ids, rows = self._table(table_bytes, width, "sgd")
        read = self._scale.lookups * (max(MIN_ACCESS, 4 * width) + 4 * width)
        gather = partial(gather_rows_into, rows, ids, Tables(store.rows))
        return read / self.seconds_of(gather)

    def _update(self, table_bytes: int, width: int, optimizer: str) -> float:
        store, ids, grads = self._table(table_bytes, width, optimizer)
        settings = Settings(lr=0.0, gate=torch.ones((), device=self._here))
        per_element, per_row = STATE_BYTES[optimizer]
        changed = max(MIN_ACCESS, 4 * width) + per_element * width + per_row
        moved = self._scale.lookups * (4 * width + MIN_ACCESS) + 2 * len(ids.unique()) * changed

        def change() -> None:
            store.update(store.plan_update(ids), grads, settings)

        return moved / self.seconds_of(change)

    def _table(
        self, table_bytes: int, width: int, optimizer: str
    ) -> tuple[TableStore, Tensor, Tensor]:
        """Tables, their rows that are looked up, and as many rows to read into or to add."""
        rows, each = table_bytes // (4 * width), self._scale.lookups // self._scale.tables
        rule = make_rule(optimizer, eps=1e-8, beta1=0, beta2=0)
        parts = [
            whole_table(f"table {number}", rows, width) for number in range(self._scale.tables)
        ]
        store = TableStore(parts, width, rule)
        store.weight = torch.empty(rows * self._scale.tables, width, device=self._here)
        use_huge_pages(store.weight)
        store.weight.zero_()
        store.create_state()
        generator = torch.Generator(self._here).manual_seed(0)
        ids = torch.randint(
            rows, (self._scale.tables, each), device=self._here, generator=generator
        )
        ids += rows * torch.arange(self._scale.tables, device=self._here)[:, None]
        return store, ids.flatten(), torch.zeros(ids.numel(), width, device=self._here)

    def _interaction(self, width: int) -> float:
        """Products of all pairs of a sample's rows, forward and backward, without the lookup."""
        samples, weight = self._scale.samples, torch.randn(SMALL_TABLE // (4 * width), width)
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

        whole_s, lookup_s = (self.seconds_of(part) for part in (all_of_it, lookup))
        done = 3 * (FEATURES + 1) * FEATURES * width * samples
        return done / max(whole_s - lookup_s, whole_s / 2)

    def _layer(self, precision: str, width: int) -> tuple[float, float]:
        """Operations per second of a layer, forward and backward, and its fixed seconds a call."""
        many = max(2 * FEW_SAMPLES, min(self._scale.samples, self._scale.activations // width))
        few_s, many_s = (self._mlp_s(precision, width, n) for n in (FEW_SAMPLES, many))
        start_s = few_s - (many_s - few_s) * FEW_SAMPLES / (many - FEW_SAMPLES)
        start_s = min(max(start_s, 1e-7), few_s / 2)  # whatever else the machine did meanwhile
        return 6 * width * width * many / max(many_s - start_s, many_s / 2), start_s

    def _mlp_s(self, precision: str, width: int, samples: int) -> float:
        """Seconds of one layer of an MLP, forward and backward."""
        x = torch.randn(samples, width, device=self._here, requires_grad=True)
        weights = [torch.randn(width, width, requires_grad=True) for _ in range(LAYERS)]
        biases = [torch.zeros(width, requires_grad=True) for _ in range(LAYERS)]
        gradient = torch.ones(samples, width, device=self._here)

        def learn() -> None:
            with autocast(precision, self._here):
                y = relu_mlp(x, weights, biases, last_relu=True)
            y.float().backward(gradient)

        return self.seconds_of(learn) / LAYERS

    def _multiplies(self, precision: str) -> bool:
        """Whether there are fast products of a precision; few CPUs have any of fp16."""
        if self._on_cpu:
            return precision in ("fp32", "bf16")
        found = capability(self._here)
        if found is None:  # another vendor's: try the usual ones
            return precision in ("fp32", "bf16", "fp16")
        return found >= {"fp32": (0, 0), "fp16": (7, 0), "fp8": (8, 9)}.get(precision, (8, 0))

    def _gemm(self, precision: str, width: int) -> float:
        """A tall matrix by a square one, as layers have them."""
        set_matmul_precision(precision)
        product = self._product(precision, width)
        seconds = self.seconds_of(product)
        set_matmul_precision("fp32")
        return 2 * self._scale.rows * width * width / seconds

    def _product(self, precision: str, width: int) -> Callable[[], Tensor]:
        if precision == "fp8":
            tall, square = (
                torch.randn(shape, device=self._here).to(torch.float8_e4m3fn)
                for shape in ((self._scale.rows, width), (width, width))
            )
            one = torch.ones((), device=self._here)
            return lambda: torch._scaled_mm(
                tall, square.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16
            )
        dtype = DTYPES[precision]
        tall = torch.randn(self._scale.rows, width, device=self._here).to(dtype)
        square = torch.randn(width, width, device=self._here).to(dtype)
        out = torch.empty(len(tall), width, device=self._here, dtype=dtype)
        return lambda: torch.mm(tall, square, out=out)

    def _launch(self) -> float:
        small, count = torch.zeros(8, device=self._here), 1000

        def many() -> None:
            for _ in range(count):
                small.add_(1)

        return self.seconds_of(many) / count

    def _from_host(self) -> float | None:
        if self._on_cpu:
            return None
        size = self._scale.copy_bytes // 8
        source = torch.ones(size // 4, pin_memory=True)
        target = torch.empty_like(source, device=self._here)
        copy = lambda: target.copy_(source, non_blocking=True)  # noqa: E731
        return size / self.seconds_of(copy)
