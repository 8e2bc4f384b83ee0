"""Steps and memory of many configurations on one GPU, which the planner's constants are fitted to.

    PYTHONPATH=. python benchmarks/plan_sweep.py --output DIR              on a CUDA machine
    PYTHONPATH=. python benchmarks/plan_sweep.py --output DIR --tiny       does it run?

With `--after`, what an earlier sweep has not measured is added to its rows, in the place of its
errors. Then `DIR/plan_sweep_h200.json` goes to `benchmarks/results/`, `benchmarks/plan_fit.py`
proposes constants, and `benchmarks/plan_errors.py` compares:

    PYTHONPATH=. python benchmarks/plan_sweep.py --output DIR --only dlrm others memory kernels \\
        --after benchmarks/results/plan_sweep_h200.json

`plan_design.py` lists the configurations, in these sections:

    memory      whether a configuration trains in less and in more than was planned, then the least
                that it trains in, by halving
    dlrm        the random design, and the published shape first and last
    distilbert  padded and packed sentences
    others      exchange, tables in host memory, Adam, evaluation, single requests
    kernels     the kernels of one step of each row

Each configuration is measured in a process of its own, one after another. Every row is appended to
`plan_sweep.jsonl` as soon as it is measured; an error is a row, too (`error`). `kernels.jsonl` has,
in order, the kernels of one step of each row, in microseconds.

Batches lie on the device. Steps are timed by device events after half a second of them, in which a
GPU comes to its power limit. Each row has what the planner said at the time.
"""

import argparse
import dataclasses
import itertools
import json
import multiprocessing
import re
import statistics
import time
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import plan_design
from benchmarks.common import Options, in_a_process
from benchmarks.dlrm_systems import click_batch, random_clicks
from benchmarks.plan_design import Case
from benchmarks.plan_steps import (
    Steps,
    allocated,
    clean,
    configuration,
    kernels,
    peaks,
    timed,
)
from benchmarks.timing import synchronize
from trainmark import workloads
from trainmark.config import filled
from trainmark.inference.latency import DROPPED, seconds_of
from trainmark.workloads.dlrm.data import ClickBatch

CAPTURED = 7  # steps after which both graphs of a DLRM are captured
NEAR = (0.96, 1.04)  # of the planned memory: whether a configuration trains in it
TRIALS = 3  # of halving, after that
REQUESTS = (1, 64, 4096)


# --- rows


def measure_training(case: Case, options: Options) -> Iterator[dict[str, Any]]:
    began = time.perf_counter()
    steps = ready(case, options)
    ready_s = time.perf_counter() - began
    row: dict[str, Any] = {"ready_s": ready_s, "built_bytes": steps.built_bytes}
    row |= timed(steps, options) | peaks(steps) | {"batch_bytes": steps.batch_bytes}
    row["skipped"] = float(steps.skipped)
    row["engine"] = type(getattr(steps.trainer.model, "tables", steps.trainer.model)).__name__
    row["predicted"] = steps.predicted()
    yield row


def ready(case: Case, options: Options) -> Steps:
    """After so many steps that all graphs are captured."""
    steps = Steps(case, options)
    for _ in range(CAPTURED):
        steps()
    synchronize(options.device)
    return steps


def measure_kernels(case: Case, options: Options) -> Iterator[dict[str, Any]]:
    yield {"kernels": kernels(ready(case, options), options.device)}


def measure_evaluation(case: Case, options: Options) -> Iterator[dict[str, Any]]:
    """Batches of `eval_batch`, without a read of what they give."""
    steps = Steps(case, options)
    turns, trainer = itertools.cycle(steps.batches), steps.trainer

    def one() -> None:
        trainer.predict(trainer.prepare_to_predict(next(turns), trainer.cfg.eval_batch))

    for _ in range(CAPTURED):
        one()
    yield timed(one, options) | peaks(steps) | {"batch_bytes": steps.batch_bytes}


def measure_requests(case: Case, options: Options) -> Iterator[dict[str, Any]]:
    """As `trainmark infer` times them: from host memory to host memory, one after another."""
    steps = Steps(case, options)
    predict = filled(workloads.load("dlrm").build_predictor)(steps.trainer)
    for size in REQUESTS:
        requests = [_on_host(batch, min(size, batch.samples)) for batch in steps.batches]
        turns = itertools.cycle(requests)
        seconds_of(predict, itertools.islice(turns, DROPPED))
        found = seconds_of(predict, itertools.islice(turns, 200 if options.seconds else 10))
        yield {"samples": size, "measured_s": statistics.median(found), "steps": len(found)}


