"""Log lines of the published systems: FlagPerf's `[PerfLog]` and dllogger's `DLLL`, one JSON object
each. `mlperf.py` has MLPerf's."""

import json
import sys
import time
from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Any, TextIO

from trainmark.run.result import Result

# --- FlagPerf


class PerfLog:
    """`[PerfLog]` lines as FlagPerf's own writer makes them, into `perf.log`."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def event(
        self, name: str, value: dict[str, Any] | str | None = None, at_s: float | None = None
    ) -> None:
        """Something that happened now, or at the time `at_s`; words go under another name."""
        record: dict[str, Any] = {"event": name}
        if value is not None:
            record["other" if isinstance(value, str) else "value"] = value
        record["metadata"] = {**caller(), "time_ms": milliseconds(at_s), "rank": 0}
        self._stream.write(f"[PerfLog] {json.dumps(record)}\n")
        self._stream.flush()


def flagperf_metrics(metrics: dict[str, float | None]) -> dict[str, float | None]:
    """Under the names that FlagPerf has for them."""
    return {"acc" if name == "accuracy" else name: value for name, value in metrics.items()}


def finished_event(result: Result) -> dict[str, Any]:
    """The FINISHED event's value: FlagPerf's own names, in its order."""
    return {
        "e2e_time": result.time_s.e2e,
        "num_trained_samples": result.samples,
        "global_steps": result.steps.all,
        "train_time": result.time_s.whole,
        "train_no_eval_time": result.time_s.train,
        "pure_training_computing_time": result.time_s.core,
        "throughput(ips)_raw": result.throughput.p_whole,
        "throughput(ips)_no_eval": result.throughput.p_train,
        "throughput(ips)_pure_compute": result.throughput.p_core,
        "converged": result.quality.reached,
        **_final_quality(result),
        "init_time": result.time_s.init,
    }


def _final_quality(result: Result) -> dict[str, float | None]:
    """An accuracy is `acc` alone; any other metric has its final and its best value."""
    metric, value = result.quality.metric, result.quality.value
    if metric == "accuracy":
        return {"acc": value}
    found = {f"final_{metric}": value, f"best_{metric}": _best(result, metric)}
    loss = _best(result, "log_loss")
    return found if loss is None else found | {"best_validation_loss": loss}


def _best(result: Result, metric: str) -> float | None:
    """The best value of a metric over all evaluations of the quality split."""
    higher = metric == result.quality.metric and result.quality.better == "higher"
    choose: Callable[[Iterable[float]], float] = max if higher else min
    values = [e.metrics.get(metric) for e in result.evaluations if e.split == result.quality.split]
    known = [value for value in values if value is not None]
    return choose(known) if known else None


# --- NVIDIA


class DlLog:
    """Lines of NVIDIA's dllogger (its JSONStreamBackend), into `dllogger.json`."""

    def __init__(self, stream: TextIO, started_s: float) -> None:
        self._stream = stream
        self._started_s = started_s

    def describe(self) -> None:
        """The units of the metrics."""
        for metric, unit in DLLOGGER_UNITS.items():
            self._write("METADATA", metric=metric, metadata={"unit": unit})

    def log(self, step: int | str | list[int], data: dict[str, Any]) -> None:
        """Numbers of a step, of the `PARAMETER`s, or, with no step ([]), of the whole run."""
        self._write("LOG", step=step, data=data)

    def _write(self, kind: str, **content: Any) -> None:
        now = datetime.now()
        record = {
            "timestamp": str(now.timestamp()),
            "datetime": str(now),
            "elapsedtime": str(now.timestamp() - self._started_s),
            "type": kind,
            **content,
        }
        self._stream.write(f"DLLL {json.dumps(record)}\n")
        self._stream.flush()


DLLOGGER_UNITS = {
    "throughput": "samples/s",
    "mean_step_time_ms": "ms",
    "auc": "",
    "validation_loss": "",
    "train_loss": "",
}


def training_summary(result: Result) -> dict[str, Any]:
    """The last record of a training, under the names of NVIDIA's DLRM."""
    measured = result.steps.all - result.steps.warmup
    metric = result.quality.metric
    return {
        "throughput": result.throughput.p_train,
        "mean_step_time_ms": 1000 * result.time_s.train / measured if measured > 0 else None,
        metric: _best(result, metric),
        "validation_loss": _best(result, "log_loss"),
        "train_loss": result.loss.last,
    }


# --- what all have


def caller() -> dict[str, Any]:
    """The line of code that told the run's log: three calls up."""
    frame = sys._getframe(3)
    return {"file": frame.f_code.co_filename, "lineno": frame.f_lineno}


def milliseconds(at_s: float | None) -> int:
    return int(1000 * (time.time() if at_s is None else at_s))
