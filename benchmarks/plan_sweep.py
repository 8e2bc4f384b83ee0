"""Steps and memory of many configurations on one GPU, which the planner's constants are fitted to.

    PYTHONPATH=. python benchmarks/plan_sweep.py --output DIR              a CUDA machine, 6 minutes
    PYTHONPATH=. python benchmarks/plan_sweep.py --output DIR --tiny       does it run?

What an earlier sweep has not measured is added to its rows (at most 290 s). Then
`DIR/plan_sweep_h200.json` goes to `benchmarks/results/`, `benchmarks/plan_fit.py` proposes
constants, and `benchmarks/plan_errors.py` compares:

    PYTHONPATH=. python benchmarks/plan_sweep.py --output DIR --only dlrm others memory kernels \\
        --after benchmarks/results/plan_sweep_h200.json

`plan_design.py` says which. Every row is appended to `plan_sweep.jsonl` as soon as it is measured,
and what one configuration does wrong ends that row alone (`error`). `kernels.jsonl` has, in order,
the kernels of one step of each row, in microseconds.

    compiling   many processes at once, so that kernels of all configurations lie in the caches
    memory      beside them, which nothing of it is timed for: whether a configuration trains in
                less and in more than was planned, then the least that it trains in, by halving
    dlrm        one process: the random design, and the published shape first and last
    distilbert  one process
    others      one process: exchange, tables in host memory, Adam, evaluation, single requests
    kernels     one process, the last: a host that was profiled starts steps more slowly for ever

Batches lie on the device. Steps are timed by device events after half a second of them, in which a
GPU comes to its power limit. Each row has what the planner said at the time.
"""

import argparse
import dataclasses
import itertools
import json
import multiprocessing
import os
import re
import signal
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import plan_design
from benchmarks.common import Options
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
WARM_BATCH = 32768  # from here on a larger batch has the same kernels
WARM_ROWS = 200_000
BUDGETS = {
    "compiling": 70.0,
    "memory": 90.0,  # which begins with it
    "dlrm": 80.0,
    "distilbert": 75.0,
    "others": 50.0,
    "kernels": 55.0,
    "all": 280.0,
}
SLACK_S = 10.0  # in which a process may end what it has begun


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
    attempt = partial(in_its_own_process if on_gpu else _called, trial, case, options)
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


def _called(function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments)


def in_its_own_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """What it returns there; this process must not have touched the GPU."""
    context = multiprocessing.get_context("fork")
    reader, writer = context.Pipe(duplex=False)
    process = context.Process(target=_quietly, args=(lambda: writer.send(function(*arguments)),))
    process.start()
    writer.close()
    try:
        return reader.recv()
    except EOFError:
        raise RuntimeError("the process ended early; see its traceback") from None
    finally:
        process.join()


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
    if case.kind != "limits":  # whose own processes touched the GPU
        clean(options.device)
    print(f"{time.perf_counter() - began:6.1f} s  {case.kind} {case.name}", flush=True)


def write(case: Case, row: dict[str, Any], options: Options) -> None:
    """One line, in one write: several processes share the file."""
    workload = case.run.partition("-")[0]
    named: dict[str, Any] = {"system": "trainmark", "workload": workload, "case": case.name}
    if "kernels" not in row:
        named |= {"kind": case.kind, "held_out": case.held_out}
        named |= {"run": case.run, "changes": case.changes, "ids": case.ids}
    file = options.output / ("kernels.jsonl" if "kernels" in row else "plan_sweep.jsonl")
    line = json.dumps(named | row) + "\n"
    with file.open("a", encoding="utf-8") as opened:
        opened.write(line)


# --- processes: this one never touches the GPU


def to_compile(case: Case) -> Case:
    """A case with the same kernels, and little memory."""
    if case.run.startswith("distilbert"):
        return case
    batch = min(case.changes["global_batch"], WARM_BATCH)
    model = dict(case.changes.get("model", {}))
    rows = model.get("table_rows") or workloads.named_run(case.run).model.table_rows
    model["table_rows"] = tuple(min(count, WARM_ROWS) for count in rows)
    changes = {"model": model, "global_batch": batch, "micro_batch": batch}
    return dataclasses.replace(case, changes=case.changes | changes)


def compile_all(cases: Sequence[Case], options: Options, seconds: float) -> None:
    """A little of what each does: its kernels lie in the caches on disk then."""
    quick = dataclasses.replace(options, seconds=0.0)
    for case in in_time(cases, seconds):
        try:
            list(MEASURES[case.kind](to_compile(case), quick))
        except Exception:
            traceback.print_exc()
        clean(options.device)


def in_turn(cases: Sequence[Case], options: Options, seconds: float) -> None:
    for case in in_time(cases, seconds):
        measure(case, options)


