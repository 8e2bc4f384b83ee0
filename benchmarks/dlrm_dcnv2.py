"""DLRM-DCNv2, MLPerf's recommender, on one GPU: samples per second, and where the time goes.

    PYTHONPATH=. python benchmarks/dlrm_dcnv2.py                     all rows (a CUDA machine)
    PYTHONPATH=. python benchmarks/dlrm_dcnv2.py --systems fbgemm    the peer alone
    PYTHONPATH=. python benchmarks/dlrm_dcnv2.py --tiny --output DIR the same code, anywhere

About 4 minutes on an H200, an estimate: 100 s for ours and 130 for the peer, most of which its
compiler takes. `--mlps fp8` is `--precision fp8`: that of the top MLP and of the cross layers.

Batches lie on the device with all of their ids, several of them in turn, the same for all systems.
`split_ms` is as in `dlrm_gpu.py`. The peer is FBGEMM's table-batched embeddings, which add up the
rows of bags, under the same network, compiled, with PyTorch's Adagrad. MLPerf's tables in fp32 with
element-wise Adagrad are 195 GiB, which one GPU has not. So ours are in bf16, sums as well; FBGEMM
has fp16 tables and row-wise Adagrad, one sum for a row, because its element-wise sums are fp32:
fewer bytes move than in ours, and its rows say so.

Each system and format has a process of its own, and what goes wrong in one ends its rows alone. A
row is printed and written as soon as it is measured; rows that are not measured again stay.
"""

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from benchmarks import common, dlrm_peers
from benchmarks.dlrm_clicks import EXPONENTS, Ids, draw_ids
from benchmarks.dlrm_gpu import OURS, key_of, with_ratios
from benchmarks.dlrm_systems import batch_of, endless_steps, resolved, trainer_for, with_changes
from benchmarks.timing import memory_gib, profiled, synchronize, warm_up, windows
from trainmark.config import SYNTHETIC, filled
from trainmark.embeddings.tables.batch import IdGroup
from trainmark.training.precision import autocast
from trainmark.training.seeding import generator
from trainmark.workloads.dlrm.data import ClickBatch
from trainmark.workloads.dlrm.runs import DlrmRun, dlrm_dcnv2

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


