"""DLRM steps on CPUs, as `trainmark plan` predicts them with rates measured on the same machine.

    PYTHONPATH=. python benchmarks/plan_cpu.py --layouts 1x1 1x2 2x1

A layout is ranks x threads of each. Before its runs, `calibrate` measures the machine as these
ranks use it, and as other work leaves it to them; a run's result has both times. On two quiet cores
all three layouts take about 8 minutes. Rows of other machines and layouts stay in
`results/plan_cpu.json`; `plan_errors.py` takes them from there, and is to be run afterwards. The
last lines printed are those of docs/predictions.md. No constant of the planner is fitted to any
row: it counts operations and bytes, and rates are measured.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import read_rows, write_results
from trainmark.hardware.devices import cpu_name, usable_cores
from trainmark.report.forecasts import step_time
from trainmark.run import result

NAME = "plan_cpu"
COMMON = (
    "train dlrm-demo --data synthetic --synthetic-ids uniform --synthetic-rows 500000 "
    "--evals-per-epoch 0 --checkpoint-every never --log-every 10 --warmup-clock 5 --device cpu"
)
SHAPES = {  # steps; then the flags
    "demo, 2k": (300, "--global-batch 2048"),
    "demo, 16k": (60, "--global-batch 16384"),
    "mid, 8k": (
        40,
        "--global-batch 8192 --model.embedding-dim 32 --model.bottom-mlp 128 64 32 "
        "--model.top-mlp 256 128 1 --optimizer.name sgd",
    ),
    "mid, 32k": (
        12,
        "--global-batch 32768 --model.embedding-dim 64 --model.bottom-mlp 256 128 64 "
        "--model.top-mlp 512 256 1 --optimizer.name rowwise_adagrad",
    ),
    "big, 4k": (
        14,
        "--global-batch 4096 --model.embedding-dim 128 --model.bottom-mlp 512 256 128 "
        "--model.top-mlp 1024 1024 512 256 1 --optimizer.name sgd",
    ),
    "wide, 16k": (
        16,
        "--global-batch 16384 --model.embedding-dim 128 --model.bottom-mlp 128 128 "
        "--model.top-mlp 256 1 --optimizer.name adagrad",
    ),
    "tables, 8k": (
        40,
        "--global-batch 8192 --model.embedding-dim 64 --model.bottom-mlp 128 64 "
        "--model.top-mlp 128 1 --optimizer.name rowwise_adagrad "
        f"--model.table-rows {' '.join(['100000'] * 26)}",
    ),
}


def measured(layout: str, chosen: list[str], folder: Path) -> Iterator[dict[str, Any]]:
    """A row for each shape that ran."""
    file = folder / f"{layout}.toml"
    if not _trainmark(layout, f"calibrate --device cpu --output {file}"):
        return
    for name in chosen:
        steps, flags = SHAPES[name]
        output = folder / f"{layout} {name}".replace(",", "").replace(" ", "-")
        flags += f" --max-steps {steps} --hardware {file} --output {output}"
        if _trainmark(layout, f"{COMMON} {flags}"):
            found = result.read(output / "result.json")
            times = step_time(found)
            yield {
                "system": "trainmark",
                "workload": "dlrm",
                "case": f"{layout} {name}",
                "machine": f"{cpu_name()}, {usable_cores()} cores",
                "load_average": os.getloadavg()[0],
                "predicted_s": times.predicted,
                "measured_s": times.measured,
                "parts_s": found.predicted.parts if found.predicted else None,
            }


def told(rows: Sequence[dict[str, Any]]) -> list[str]:
    """How far off they are, as docs/predictions.md says it: by layout on two cores, and all."""
    off = [(row["case"], row["predicted_s"] / row["measured_s"] - 1) for row in rows]
    lines = []
    for layout in ("1x1", "1x2", "2x1"):
        own = [one for case, one in off if case.startswith(layout)]
        median, worst = statistics.median(map(abs, own)), max(own, key=abs)
        cells = [layout.replace("x", " x "), f"{100 * median:.0f} %", f"{100 * worst:+.0f} %"]
        lines.append(f"| {' | '.join([*cells, f'{_within(own)} of {len(own)}'])} |")
    every = [one for _, one in off]
    median = statistics.median(map(abs, every))
    return [
        *lines,
        f"Of all {len(every)} rows, {_within(every)} are within 15 %, "
        f"and the median is {100 * median:.0f} %.",
    ]


def _within(off: Sequence[float]) -> int:
    return sum(abs(one) < 0.15 for one in off)


def _trainmark(layout: str, arguments: str) -> bool:
    """Whether the ranks of a layout ended well."""
    ranks, threads = layout.split("x")
    launcher = f"-m torch.distributed.run --standalone --nproc-per-node {ranks} " * (ranks != "1")
    words = [*launcher.split(), "-m", "trainmark", *arguments.split()]
    env = {**os.environ, "OMP_NUM_THREADS": threads}
    done = subprocess.run([sys.executable, *words], env=env, capture_output=True, text=True)
    if done.returncode:
        print(done.stderr[-2000:], file=sys.stderr)
    return done.returncode == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layouts", nargs="+", default=["1x1", "1x2", "2x1"])
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=SHAPES)
    options = parser.parse_args()
    rows = read_rows(NAME)
    with tempfile.TemporaryDirectory() as folder:
        for layout in options.layouts:
            for row in measured(layout, options.shapes, Path(folder)):
                same = [(row[key], key) for key in ("case", "machine")]
                rows = [old for old in rows if any(old.get(key) != value for value, key in same)]
                rows.append(row)
                off = row["predicted_s"] / row["measured_s"] - 1
                print(f"{row['case']:20} {1e3 * row['measured_s']:9.2f} ms {off:+7.1%}", flush=True)
                write_results(NAME, rows)
    print("\n".join(told(rows)))


if __name__ == "__main__":
    main()
