"""The kernels of DLRM's embedding path, checked against float64, then timed, in several variants.

    PYTHONPATH=. python benchmarks/dlrm_kernels.py [--seconds 100]                    (CUDA)
    TRITON_INTERPRET=1 PYTHONPATH=. python benchmarks/dlrm_kernels.py --tiny          (any machine)

Tables of frequency threshold 15, 26 features, resident batches. `floor_ms` is the time of the
fewest bytes that must pass through device memory, at the bandwidth of a large copy: every distinct
row once, however often it is looked up. The L2 cache is emptied before every call.
The default of every kernel comes first, for all widths; variants of the first width follow while
there is time, then the same for uniform indices.
"""

import argparse
import dataclasses
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from benchmarks.common import write_results
from benchmarks.dlrm_clicks import EXPONENTS, Ids, draw_ids
from trainmark.kernels import gather_interaction as fused
from trainmark.kernels import gather_rows, interaction, sparse_update
from trainmark.kernels.interaction import Launch, output_width
from trainmark.kernels.sparse_update import Rule, RuleName, SortedRows, sort_rows, sort_rows_of_two
from trainmark.kernels.table_formats import FORMATS, Rows, Tables, new_rows, read_rows
from trainmark.workloads.dlrm.runs import dlrm_small

BYTES_PER_S = 4.0e12  # a large copy on an H200, reads and writes together
FP32_BELOW = 100_000  # rows of a table that stays fp32 beside narrower ones
CHECKED = 512  # samples
INDICES: tuple[Ids, ...] = ("power_law", "uniform")
PLAIN = "plain torch"
LIMITS = {"int8": 2e-2, "fp8": 8e-2}  # updated rows are a rounding apart from the exact ones

FORWARD = tuple(Launch(128, warps=warps) for warps in (1, 2, 4))
BACKWARD = tuple(Launch(128, warps=warps) for warps in (2, 1, 4))
Cut = sparse_update.Launch
UPDATE = (
    Cut(8, 2),
    Cut(8, 1),
    Cut(8, 4),
    Cut(16, 1),
    Cut(16, 2),
    Cut(8, 2, blocks_of_sums=1),
    Cut(8, 2, blocks_of_sums=8),
    Cut(4, 4),
    Cut(16, 4),
)
GATHER = (16, 64)


@dataclass(frozen=True)
class Size:
    """What is looked up, and in which type it is computed."""

    table_rows: tuple[int, ...]
    dim: int
    batch: int
    dtype: torch.dtype
    device: torch.device