def run_of(
    tables: str, batch: int, device: torch.device, *, tiny: bool, precision: str = "bf16"
) -> DlrmRun:
    changes: dict[str, Any] = {
        "data": SYNTHETIC,
        "global_batch": batch,
        "micro_batch": batch,
        "precision": precision,
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
        for hot in sorted(set(model.bag_sizes)):
            features = [f for f, h in enumerate(model.bag_sizes) if h == hot]
            rows = [model.table_rows[f] for f in features]
            drawn = draw_ids(rows, samples * hot, EXPONENTS[ids], random)
            shape = (len(features), samples) if hot == 1 else (len(features), samples, hot)
            groups.append(IdGroup(features, drawn.view(shape)))
        dense = torch.randn(samples, model.numerical_features, device=device, generator=random)
        labels = torch.rand(samples, device=device, generator=random) < 0.2
        found.append(batch_of(dense.half(), groups, labels))
    return found


# --- the peer


class CrossLayer(nn.Module):
    """x <- (first x) * (W V x + b) + x: `down` is V, `up` is W with b."""

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(width, rank, bias=False), nn.Linear(rank, width)

    def forward(self, first_BN: Tensor, x_BN: Tensor) -> Tensor:
        return torch.addcmul(x_BN, first_BN, self.up(self.down(x_BN)))


class CrossDense(nn.Module):
    """Both MLPs, the cross layers and the loss: compiled as one."""

    def __init__(self, setting: dlrm_peers.Setting, cfg: DlrmRun) -> None:
        super().__init__()
        model, self._setting, self._eps = setting.model, setting, filled(cfg.optimizer.eps)
        width, (layers, rank) = model.joined_width, model.cross_shape
        with setting.device:
            inputs = [model.numerical_features, *model.bottom_mlp]
            self.bottom = dlrm_peers.mlp(inputs, last_relu=True)
            self.cross = nn.ModuleList(CrossLayer(width, int(rank)) for _ in range(layers))
            self.top = dlrm_peers.mlp([width, *model.top_mlp], last_relu=False)
        if setting.compile:
            self.compile(dynamic=False)

    def forward(self, numerical_BN: Tensor, rows_BFD: Tensor, labels_B: Tensor) -> Tensor:
        with autocast(self._setting.precision, self._setting.device):
            x_BD = self.bottom(numerical_BN)
            first_BN = x_BN = torch.cat([x_BD, rows_BFD.to(x_BD.dtype).flatten(1)], dim=1)
            for layer in self.cross:
                x_BN = layer(first_BN, x_BN)
            logits_B = self.top(x_BN).squeeze(-1)
        return binary_cross_entropy_with_logits(logits_B.float(), labels_B)

    def optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.Adagrad(
            self.parameters(), lr=self._setting.lr, eps=self._eps, foreach=True
        )


class Fbgemm(dlrm_peers.FbgemmTables):
    """Bags of ids, row-wise Adagrad.

    Args:
        precision: of the tables, as FBGEMM calls it.
    """

    def __init__(self, setting: dlrm_peers.Setting, cfg: DlrmRun, precision: str = "FP16") -> None:
        from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType

        super().__init__(
            setting,
            CrossDense(setting, cfg),
            optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
            weights_precision=SparseType[precision],
            eps=filled(cfg.optimizer.eps),
        )

    def batch(self, batch: ClickBatch) -> dlrm_peers.Bags:
        found = {f: ids for g in batch.groups for f, ids in zip(g.features, g.ids, strict=True)}
        ids_of = [found[f].view(batch.samples, -1).long() for f in range(len(found))]
        lengths = torch.cat([ids_BH.new_full((len(ids_BH),), ids_BH.shape[1]) for ids_BH in ids_of])
        ids = torch.cat([ids_BH.flatten() for ids_BH in ids_of])
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        return dlrm_peers.Bags(batch.numerical.float(), ids, offsets, batch.labels.float())


# --- measuring


def trainmark_rows(
    args: argparse.Namespace, device: torch.device, tables: str, precision: str
) -> Iterator[dict[str, Any]]:
    cfg = run_of(tables, args.batch, device, tiny=args.tiny, precision=precision)
    trainer = trainer_for(cfg, device)

    def losses(ids: Ids) -> Iterator[Tensor]:
        return endless_steps(trainer, batches(cfg, ids, device), LR, device)

    about = {
        "system": OURS,
        "tables_precision": tables,
        "mlp_precision": precision,
        "optimizer": "adagrad",
    }
    return measured(args, losses, device, about)


def fbgemm_rows(args: argparse.Namespace, device: torch.device) -> Iterator[dict[str, Any]]:
    if reason := dlrm_peers.missing("fbgemm"):
        print(f"fbgemm: skipped: {reason}", flush=True)
        return iter(())
    cfg = run_of("bf16", args.batch, device, tiny=args.tiny)
    setting = dlrm_peers.Setting(
        model=cfg.model, lr=LR, device=device, precision="bf16", compile=device.type == "cuda"
    )
    peer = Fbgemm(setting, cfg)

    def losses(ids: Ids) -> Iterator[Tensor]:
        pool = [peer.batch(batch) for batch in batches(cfg, ids, device)]
        synchronize(device)
        return peer.train(_endless(pool))

    about = {
        "system": "fbgemm",
        "tables_precision": "fp16",
        "mlp_precision": "bf16",
        "optimizer": "rowwise_adagrad",
        "note": "one sum for each row, where ours keep one for each element: fewer bytes move",
    }
    return measured(args, losses, device, about)


def _endless(pool: Sequence[Any]) -> Iterator[Any]:
    while True:
        yield from pool


def measured(
    args: argparse.Namespace, losses: Any, device: torch.device, about: dict[str, str]
) -> Iterator[dict[str, Any]]:
    for ids in args.ids:
        began, endless = time.perf_counter(), losses(ids)
        warm_up(endless, device)
        ready_s = time.perf_counter() - began
        step_s = statistics.mean(windows(endless, args.seconds, device))
        loss = next(endless).item()
        split_ms, kernels_ms = profiled(endless, device, most=40)
        yield about | {
            "size": "dcnv2",
            "batch": args.batch,
            "indices": ids,
            "source": "resident",
            "samples_per_s": args.batch / step_s,
            "step_ms": step_s * 1e3,
            "split_ms": split_ms,
            "memory_gib": memory_gib(device),
            "kernels_ms": kernels_ms,
            "ready_s": ready_s,
            "loss": loss,
        }


def measure(
    args: argparse.Namespace, device: torch.device, rows_of: Callable[..., Iterator[dict[str, Any]]]
) -> None:
    """Every row of a system: printed and written at once."""
    name = f"{RESULT}_tiny" if args.tiny else RESULT
    for row in rows_of(args, device):
        print(json.dumps(row), flush=True)
        there = common.read_rows(name, args.output)
        rows = {key_of(old): old for old in there} | {key_of(row): row}
        common.write_results(
            name, with_ratios([*rows.values()]), device, folder=args.output, commit=args.commit
        )


def main(words: Sequence[str] | None = None) -> None:
    parser = common.parser(__doc__)
    systems = [OURS, "fbgemm"]
    parser.add_argument("--systems", nargs="+", default=systems, choices=systems)
    parser.add_argument("--tables", nargs="+", default=["bf16"], choices=FORMATS, help="of ours")
    parser.add_argument("--mlps", nargs="+", default=["bf16", "fp8"], choices=["bf16", "fp8"])
    parser.add_argument("--ids", nargs="+", default=["uniform", "power_law"], choices=EXPONENTS)
    parser.add_argument("--batch", type=int, default=65536)
    parser.add_argument("--seconds", type=float, default=4, help="of steps per row")
    args = parser.parse_args(words)
    device = torch.device("cpu") if args.tiny else torch.device("cuda", 0)
    cases: dict[str, Any] = {
        f"{OURS} {tables} {precision}": partial(trainmark_rows, tables=tables, precision=precision)
        for tables in args.tables
        for precision in args.mlps
    } | {"fbgemm": fbgemm_rows}
    for name, rows_of in cases.items():
        wanted = name.split()[0] in args.systems
        if wanted and not common.in_a_process(partial(measure, args, device, rows_of)):
            print(f"{name}: failed", flush=True)


if __name__ == "__main__":
    main()
