"""Rows a second of `trainmark predict` from Criteo text, with the demo's model.

    python -m benchmarks.predict --run build/demo/run --input 'build/demo/raw/day_*' --repeats 3

Each repeat is a process of its own, with everything that it does: imports, reading, encoding,
loading, scoring, writing. CPU seconds hardly depend on what else the machine does; rows per CPU
second, times the cores, bound what an idle machine reaches.
"""

import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import tyro

from benchmarks.common import write_results


@dataclass(frozen=True)
class Options:
    """What to score, and how often."""

    run: Path
    """Output folder of a run on Criteo text, or an export of one."""
    input: str
    """Files to score."""
    repeats: int = 3
    output: Path | None = None
    """A folder in the place of results/."""
    commit: str | None = None
    """What is measured, for a machine that has a copy of the files but not of git."""


def measure(options: Options) -> Iterator[dict[str, Any]]:
    """A row for each repeat."""
    for _ in range(options.repeats):
        with tempfile.TemporaryDirectory() as folder:
            scores = Path(folder) / "scores.parquet"
            words = ["predict", str(options.run), "--input", options.input]
            words += ["--output", str(scores), "--device", "cpu"]
            before, began = _cpu_s(), time.perf_counter()
            subprocess.run([sys.executable, "-m", "trainmark", *words], check=True)
            wall_s, cpu_s = time.perf_counter() - began, _cpu_s() - before
            rows = pq.read_metadata(scores).num_rows
        yield {
            "system": "trainmark",
            "run": options.run.name,
            "rows": rows,
            "cores": len(os.sched_getaffinity(0)),
            "wall_s": round(wall_s, 3),
            "cpu_s": round(cpu_s, 3),
            "rows_per_s": round(rows / wall_s),
            "rows_per_cpu_s": round(rows / cpu_s),
            "load": os.getloadavg()[0],
        }


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    options = tyro.cli(Options)
    rows = []
    for row in measure(options):
        print(row, flush=True)
        rows.append(row)
    print(write_results("predict_cpu", rows, folder=options.output, commit=options.commit))


if __name__ == "__main__":
    main()
