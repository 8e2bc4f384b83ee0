"""Steps and memory of many configurations on one GPU, which the planner's constants are fitted to.

    PYTHONPATH=. python benchmarks/plan_sweep.py --output DIR              a CUDA machine, 5 minutes
    PYTHONPATH=. python benchmarks/plan_sweep.py --output DIR --tiny       does it run?

What an earlier sweep has not measured is added to its rows, here `evaluate`, `infer` and the limits
of memory (about 150 s); with `--only dlrm` instead, the rest of the design (about 300 s). Then
`DIR/plan_sweep_h200.json` goes to `benchmarks/results/`, and `benchmarks/plan_errors.py` compares:

    PYTHONPATH=. python benchmarks/plan_sweep.py --output DIR --only others memory \\
        --after benchmarks/results/plan_sweep_h200.json

`plan_design.py` says which. Every row is appended to `plan_sweep.jsonl` as soon as it is measured,
and what one configuration does wrong ends that row alone (`error`). `kernels.jsonl` has, in order,
the kernels of one step of each row, in microseconds.

    compiling   many processes at once, so that kernels of all configurations lie in the caches
    dlrm        one process: the random design, and the published shape first and last
    distilbert  one process
    others      exchange, tables in host memory, Adam, evaluation, single requests
    memory      processes side by side: the least memory that a configuration trains in, found by
                halving between what was allocated and what was reserved

Batches lie on the device. Steps are timed by device events after half a second of them, in which a
GPU comes to its power limit. Each row has what the planner said at the time.
"""

import argparse
import dataclasses
import itertools
import json
import multiprocessing
import os
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
from benchmarks.timing import part_of, synchronize
from trainmark import workloads
from trainmark.config import filled
from trainmark.inference.latency import DROPPED, seconds_of
from trainmark.workloads.dlrm.data import ClickBatch

CAPTURED = 7  # steps after which both graphs of a DLRM are captured
TRIALS = 4  # of halving
REQUESTS = (1, 64, 4096)
WARM_BATCH = 32768  # from here on a larger batch has the same kernels
WARM_ROWS = 200_000
BUDGETS = {"compiling": 90.0, "dlrm": 200.0, "distilbert": 75.0, "others": 60.0, "memory": 60.0}


# --- rows


def measure_training(case: Case, options: Options) -> Iterator[dict[str, Any]]:
    began = time.perf_counter()
    steps = Steps(case, options)
    for _ in range(CAPTURED):
        steps()
    synchronize(options.device)
    ready_s = time.perf_counter() - began
    row: dict[str, Any] = {"ready_s": ready_s, "built_bytes": steps.built_bytes}
    row |= timed(steps, options) | peaks(steps) | {"batch_bytes": steps.batch_bytes}
    row["skipped"] = float(steps.skipped)
    row["engine"] = type(getattr(steps.trainer.model, "tables", steps.trainer.model)).__name__
    row["predicted"] = steps.predicted()
    yield row
    yield {"kernels": kernels(steps, options.device)}


def measure_evaluation(case: Case, options: Options) -> Iterator[dict[str, Any]]:
    """Batches of `eval_batch`, without a read of what they give."""
    steps = Steps(case, options)
    turns, trainer = itertools.cycle(steps.batches), steps.trainer

    def one() -> None:
        trainer.predict(trainer.prepare_to_predict(next(turns), trainer.cfg.eval_batch))

    for _ in range(CAPTURED):
        one()
    yield timed(one, options) | peaks(steps) | {"batch_bytes": steps.batch_bytes}
    yield {"kernels": kernels(one, options.device)}


def measure_requests(case: Case, options: Options) -> Iterator[dict[str, Any]]:
    """As `trainmark infer` times them: from host memory to host memory, one after another."""
    steps = Steps(case, options)
    predict = filled(workloads.load("dlrm").build_predictor)(steps.trainer)
    for size in REQUESTS:
        requests = [_on_host(batch, min(size, batch.samples)) for batch in steps.batches]
        turns = itertools.cycle(requests)
        seconds_of(predict, itertools.islice(turns, DROPPED))
        found = seconds_of(predict, itertools.islice(turns, 10 if options.tiny else 200))
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
    """The least memory that some steps need; each trial is a row."""
    needed = trial(case, options, None)
    yield {"limit_bytes": None} | needed
    low, high = 0.97 * needed["allocated_bytes"], 1.01 * needed["reserved_bytes"]
    for _ in range(TRIALS if options.device.type == "cuda" else 0):
        limit = (low + high) / 2
        row = trial(case, options, limit)
        yield {"limit_bytes": round(limit)} | row
        low, high = (low, limit) if row["fits"] else (limit, high)


def trial(case: Case, options: Options, limit: float | None) -> dict[str, Any]:
    """Steps with so many bytes beside the batches: whether they fit, and what was used."""
    clean(options.device)
    if options.device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(1.0)
    row: dict[str, Any] = {"fits": True}
    try:
        if limit is not None:
            total = torch.cuda.get_device_properties(options.device).total_memory
            allowed = limit + batch_bytes(case, options)
            torch.cuda.set_per_process_memory_fraction(allowed / total)
        steps = Steps(case, options)
        for _ in range(CAPTURED + 1):
            steps()
        synchronize(options.device)
        row |= peaks(steps) | {"predicted": steps.predicted()}
    except Exception as error:
        if not ran_out(error):
            raise
        row = {"fits": False}
    return row


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
}