class Problem:
    """Tables in one format, small ones in fp32, and a batch of ids."""

    def __init__(self, table_format: str, kind: Ids, size: Size) -> None:
        self.table_format, self.kind, self.size = table_format, kind, size
        F, B, D, device = len(size.table_rows), size.batch, size.dim, size.device
        narrow = [table_format != "fp32" and rows >= FP32_BELOW for rows in size.table_rows]
        groups = [[f for f in range(F) if narrow[f]], [f for f in range(F) if not narrow[f]]]
        groups = [group for group in groups if group]
        starts = torch.zeros(F, dtype=torch.int32, device=device)
        self.stores: list[Rows] = []
        for group, name in zip(reversed(groups), ("fp32", table_format), strict=False):
            ends = torch.tensor([size.table_rows[f] for f in group]).cumsum(0)
            starts[group[1:]] = ends[:-1].int().to(device)
            self.stores.insert(0, new_store(int(ends[-1]), D, name, device))
        mixed = len(groups) == 2
        self.first_features = len(groups[0])
        in_second_F = ~torch.tensor(narrow, device=device)
        self.tables = Tables(self.stores[0])
        if mixed:
            self.tables = Tables(self.stores[0], self.stores[1], in_second_F)
        random = torch.Generator(device).manual_seed(1)
        ids_FB = draw_ids(size.table_rows, B, EXPONENTS[kind], random)
        self.ids_BF = (ids_FB.t() + starts).contiguous()
        self.x_BD = torch.randn(B, D, device=device).to(size.dtype)
        self.grad_BW = torch.randn(B, output_width(F, D), device=device).to(size.dtype)
        self.grad_rows_BFD = torch.randn(B, F, D, device=device).to(size.dtype)
        self.finite = torch.ones((), device=device)
        self.offsets_F = in_second_F.int() * len(self.stores[0].codes)
        self.batches = self.sorted_rows(self.ids_BF)
        self.distinct_rows = [batch.rows_N.unique().numel() for batch in self.batches]

    def sorted_rows(self, ids_BF: Tensor) -> list[SortedRows]:
        if len(self.stores) == 1:
            return [sort_rows(ids_BF)]
        return sort_rows_of_two(
            ids_BF, self.offsets_F, self.first_features, len(self.stores[0].codes)
        )

    def table_bytes(self) -> int:
        """Of the distinct rows, with their scales."""
        return sum(
            count * (self.size.dim * rows.codes.element_size() + 4 * (rows.scales is not None))
            for count, rows in zip(self.distinct_rows, self.stores, strict=True)
        )

    def exact(self) -> tuple[Tensor, Tensor, Tensor]:
        """Output, and gradients of x and the rows, of the first samples in float64."""
        x, grad = self.x_BD[:CHECKED].double(), self.grad_BW[:CHECKED].double()
        # Rounding the rows to the computing type is part of the definition, not an error.
        rows = gather_rows.gather_rows_reference(
            self.ids_BF[:CHECKED], self.tables, self.size.dtype
        )
        leaves = [x.requires_grad_(), rows.double().requires_grad_()]
        out = interaction.dot_interaction_reference(*leaves)
        grad_x, grad_rows = torch.autograd.grad(out, leaves, grad)
        return out.detach(), grad_x, grad_rows


def new_store(num_rows: int, dim: int, name: str, device: torch.device) -> Rows:
    rows = new_rows(num_rows, dim, FORMATS[name], device)
    if rows.scales is None:
        rows.codes.uniform_(-0.1, 0.1)
    else:
        rows.codes.view(torch.int8).random_(0, 120)  # fp8: finite numbers
        rows.scales.uniform_(1e-4, 1e-3)
    return rows


