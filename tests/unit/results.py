"""Results for tests of what reads them: complete, consistent, and easy to vary."""

import dataclasses
import math
from pathlib import Path
from typing import Any

from trainmark.run.result import (
    Evaluation,
    Loss,
    Memory,
    Predicted,
    Quality,
    Result,
    Steps,
    Throughput,
    Times,
)

GIB = 2**30


def make_result(**changes: Any) -> Result:
    """A `dlrm-demo` run on a CPU that reached its target; `changes` replaces fields."""
    result = Result(
        run="dlrm-demo",
        workload="dlrm",
        case="cpux1x1",
        precision="fp32",
        parallel={"dp": 1},
        division="closed",
        changed=[],
        samples=1_000_000,
        samples_measured=900_000,
        tokens=None,
        steps=Steps(all=1000, warmup=100, skipped=0),
        time_s=Times(
            e2e=62.0,
            init=4.0,
            whole=55.0,
            train=45.0,
            core=40.0,
            evaluation=6.0,
            checkpoint=1.5,
            input_wait=5.0,
            warmup=2.5,
        ),
        throughput=Throughput(p_whole=1_000_000 / 55, p_train=20_000.0, p_core=22_500.0),
        tokens_per_device_s=None,
        mfu=[],
        mfu_reason="no peak is known for the CPU 'Test CPU'",
        quality=Quality(
            metric="auc",
            split="test",
            value=0.7912,
            target=0.787,
            better="higher",
            reached=True,
            at_sample=900_000,
            at_s=47.0,
            best_possible=0.8021,
        ),
        evaluations=make_evaluations(),
        memory=Memory(
            peak_bytes=int(1.25 * GIB),
            allocated_peak_bytes=None,
            total_bytes=16 * GIB,
            host_peak_bytes=int(1.25 * GIB),
        ),
        loss=Loss(first=0.61, last=0.41),
        config={"global_batch": 1000, "best_auc": 0.8021, "model": {"dim": 16, "tables": [10, 20]}},
        hardware={"cpu": "Test CPU", "host_memory_bytes": 16 * GIB, "monitor": make_monitor()},
        software={"python": "3.11.7", "torch": "2.13.0", "commit": None},
        started="2026-01-31T12:00:00Z",
    )
    return dataclasses.replace(result, **changes)


def make_evaluations() -> list[Evaluation]:
    """Ten evaluations on each of two splits, rising to 0.7912."""
    return [
        Evaluation(
            at_sample=100_000 * (i + 1),
            split=split,
            metrics={"auc": 0.7912 - gap - 0.12 * math.exp(-0.7 * i), "log_loss": 0.4},
            seconds=0.3,
        )
        for i in range(10)
        for split, gap in (("test", 0.0), ("validation", 0.004))
    ]


def make_predicted(**changes: Any) -> Predicted:
    """Of the run above: 40 ms a step, where 50 were measured."""
    predicted = Predicted(
        step_s=0.04,
        p_train=25_000.0,
        memory_bytes=1000,
        memory_parts={"weights": 600, "gradients": 0, "optimizer": 100, "activations": 300},
        parts={"gather": 0.01, "dense": 0.03},
        bound_by="compute",
        reason=None,
        planner="trainmark 0.1.0",
        constants={"matmul of peak": 0.5},
        sources=["a datasheet"],
    )
    return dataclasses.replace(predicted, **changes)


def make_monitor() -> dict[str, Any]:
    return {
        "interval_s": 1.0,
        "samples": 62,
        "power_w": {"mean": None, "max": None},
        "utilisation": {"mean": 0.83, "max": 0.99},
        "memory_bytes": {"mean": 1.1 * GIB, "max": 1.25 * GIB},
        "host_memory_bytes": {"max": 1.25 * GIB},
        "temperature_c": {"max": None},
        "reason": None,
    }


def write_run(folder: Path, result: Result, losses: list[float] | None = None) -> Path:
    """The folder of a finished run: `result.json` and, with `losses`, `loss.csv`."""
    folder.mkdir(parents=True, exist_ok=True)
    result.write(folder)
    if losses is not None:
        rows = [f"{step},{step * 1000},{loss!r}" for step, loss in enumerate(losses, start=1)]
        (folder / "loss.csv").write_text("\n".join(["step,samples,loss", *rows]) + "\n")
    return folder
