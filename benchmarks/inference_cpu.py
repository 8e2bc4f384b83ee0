"""Latency of predictions on a CPU: `trainmark infer`'s way beside onnxruntime, in turns.

    python -m benchmarks.inference_cpu FOLDER --requests 400 --threads 1 2

FOLDER gets small runs of three networks: the demo's, `dlrm-auto`'s and, with small tables, that of
`dlrm-small`. Both systems are asked for the same rows in the same process, one request of one and
then one of the other, on the same number of threads. Ours gets them as `infer` does, in the types
of the dataset; onnxruntime gets them as float32 and int64, ready made. A busy machine delays both
alike, and what can be compared is the median of the ratios of neighbours, `of_onnxruntime`.
"""

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable
from functools import partial
from itertools import islice, product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common import write_results
from trainmark import metrics
from trainmark.cli import main as trainmark
from trainmark.config import filled
from trainmark.run import trained

NETWORKS = {
    "dlrm-demo": (),
    "dlrm-auto's MLPs": (
        *("--model.bottom-mlp", "256", "128", "16"),
        *("--model.top-mlp", "256", "128", "1"),
    ),
    "dlrm-small's MLPs": (
        *("--model.embedding-dim", "128", "--model.bottom-mlp", "512", "256", "128"),
        *("--model.top-mlp", "1024", "1024", "512", "256", "1"),
    ),
}
TRAINED = ("--synthetic-rows", "40000", "--max-steps", "3", "--device", "cpu")
BATCHES = (1, 8, 64, 512, 4096)
DIFFERENT = 16
TURN, DROPPED = 16, 4
"""Requests of a turn, and those of them that find threads and caches still cold."""
REST_S = 0.06
Systems = dict[str, list[Callable[[], Any]]]
"""Of each, requests that are to be made."""
MOST_S = 60.0
"""Of one size of one network, whatever was asked for."""


def measure(name: str, folder: Path, requests: int) -> list[dict[str, Any]]:
    """The rows of one network: a row for each system and batch."""
    run = folder / name.replace(" ", "-").replace("'", "")
    if not (run / "result.json").exists():
        words = ["train", "dlrm-demo", *TRAINED, *NETWORKS[name], "--output", str(run)]
        assert trainmark(words) == 0
        assert trainmark(["export", str(run), "--format", "onnx"]) == 0
    rows = []
    with trained.loaded(run, device="cpu") as model:
        predict = filled(model.workload.build_predictor)(model.trainer)
        session = _session(run / "export-onnx" / "model.onnx")
        for batch in BATCHES:
            given = _batches(model, batch)
            systems: Systems = {
                "trainmark": [partial(predict, b) for b in given],
                "onnxruntime": [partial(session, _arrays(b)) for b in given],
            }
            _check_equal(systems)
            seconds = _in_turns(systems, requests)
            ours, theirs = (_row(system, name, batch, s) for system, s in seconds.items())
            ratios = np.divide(seconds["onnxruntime"], seconds["trainmark"])
            ours["of_onnxruntime"] = round(float(np.median(ratios)), 3)
            rows += [ours, theirs]
            print(f"{name}, batch {batch}: {np.median(ratios):.2f} x onnxruntime", flush=True)
    return rows


def _session(path: Path) -> Callable[[dict[str, Any]], Any]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = torch.get_num_threads(), 3
    session = onnxruntime.InferenceSession(str(path), options)
    return lambda arrays: session.run(None, arrays)[0]


def _batches(model: Any, size: int) -> list[Any]:
    cfg = dataclasses.replace(model.cfg, eval_batch=size)
    found = list(islice(model.workload.build_data(cfg, "test", 0, 1), DIFFERENT))
    return [batch for batch in found if batch.samples == size]


def _arrays(batch: Any) -> dict[str, Any]:
    ids = np.empty((batch.samples, sum(len(g.features) for g in batch.groups)), np.int64)
    for group in batch.groups:
        ids[:, group.features] = group.ids.numpy().T
    return {"numerical": batch.numerical.float().numpy(), "categorical": ids}


def _check_equal(systems: Systems) -> None:
    ours, theirs = (calls[0]() for calls in systems.values())
    np.testing.assert_allclose(torch.sigmoid(ours).numpy(), theirs, atol=1e-5)


def _in_turns(systems: Systems, requests: int) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in systems}
    end = time.monotonic() + MOST_S
    turns = -(-requests // (TURN - DROPPED))
    for number in range(turns):
        for name, calls in systems.items():
            time.sleep(REST_S)
            for place in range(TURN):
                began = time.perf_counter()
                calls[(number + place) % len(calls)]()
                if place >= DROPPED:
                    seconds[name].append(time.perf_counter() - began)
        if number > 2 and time.monotonic() > end:
            break
    return seconds


def _row(system: str, run: str, batch: int, seconds: list[float]) -> dict[str, Any]:
    latency = metrics.latency_ms(seconds)
    return {
        "system": system,
        "run": run,
        "batch": batch,
        "precision": "fp32",
        "tables_precision": "fp32",
        "clients": 1,
        "threads": torch.get_num_threads(),
        "requests": len(seconds),
        "least_ms": round(1e3 * min(seconds), 4),
        "median_ms": round(latency["median_ms"], 4),
        "p99_ms": round(latency["p99_ms"], 4),
        "samples_per_s": round(batch / statistics.median(seconds), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--threads", type=int, nargs="+", default=[torch.get_num_threads()])
    parser.add_argument("--output", type=Path, help="a folder in the place of results/")
    parser.add_argument("--commit", help="what is measured, where git does not know it")
    chosen = parser.parse_args()
    rows = []
    for threads, name in product(chosen.threads, NETWORKS):
        torch.set_num_threads(threads)
        rows += measure(name, chosen.folder, chosen.requests)
    print(write_results("inference_cpu", rows, folder=chosen.output, commit=chosen.commit))


if __name__ == "__main__":
    main()