def size_of(*tensors: Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


# --- what is measured


@dataclass(frozen=True)
class Work:
    """A kernel on a problem, in one variant."""

    kernel: str
    launch: Any
    run: Callable[[], Any]
    bytes_needed: int
    error: Callable[[], float]
    """Relative, on some samples."""
    system: str = "trainmark"


def forward(p: Problem, launch: Launch | None = None, system: str = "trainmark") -> Work:
    def run(samples: int | None = None) -> Tensor:
        x, ids = p.x_BD[:samples], p.ids_BF[:samples]
        if system == PLAIN:
            return fused.forward_reference(x, ids, p.tables)
        return fused.forward_triton(x, ids, p.tables, launch)

    needed = p.table_bytes() + size_of(p.ids_BF, p.x_BD, p.grad_BW)
    return Work("forward", launch, run, needed, lambda: error(run(CHECKED), p.exact()[0]), system)


def backward(
    p: Problem, launch: Launch | None = None, system: str = "trainmark", check: bool = True
) -> Work:
    def run(samples: int | None = None) -> tuple[Tensor, Tensor]:
        function = fused.backward_reference if system == PLAIN else fused.backward_triton
        options: dict[str, Any] = {} if system == PLAIN else {"launch": launch}
        grad_rows = p.grad_rows_BFD[:samples]
        finite = p.finite if check else None
        given = (p.grad_BW[:samples], p.x_BD[:samples], p.ids_BF[:samples], p.tables)
        return function(*given, grad_rows, finite, **options), grad_rows

    def wrong() -> float:
        p.grad_rows_BFD[:CHECKED] = torch.nan
        found = run(CHECKED)
        return max(error(a, b) for a, b in zip(found, p.exact()[1:], strict=True))

    needed = p.table_bytes() + size_of(p.ids_BF, p.x_BD, p.x_BD, p.grad_BW, p.grad_rows_BFD)
    named = launch if check else "without the check of finite values"
    return Work("backward", named, run, needed, wrong, system)


def gather(p: Problem, rows_at_a_time: int | None = None) -> Work:
    def run(samples: int | None = None) -> Tensor:
        ids = p.ids_BF[:samples]
        return gather_rows.gather_rows_triton(ids, p.tables, p.size.dtype, rows_at_a_time)

    def wrong() -> float:
        ids = p.ids_BF[:CHECKED]
        exact = gather_rows.gather_rows_reference(ids, p.tables, torch.float64)
        return error(run(CHECKED), exact)

    needed = p.table_bytes() + size_of(p.ids_BF, p.grad_rows_BFD)
    return Work("gather", rows_at_a_time, run, needed, wrong)


def interaction_of_rows(p: Problem) -> Iterator[Work]:
    """The halves after a gather, whose errors are those of the fused kernels."""
    rows_BFD = torch.randn_like(p.grad_rows_BFD)
    tables, num_rows = Tables(Rows(rows_BFD.flatten(0, 1))), rows_BFD.shape[1]
    needed = size_of(p.x_BD, p.grad_BW, rows_BFD)

    def run() -> Tensor:
        return interaction.launch_forward(p.x_BD, None, tables, num_rows)

    def wrong() -> float:
        x, rows = p.x_BD[:CHECKED].double(), rows_BFD[:CHECKED].double()
        return error(run()[:CHECKED], interaction.dot_interaction_reference(x, rows))

    yield Work("interaction", None, run, needed, wrong)

    def run_back() -> Tensor:
        return interaction.launch_backward(p.grad_BW, p.x_BD, None, tables, p.grad_rows_BFD)

    def wrong_back() -> float:
        vectors = torch.cat([p.x_BD[:CHECKED, None], rows_BFD[:CHECKED]], 1).double()
        exact = interaction.gradients_reference(p.grad_BW[:CHECKED].double(), vectors)
        return error(run_back()[:CHECKED], exact[0])

    needed += size_of(p.x_BD, rows_BFD)
    yield Work("interaction backward", None, run_back, needed, wrong_back)


def sort(p: Problem) -> Work:
    def wrong() -> float:
        return float(any((batch.rows_N.diff() < 0).any() for batch in p.sorted_rows(p.ids_BF)))

    needed = 2 * size_of(p.ids_BF) + 8 * p.ids_BF.numel()
    return Work("sort", None, lambda: p.sorted_rows(p.ids_BF), needed, wrong)


def update(p: Problem, rule: RuleName = "sgd", launch: sparse_update.Launch | None = None) -> Work:
    """Sorted beforehand: `sort` is measured on its own. The second store is always SGD's."""
    grads_ND, key = p.grad_rows_BFD.flatten(0, 1), torch.zeros_like(p.finite, dtype=torch.int32)
    codes = p.stores[0].codes
    state = {
        "sgd": lambda: None,
        "rowwise_adagrad": lambda: torch.ones(len(codes), device=codes.device),
        "adagrad": lambda: torch.ones(codes.shape, device=codes.device),
    }[rule]()
    rules = [(Rule(rule), state), (Rule("sgd"), None)]

    tiny_step = torch.tensor([1e-6, 1.0, 1.0], device=codes.device)

    def run(batches: list[SortedRows] = p.batches, scalars: Tensor = tiny_step) -> None:
        for rows, batch, (own, kept) in zip(p.stores, batches, rules, strict=False):
            sparse_update.update_rows_triton(rows, kept, batch, grads_ND, own, scalars, key, launch)

    def wrong() -> float:
        """Of SGD and of what it changed by."""
        p.grad_rows_BFD.normal_()
        batches = p.sorted_rows(p.ids_BF[:CHECKED])
        exact = [
            sgd(rows, batch, grads_ND, 0.01) for rows, batch in zip(p.stores, batches, strict=True)
        ]
        run(batches, torch.tensor([0.01, 1.0, 1.0], device=codes.device))
        distinct = [batch.rows_N.unique() for batch in batches]
        found = [read_rows(rows, ids) for rows, ids in zip(p.stores, distinct, strict=True)]
        first = 1 if rule != "sgd" else 0  # Adagrad's formulas are the tests' business
        return max(
            (error(a, b) for a, b in zip(found[first:], exact[first:], strict=True)), default=0.0
        )

    plan = sum(size_of(batch.rows_N, batch.places_N) for batch in p.batches)
    kept_bytes = 0 if state is None else p.distinct_rows[0] * 4 * (state[:1].numel())
    needed = plan + size_of(grads_ND) + 2 * (p.table_bytes() + kept_bytes)
    return Work(f"update {rule}", launch, run, needed, wrong)


def sgd(rows: Rows, batch: SortedRows, grads_ND: Tensor, lr: float) -> Tensor:
    """What the distinct rows should become, in float64."""
    distinct, group = batch.rows_N.unique(return_inverse=True)
    before = read_rows(rows, distinct).double()
    return before.index_add_(0, group, grads_ND[batch.places_N].double(), alpha=-lr)


def error(found: Tensor, exact: Tensor) -> float:
    relative = ((found.double() - exact).norm() / exact.norm()).item()
    return relative if relative == relative else float("inf")


def defaults(p: Problem) -> Iterator[Work]:
    yield from (forward(p), backward(p), update(p), sort(p))
    yield from (update(p, rule) for rule in ("rowwise_adagrad", "adagrad"))


def variants(p: Problem) -> Iterator[Work]:
    yield from (forward(p, launch) for launch in FORWARD)
    yield from (backward(p, launch) for launch in BACKWARD)
    mixed = len(p.stores) == 2
    yield from (update(p, "sgd", launch) for launch in UPDATE[: 5 if mixed else None])
    if not mixed:
        for rule in ("rowwise_adagrad", "adagrad"):
            yield from (update(p, rule, launch) for launch in (Cut(8, 1), Cut(4, 4), Cut(16, 1)))
    yield backward(p, check=False)


def the_rest(p: Problem) -> Iterator[Work]:
    """What is not tuned."""
    yield from (gather(p), *(gather(p, count) for count in GATHER))
    yield from interaction_of_rows(p)
    yield from (forward(p, system=PLAIN), backward(p, system=PLAIN))


def all_work(kind: Ids, formats: list[str], sizes: list[Size]) -> Iterator[tuple[Problem, Work]]:
    """The defaults of all sizes, then the rest for the first, one format's tables at a time."""
    for size, makers in [
        *((size, (defaults,)) for size in sizes),
        (sizes[0], (variants, the_rest)),
    ]:
        for name in formats:
            problem = Problem(name, kind, size)
            for make in makers:
                yield from ((problem, work) for work in make(problem))


# --- compiling
#
# About a hundred kernels at a second each would eat up the time to measure: processes compile
# them side by side into Triton's cache, by running them once on small tables.

COMPILERS = 15


def compile_ahead(formats: list[str], dims: list[int]) -> None:
    command = [sys.executable, __file__, "--formats", *formats, "--dims", *map(str, dims)]
    command += ["--compile-share"]
    started = [subprocess.Popen([*command, str(share)]) for share in range(COMPILERS)]
    for process in started:
        if process.wait():
            raise SystemExit("A kernel does not compile: see above.")


def compile_share(share: int, formats: list[str], sizes: list[Size]) -> None:
    """Every `COMPILERS`-th kernel, with the sizes that Triton compiles for."""
    small = [
        dataclasses.replace(
            size,
            table_rows=tuple(min(count, FP32_BELOW) for count in size.table_rows),
            batch=min(size.batch, 64),
        )
        for size in sizes
    ]
    for number, (_, work) in enumerate(all_work("uniform", formats, small)):
        if number % COMPILERS == share:
            with suppress(OutOfResources):  # the one who measures will say so
                work.run()


# --- timing


def median_ms(work: Work, device: torch.device) -> float:
    if device.type == "cuda":
        from triton.testing import do_bench

        run = work.run if work.system == PLAIN else captured(work.run)
        return float(do_bench(run, warmup=5, rep=40, return_mode="median"))
    began = time.perf_counter()
    work.run()
    return (time.perf_counter() - began) * 1e3


def captured(run: Callable[[], Any]) -> Callable[[], None]:
    """As a graph, as in a step: one by one, launches from Python take longer than small kernels."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def measured(work: Work, p: Problem) -> dict[str, Any]:
    """A row of the result."""
    wrong = work.error()
    ms = median_ms(work, p.size.device)
    floor_ms = work.bytes_needed / BYTES_PER_S * 1e3
    return {
        "system": work.system,
        "kernel": work.kernel,
        "tables_precision": p.table_format,
        "indices": p.kind,
        "batch": p.size.batch,
        "dim": p.size.dim,
        "launch": "default" if work.launch is None else str(work.launch),
        "ms": ms,
        "floor_ms": floor_ms,
        "gb_per_s": work.bytes_needed / ms / 1e6,
        "bytes_per_sample": work.bytes_needed / p.size.batch,
        "relative_error": wrong,
        "right": wrong < LIMITS.get(p.table_format, 8e-3),
    }


def show(row: dict[str, Any]) -> None:
    print(
        f"{row['system']:11s} {row['kernel']:22s} {row['tables_precision']:5s}"
        f"{row['dim']:4d} {row['indices']:9s} {row['ms']:8.3f} ms, floor {row['floor_ms']:6.3f} "
        f"{row['gb_per_s']:6.0f} GB/s {row['bytes_per_sample']:7.0f} B/sample "
        f"{'' if row['right'] else 'WRONG: '}error {row['relative_error']:.0e} {row['launch']}",
        flush=True,
    )


def show_fastest(rows: list[dict[str, Any]]) -> None:
    """Last, where the end of the output still shows it."""
    fastest: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in sorted(rows, key=lambda row: row["ms"]):
        if row["system"] != PLAIN and row["right"]:
            key = (row["kernel"], row["tables_precision"], row["dim"], row["indices"])
            fastest.setdefault(key, row)
    print("--- fastest")
    for _, row in sorted(fastest.items()):
        show(row)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=100, help="stop measuring after that")
    tables = ["fp32", "int8", "bf16"]
    parser.add_argument("--formats", nargs="*", default=tables, choices=list(FORMATS))
    parser.add_argument("--dims", nargs="*", type=int, help="widths; default 128")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, in Triton's interpreter")
    parser.add_argument("--name", default="dlrm_kernels_h200", help="of the file in results/")
    parser.add_argument("--compile-share", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help="for the file, instead of results/")
    arguments = parser.parse_args()
    until = time.perf_counter() + arguments.seconds
    model = dlrm_small().model
    size = Size(model.table_rows, model.embedding_dim, 65536, torch.bfloat16, torch.device("cuda"))
    if arguments.tiny:  # the interpreter multiplies bf16 wrongly
        size = Size((3, FP32_BELOW, 40, 7), 16, 4, torch.float16, torch.device("cpu"))
    dims = arguments.dims or [size.dim]
    sizes = [dataclasses.replace(size, dim=dim) for dim in dims]
    if arguments.compile_share is not None:
        return compile_share(arguments.compile_share, arguments.formats, sizes)
    if not arguments.tiny:
        compile_ahead(arguments.formats, dims)
    rows, skipped = [], 0
    for kind in INDICES:
        for problem, work in all_work(kind, arguments.formats, sizes):
            if time.perf_counter() > until:
                skipped += 1
                continue
            try:
                rows.append(measured(work, problem))
            except OutOfResources as failure:
                print(f"{work.kernel} {work.launch} is left out: {failure}")
            else:
                show(rows[-1])
    show_fastest(rows)
    print(f"{skipped} variants skipped for want of time")
    if not arguments.tiny:
        print(write_results(arguments.name, rows, size.device, folder=arguments.folder))
    if not all(row["right"] for row in rows):
        raise SystemExit("A kernel is wrong: see above.")


if __name__ == "__main__":
    main()