def in_time(cases: Sequence[Case], seconds: float) -> Iterator[Case]:
    """Those that can be begun within so many seconds."""
    began = time.perf_counter()
    for case in cases:
        if time.perf_counter() - began > seconds:
            print(f"no time left: {case.kind} {case.name}", flush=True)
        else:
            yield case


def side_by_side(works: Iterable[tuple[Callable[[], None], float]]) -> None:
    """Each in a process of its own; those that are not done in their seconds are ended."""
    context = multiprocessing.get_context("fork")
    began = time.perf_counter()
    found = [
        (context.Process(target=_in_its_own_group, args=(work,)), seconds)
        for work, seconds in works
    ]
    for process, _ in found:
        process.start()
    for process, seconds in sorted(found, key=lambda one: one[1]):
        process.join(max(0.0, began + seconds - time.perf_counter()))
        if process.is_alive():
            print(f"process {process.pid} took too long", flush=True)
            os.killpg(filled(process.pid), signal.SIGKILL)  # with those that it started
            process.join()


def _in_its_own_group(work: Callable[[], None]) -> None:
    os.setpgid(0, 0)
    _quietly(work)


def _quietly(work: Callable[[], None]) -> None:
    try:
        work()
    except Exception:
        traceback.print_exc()
    sys.stdout.flush()
    os._exit(0)  # libraries that tear down a GPU take seconds


def sweep(
    sections: Sequence[str],
    options: Options,
    budgets: dict[str, float],
    done: frozenset[tuple[str, str]],
) -> None:
    began = time.perf_counter()

    def say(what: str) -> None:
        print(f"{time.perf_counter() - began:6.1f} s  {what}", flush=True)

    cases = {
        name: [c for c in plan_design.SECTIONS[name]() if (c.name, c.kind) not in done]
        for name in sections
    }
    if options.device.type == "cuda":
        say("compiling")
        os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # there are as many processes as cores
        # Else inductor sets one of its own: what a process compiles after that is not found again.
        os.environ.setdefault("TRITON_CACHE_DIR", str(Path.home() / ".triton" / "cache"))
        limits = cases.pop("memory", [])
        works = [(partial(measure, case, options), budgets["memory"]) for case in limits]
        side_by_side([*works, *_compilers(cases, limits, options, budgets["compiling"])])
    for name, found in cases.items():
        say(name)
        seconds = min(budgets[name], began + budgets["all"] - SLACK_S - time.perf_counter())
        work = partial(in_turn, found, options, seconds)
        if options.tiny:
            work()
        else:
            side_by_side([(work, seconds + SLACK_S)])
    say("done")


def _compilers(
    cases: dict[str, list[Case]], limits: Sequence[Case], options: Options, seconds: float
) -> list[tuple[Callable[[], None], float]]:
    """Processes that compile what is timed afterwards, but for what `limits` train anyway."""
    compiled = {case.name for case in limits}
    listed = {
        (case.name, case.kind): case
        for found in cases.values()
        for case in found
        if case.kind != "kernels" and case.name not in compiled
    }.values()
    # The longest first: DistilBERT's are compiled by inductor.
    ordered = sorted(listed, key=lambda case: not case.run.startswith("distilbert"))
    workers = max(2, min(16, os.cpu_count() or 2) - len(limits) // 2)  # whose trials often wait
    shares = [ordered[worker::workers] for worker in range(workers)]
    return [(partial(compile_all, own, options, seconds), seconds + SLACK_S) for own in shares]


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
    parser.add_argument("--commit", help="what is measured, where there is no git to ask")
    parser.add_argument("--only", nargs="*", choices=plan_design.SECTIONS)
    parser.add_argument("--after", type=Path, help="results of an earlier sweep, to be added to")
    parser.add_argument("--seconds", type=float, default=0.5, help="of timed steps in a row")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes on the CPU")
    for name, seconds in BUDGETS.items():
        parser.add_argument(f"--{name}-s", type=float, default=seconds, help="at most")
    args = parser.parse_args(arguments)
    options = Options(
        device=torch.device("cpu") if args.tiny else torch.device("cuda", 0),
        tiny=args.tiny,
        seconds=0.0 if args.tiny else args.seconds,
        output=args.output,
        commit=args.commit,
    )
    options.output.mkdir(parents=True, exist_ok=True)
    budgets = {name: getattr(args, f"{name}_s") for name in BUDGETS}
    before = json.loads(args.after.read_text(encoding="utf-8")) if args.after else {"rows": []}
    earlier = [{"commit": before.get("commit")} | row for row in before["rows"]]
    done = {(row["case"], row["kind"]) for row in earlier}
    done |= {(row["case"], "kernels") for row in earlier if "kernels_us" in row}
    sweep(args.only or list(plan_design.SECTIONS), options, budgets, frozenset(done))
    collect(options, earlier)


if __name__ == "__main__":
    main()