def _on_host(batch: ClickBatch, samples: int) -> ClickBatch:
    groups = [dataclasses.replace(g, ids=g.ids[:, :samples].cpu()) for g in batch.groups]
    return dataclasses.replace(
        batch,
        numerical=batch.numerical[:samples].cpu(),
        labels=batch.labels[:samples].cpu(),
        groups=groups,
        samples=samples,
        global_samples=samples,
        position=samples,
    )


def measure_limits(case: Case, options: Options) -> Iterator[dict[str, Any]]:
    """Whether some steps fit less and more than was planned; then the least that they need.

    Each trial is a row, and a process: what memory ends in the middle of a capture leaves an
    allocator behind that cannot be trusted.
    """
    on_gpu = options.device.type == "cuda"
    attempt = partial(in_its_own_process if on_gpu else trial, case, options)
    needed = attempt(None)
    yield {"limit_bytes": None} | needed
    low, high = 0.97 * needed["allocated_bytes"], 1.01 * needed["reserved_bytes"]
    planned = needed["predicted"]["memory_bytes"]
    limits = [share * planned for share in NEAR] + [None] * TRIALS
    for limit in limits if on_gpu else []:
        limit = (low + high) / 2 if limit is None else limit
        row = attempt(limit)
        yield {"limit_bytes": round(limit)} | row
        low, high = (low, min(high, limit)) if row["fits"] else (max(low, limit), high)


def in_its_own_process(case: Case, options: Options, limit: float | None) -> dict[str, Any]:
    """A trial in a process that is forked from this one, which must not have touched the GPU."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
        return pool.submit(trial, case, options, limit).result()


def trial(case: Case, options: Options, limit: float | None) -> dict[str, Any]:
    """Steps with so many bytes beside the batches: whether they fit, and what was used."""
    try:
        if limit is not None:
            total = torch.cuda.get_device_properties(options.device).total_memory
            allowed = limit + batch_bytes(case, options)
            torch.cuda.set_per_process_memory_fraction(allowed / total)
        steps = ready(case, options)
        steps()
        synchronize(options.device)
        return {"fits": True} | peaks(steps) | {"predicted": steps.predicted()}
    except Exception as error:
        if not ran_out(error):
            raise
        return {"fits": False}


def ran_out(error: BaseException | None) -> bool:
    """Whether memory was the first cause; a capture that it ends may fail once more by itself."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError):
            return True
        error = error.__context__
    return False


def batch_bytes(case: Case, options: Options) -> int:
    """Of a configuration's batches, which no limit counts."""
    cfg, before = configuration(case, options), allocated(options.device)
    clicks = random_clicks(cfg.model, cfg.global_batch, case.ids, options.device)
    kept = [click_batch(cfg.model.table_rows, *parts) for parts in clicks]
    del clicks
    size = allocated(options.device) - before
    del kept
    clean(options.device)
    return size


MEASURES = {
    "train": measure_training,
    "evaluate": measure_evaluation,
    "infer": measure_requests,
    "limits": measure_limits,
    "kernels": measure_kernels,
}


def measure(case: Case, options: Options) -> None:
    """All rows of a case, written as they come; an error is a row."""
    began = time.perf_counter()
    try:
        for row in MEASURES[case.kind](case, options):
            write(case, row, options)
    except Exception as error:
        traceback.print_exc()
        write(case, {"error": f"{type(error).__name__}: {error}"[:500]}, options)
    print(f"{time.perf_counter() - began:6.1f} s  {case.kind} {case.name}", flush=True)


def write(case: Case, row: dict[str, Any], options: Options) -> None:
    """Append one line to the file of its kind."""
    workload = case.run.partition("-")[0]
    named: dict[str, Any] = {"system": "trainmark", "workload": workload, "case": case.name}
    if "kernels" not in row:
        named |= {"kind": case.kind, "held_out": case.held_out}
        named |= {"run": case.run, "changes": case.changes, "ids": case.ids}
    file = options.output / ("kernels.jsonl" if "kernels" in row else "plan_sweep.jsonl")
    line = json.dumps(named | row) + "\n"
    with file.open("a", encoding="utf-8") as opened:
        opened.write(line)


