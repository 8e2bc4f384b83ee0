"""Rows a second of `trainmark predict` from Criteo text, with the demo's model.

    python -m benchmarks.predict --run build/demo/run --input 'build/demo/raw/day_*' --repeats 3

Each repeat is a process of its own, with everything that it does: imports, reading, encoding,
loading, scoring, writing. CPU seconds hardly depend on what else the machine does; rows per CPU
second, times the cores, bound what an idle machine reaches.
"""

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import tyro


@dataclass(frozen=True)
class Options:
    """What to score, and how often."""

    run: Path
    """Output folder of a run on Criteo text."""
    input: str
    """Files to score."""
    repeats: int = 3
    output: Path | None = None
    """JSON to write besides printing it."""


def measure(options: Options) -> dict[str, Any]:
    """Wall and CPU seconds of each repeat, and the rows that it scored."""
    repeats = []
    for _ in range(options.repeats):
        with tempfile.TemporaryDirectory() as folder:
            scores = Path(folder) / "scores.parquet"
            words = ["predict", str(options.run), "--input", options.input]
            words += ["--output", str(scores), "--device", "cpu"]
            before, began = _cpu_s(), time.perf_counter()
            subprocess.run([sys.executable, "-m", "trainmark", *words], check=True)
            wall_s, cpu_s = time.perf_counter() - began, _cpu_s() - before
            rows = pq.read_metadata(scores).num_rows
        repeats.append({"rows": rows, "wall_s": wall_s, "cpu_s": cpu_s, "load": os.getloadavg()[0]})
    wall_s, cpu_s = (statistics.median(r[key] for r in repeats) for key in ("wall_s", "cpu_s"))
    rows = repeats[0]["rows"]
    return {
        "cores": len(os.sched_getaffinity(0)),
        "rows": rows,
        "rows_per_s": rows / wall_s,
        "rows_per_cpu_s": rows / cpu_s,
        "repeats": repeats,
    }


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    chosen = tyro.cli(Options)
    text = json.dumps(measure(chosen), indent=2)
    print(text)
    if chosen.output:
        chosen.output.write_text(text + "\n")
