"""DLRM-DCNv2, MLPerf's recommender, on one GPU: samples per second, and where the time goes.

    PYTHONPATH=. python benchmarks/dlrm_dcnv2.py                     all rows (a CUDA machine)
    PYTHONPATH=. python benchmarks/dlrm_dcnv2.py --tiny --output DIR the same code, anywhere

Batches lie on the device with all of their ids, several of them in turn. `split_ms` is as in
`dlrm_gpu.py`. A peer is FBGEMM's table-batched embeddings under the same network, compiled.
"""

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks import common
from benchmarks.dlrm_clicks import EXPONENTS, Ids, draw_ids
from benchmarks.dlrm_systems import batch_of, endless_steps, resolved, trainer_for, with_changes
from benchmarks.timing import memory_gib, profiled, synchronize, warm_up, windows
from trainmark.config import SYNTHETIC
from trainmark.embeddings.tables.batch import IdGroup
from trainmark.training.seeding import generator
from trainmark.workloads.dlrm.data import ClickBatch
from trainmark.workloads.dlrm.runs import DlrmRun, dlrm_dcnv2
from trainmark.workloads.dlrm.sizes import hotness

RESULT = "dlrm_dcnv2_h200"
POOL = 6  # different batches
LR = 1e-6  # tiny: a model that knows them by heart has gradients of 0, and those cost less power
FORMATS = {
    "bf16": {"table_precision": "bf16", "state_precision": "bf16"},
    "int8": {"table_precision": "int8", "state_precision": "bf16"},
}
TINY = {
    "table_rows": (300, 120_000, 7),
    "hotness": (3, 20, 1),
    "embedding_dim": 16,
    "bottom_mlp": (32, 16),
    "top_mlp": (64, 1),
    "cross_rank": 8,
}


def run_of(tables: str, batch: int, device: torch.device, *, tiny: bool) -> DlrmRun:
    changes: dict[str, Any] = {
        "data": SYNTHETIC,
        "global_batch": batch,
        "micro_batch": batch,
        "precision": "bf16",
        "table_format": FORMATS[tables],
    }
    cfg = resolved(with_changes(dlrm_dcnv2(), {"model": TINY} if tiny else {}), changes, device)
    return dataclasses.replace(cfg, multi_hot="data")  # the batches have all ids


def batches(cfg: DlrmRun, ids: Ids, device: torch.device) -> list[ClickBatch]:
    random, model = generator(device, "dcnv2", ids), cfg.model
    samples = cfg.global_batch or 0
    found = []
    for _ in range(POOL):
        groups = []
        for hot in sorted(set(hotness(model))):
            features = [f for f, h in enumerate(hotness(model)) if h == hot]
            rows = [model.table_rows[f] for f in features]
            drawn = draw_ids(rows, samples * hot, EXPONENTS[ids], random)
            shape = (len(features), samples) if hot == 1 else (len(features), samples, hot)
            groups.append(IdGroup(features, drawn.view(shape)))
        dense = torch.randn(samples, model.numerical_features, device=device, generator=random)
        labels = torch.rand(samples, device=device, generator=random) < 0.2
        found.append(batch_of(dense.half(), groups, labels))
    return found


def measure(
    args: argparse.Namespace, tables: str, device: torch.device
) -> Iterator[dict[str, Any]]:
    began = time.perf_counter()
    cfg = run_of(tables, args.batch, device, tiny=args.tiny)
    trainer = trainer_for(cfg, device)
    synchronize(device)
    print(f"built in {time.perf_counter() - began:.1f} s", flush=True)
    for ids in args.ids:
        endless = endless_steps(trainer, batches(cfg, ids, device), LR, device)
        warm_up(endless, device)
        step_s = statistics.mean(windows(endless, args.seconds, device))
        loss = next(endless).item()
        split_ms, kernels_ms = profiled(endless, device, most=40)
        yield {
            "system": "trainmark",
            "size": "dcnv2",
            "batch": args.batch,
            "indices": ids,
            "source": "resident",
            "tables_precision": tables,
            "mlp_precision": "bf16",
            "samples_per_s": args.batch / step_s,
            "step_ms": step_s * 1e3,
            "split_ms": split_ms,
            "memory_gib": memory_gib(device),
            "kernels_ms": kernels_ms,
            "loss": loss,
        }


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--tables", nargs="+", default=["bf16"], choices=FORMATS)
    parser.add_argument("--ids", nargs="+", default=["uniform", "power_law"], choices=EXPONENTS)
    parser.add_argument("--batch", type=int, default=65536)
    parser.add_argument("--seconds", type=float, default=4, help="of steps per row")
    args = parser.parse_args()
    device = torch.device("cpu") if args.tiny else torch.device("cuda", 0)
    rows = []
    for tables in args.tables:
        for row in measure(args, tables, device):
            print(json.dumps(row), flush=True)
            rows.append(row)
            common.write_results(
                f"{RESULT}_tiny" if args.tiny else RESULT,
                rows,
                device,
                folder=args.output,
                commit=args.commit,
            )


if __name__ == "__main__":
    main()