def measure(case: Case, options: Options) -> None:
    """All rows of a case, written as they come; an error is a row."""
    how = measure_limits if case.limits else MEASURES[case.kind]
    began = time.perf_counter()
    try:
        for row in how(case, options):
            write(case, row, options)
    except Exception as error:
        traceback.print_exc()
        write(case, {"error": f"{type(error).__name__}: {error}"[:500]}, options)
    clean(options.device)
    print(f"{time.perf_counter() - began:6.1f} s  {case.name}", flush=True)


def write(case: Case, row: dict[str, Any], options: Options) -> None:
    """One line, in one write: several processes share the file."""
    of_kernels = "kernels" in row
    workload = case.run.partition("-")[0]
    named: dict[str, Any] = {"system": "trainmark", "workload": workload, "case": case.name}
    if of_kernels:
        split: dict[str, float] = {}
        for name, _, microseconds in row["kernels"]:
            split[part_of(name)] = split.get(part_of(name), 0.0) + microseconds
        named["split_us"] = split
    else:
        named |= {"kind": "limits" if case.limits else case.kind, "held_out": case.held_out}
        named |= {"run": case.run, "changes": case.changes, "ids": case.ids}
        named |= {"factors": case.factors}
    file = options.output / ("kernels.jsonl" if of_kernels else "plan_sweep.jsonl")
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


def compile_all(cases: Sequence[Case], options: Options) -> None:
    """Steps of each, until its graphs are captured: its kernels lie in the caches on disk then."""
    for case in cases:
        try:
            steps = Steps(to_compile(case), options)
            for _ in range(CAPTURED):
                steps()
            synchronize(options.device)
            del steps
        except Exception:
            traceback.print_exc()
        clean(options.device)


def side_by_side(works: Iterable[Callable[[], None]], seconds: float) -> None:
    """Each in a process of its own; those that are not done in time are ended."""
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_quietly, args=(work,)) for work in works]
    for process in processes:
        process.start()
    end = time.perf_counter() + seconds
    for process in processes:
        process.join(max(0.0, end - time.perf_counter()))
        if process.is_alive():
            print(f"process {process.pid} took too long", flush=True)
            process.kill()
            process.join()


def _quietly(work: Callable[[], None]) -> None:
    try:
        work()
    except Exception:
        traceback.print_exc()
    sys.stdout.flush()
    os._exit(0)  # libraries that tear down a GPU take seconds


def in_turn(cases: Sequence[Case], options: Options, seconds: float) -> None:
    began = time.perf_counter()
    for case in cases:
        if time.perf_counter() - began > seconds:
            print(f"no time left: {case.name}", flush=True)
        else:
            measure(case, options)


def sweep(
    sections: Sequence[str], options: Options, budgets: dict[str, float], done: frozenset[str]
) -> None:
    began = time.perf_counter()

    def say(what: str) -> None:
        print(f"{time.perf_counter() - began:6.1f} s  {what}", flush=True)

    cases = {
        name: [c for c in plan_design.SECTIONS[name]() if c.limits or c.name not in done]
        for name in sections
    }
    if options.device.type == "cuda":
        say("compiling")
        os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # there are as many processes as cores
        # Else inductor sets one of its own: what a process compiles after that is not found again.
        os.environ.setdefault("TRITON_CACHE_DIR", str(Path.home() / ".triton" / "cache"))
        trained = {c.name: c for found in cases.values() for c in found if c.kind == "train"}
        # The longest first: DistilBERT's are compiled by inductor.
        listed = sorted(trained.values(), key=lambda c: not c.run.startswith("distilbert"))
        workers = max(2, min(16, os.cpu_count() or 2))
        shares = [listed[worker::workers] for worker in range(workers)]
        side_by_side([partial(compile_all, own, options) for own in shares], budgets["compiling"])
    for name, found in cases.items():
        say(name)
        if options.tiny:
            in_turn(found, options, budgets[name])
        elif name == "memory":
            side_by_side([partial(measure, case, options) for case in found], budgets[name])
        else:
            side_by_side([partial(in_turn, found, options, budgets[name])], budgets[name] + 30)
    say("done")


def collect(options: Options, earlier: Sequence[dict[str, Any]] = ()) -> None:
    """All rows with what they were measured on, as results are kept; earlier ones first."""
    file = options.output / "plan_sweep.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    known = {(row["case"], row["kind"]) for row in earlier}
    found = map(json.loads, lines)
    rows = [*earlier, *(row for row in found if (row["case"], row["kind"]) not in known)]
    options.write("plan_sweep_tiny" if options.tiny else "plan_sweep_h200", rows)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--commit", help="what is measured, where there is no git to ask")
    parser.add_argument("--only", nargs="*", choices=plan_design.SECTIONS)
    parser.add_argument("--after", type=Path, help="results of an earlier sweep, to be added to")
    parser.add_argument("--seconds", type=float, default=0.6, help="of timed steps in a row")
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
    earlier = json.loads(args.after.read_text(encoding="utf-8"))["rows"] if args.after else []
    done = frozenset(row["case"] for row in earlier)
    sweep(args.only or list(plan_design.SECTIONS), options, budgets, done)
    collect(options, earlier)


if __name__ == "__main__":
    main()