def sweep(
    sections: Sequence[str], options: Options, done: frozenset[tuple[str, str]] = frozenset()
) -> None:
    """Measure the cases of these sections, but for those that are done: names with their kinds."""
    for section in sections:
        for case in plan_design.SECTIONS[section]():
            if (case.name, case.kind) not in done:
                work = partial(measure, case, options)
                work() if options.tiny else in_a_process(work)


# --- results

LEFT_OUT = {"ready_s", "built_bytes", "batch_bytes", "mean_s", "spread_s", "steps", "predicted"}
PARTS = {  # of a DLRM's step, by their kernels; all else is small
    "products": "gemm|cutlass|nvjet|xmma|cublas|splitk",
    "masks": "^_masked_sums|^_mask_codes",
    "loss": "^_click_loss",
    "quantize": "^_quantize|^_transpose",
    "forward": "^_forward_kernel|^_gather_kernel|^_pool_kernel",
    "backward": "^_backward_kernel",
    "update": "^_update_kernel",
}
HIDDEN = "sort|onesweep|histogram"  # of the next batch's ids, on a stream of its own


def seconds_by_part(kernels: Sequence[tuple[str, int, float]]) -> dict[str, float]:
    """Microseconds of a step's kernels, less those that prepare the next batch meanwhile."""

    def streams_of(names: str) -> set[int]:
        return {stream for name, stream, _ in kernels if re.search(names, name, re.I)}

    ahead = streams_of(HIDDEN) - streams_of(PARTS["products"])
    found = {"small": 0.0}
    for name, stream, microseconds in kernels:
        if stream not in ahead:
            part = next((p for p, names in PARTS.items() if re.search(names, name, re.I)), "small")
            found[part] = round(found.get(part, 0.0) + microseconds, 1)
    return found


def collect(options: Options, earlier: Sequence[dict[str, Any]] = ()) -> None:
    """All rows with what they were measured on, as results are kept; earlier ones first."""
    by_case = {
        row["case"]: seconds_by_part(row["kernels"])
        for row in _lines(options.output / "kernels.jsonl")
        if row["workload"] == "dlrm" and row["kernels"]
    }
    known = {(row["case"], row["kind"]) for row in earlier}
    rows = list(earlier)
    for row in _lines(options.output / "plan_sweep.jsonl"):
        if (row["case"], row["kind"]) not in known:
            rows.append({name: row[name] for name in row if name not in LEFT_OUT})
    for row in rows:
        if row["kind"] == "train" and row["case"] in by_case:
            row["kernels_us"] = by_case[row["case"]]
    name = "plan_sweep_tiny" if options.tiny else "plan_sweep_h200"
    options.write(name, rows)
    file = options.output / f"{name}.json"
    head = json.dumps(json.loads(file.read_text()) | {"rows": []}, indent=1)
    lines = ",\n  ".join(map(json.dumps, rows))  # a line each, for they have long lists
    file.write_text(head.replace('"rows": []', f'"rows": [\n  {lines}\n ]') + "\n")


def _lines(file: Path) -> list[Any]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--commit", help="what is measured, where git does not know it")
    parser.add_argument("--only", nargs="*", choices=plan_design.SECTIONS)
    parser.add_argument("--after", type=Path, help="results of an earlier sweep, to be added to")
    parser.add_argument("--seconds", type=float, default=0.5, help="of timed steps in a row")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes on the CPU")
    args = parser.parse_args(arguments)
    options = Options(
        device=torch.device("cpu") if args.tiny else torch.device("cuda", 0),
        tiny=args.tiny,
        seconds=0.0 if args.tiny else args.seconds,
        output=args.output,
        commit=args.commit,
    )
    options.output.mkdir(parents=True, exist_ok=True)
    before = json.loads(args.after.read_text(encoding="utf-8")) if args.after else {"rows": []}
    rows = [row for row in before["rows"] if "error" not in row]  # those are tried again
    earlier = [{"commit": before.get("commit")} | row for row in rows]
    done = {(row["case"], row["kind"]) for row in earlier}
    done |= {(row["case"], "kernels") for row in earlier if "kernels_us" in row}
    sweep(args.only or list(plan_design.SECTIONS), options, frozenset(done))
    collect(options, earlier)


if __name__ == "__main__":
    main()
