"""Ranks that train a DLRM with several ids per feature, and compare with what one process has."""

import dataclasses
import itertools
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests import bags, bags_by_hand
from tests.bags_by_hand import ByHand
from tests.checkpoint_tensors import save_checkpoint
from tests.distributed import joining, small_dlrm, torchrec_ranks
from tests.distributed.small_dlrm import GLOBAL_BATCH, TABLE_ROWS, TRAIN_ROWS
from trainmark.checkpoint import checkpoints
from trainmark.distributed import mesh as meshes
from trainmark.distributed.mesh import single
from trainmark.embeddings.bag_engines import FusedBagEngine, LocalBagEngine
from trainmark.embeddings.engine import LocalEngine
from trainmark.embeddings.mean import MeanEngine
from trainmark.embeddings.sharded import ShardedEngine
from trainmark.embeddings.tables.update import make_rule
from trainmark.workloads.dlrm.data import build_data
from trainmark.workloads.dlrm.runs import DlrmRun
from trainmark.workloads.dlrm.step import DlrmTrainer

HOTNESS = (5, 2, 3, 2, 1, 9)
"""Table 1 has three parts where all are row-wise: more than a bag has ids."""
STEPS = 3
MICRO = {"micro_batch": GLOBAL_BATCH // 8}
LARGE_EPS = {"eps": 1e-3}
"""With the default, gradients that cancel to rounding decide on a whole step."""
NATIVE: list[tuple[str, str, dict[str, Any]]] = [
    ("mixture", "rowwise_adagrad", {}),
    ("mixture", "sgd", MICRO | {"interaction": "dcn"}),
    ("mixture", "sgd", {"pooling": "mean"}),
    ("row_wise", "adam", {"pooling": "mean"} | LARGE_EPS),
    ("mixture", "adagrad", MICRO | LARGE_EPS),
    ("mixture_host", "rowwise_adagrad", MICRO),
    ("mixture_host", "adam", LARGE_EPS),
    ("data_parallel", "adam", LARGE_EPS),
    ("column_wise", "sgd", {"regular": True}),
    ("row_wise", "rowwise_adagrad", MICRO),
    ("formats", "rowwise_adagrad", MICRO | small_dlrm.stored("int8")),
]
TORCHREC: list[tuple[str, str, dict[str, Any]]] = [
    ("auto", "adagrad", {}),
    ("mixture", "sgd", {"interaction": "dcn"}),
    ("mixture", "sgd", {"pooling": "mean"}),
]


BY_HAND: dict[str, list[tuple[str, str, dict[str, Any]]]] = {
    "native": [
        *(("mixture", optimizer, {}) for optimizer in small_dlrm.OPTIMIZERS),
        ("mixture_host", "adam", {"pooling": "mean"}),
        ("mixture_host", "rowwise_adagrad", {}),
        ("row_wise", "rowwise_adagrad", {"pooling": "mean"}),
        ("column_wise", "rowwise_adagrad", {}),
        ("data_parallel", "adam", {}),
    ],
    "torchrec": [
        ("row_wise", "rowwise_adagrad", {}),
        ("mixture", "adagrad", {"pooling": "mean"}),
    ],
}
"""What is compared with the formulas, besides."""


def write_data(folder: Path) -> Path:
    return bags.write_dataset(
        folder, rows=TRAIN_ROWS, hotness=HOTNESS, table_rows=TABLE_ROWS, numerical=5
    )


def check(built: DlrmTrainer, alone: DlrmTrainer, name: str) -> None:
    """Losses and this rank's weights are those of one process, to 1e-5."""
    mesh, cfg = built.mesh, built.cfg
    # On a GPU the order of additions may lift a code over the middle between two, and what is
    # computed from that row is then another: a code is a 127th of the row's largest number.
    has_codes = cfg.table_format.table_precision == "int8" and mesh.device.type == "cuda"
    of_floats = 2e-3 if has_codes else 1e-5
    mine = build_data(cfg, "train", mesh.dp_rank, mesh.dp_size)
    for own, whole in itertools.islice(
        zip(mine, build_data(alone.cfg, "train", 0, 1), strict=True), STEPS
    ):
        expected, loss = step(alone, whole, cfg.lr), step(built, own, cfg.lr)
        assert abs(loss - expected) < 1e-5 * expected, name
    held, wanted = built.weights(), alone.weights()
    for key, tensor in wanted.items():
        for found, part in small_dlrm.parts(held.get(key), tensor):
            near = of_floats if found.is_floating_point() else 1
            told = partial("{}, {}: {}".format, name, key)
            # Tables in host memory beside those that one process has on its GPU.
            torch.testing.assert_close(found.cpu(), part.cpu(), rtol=1e-5, atol=near, msg=told)


def step(built: DlrmTrainer, batch: Any, lr: float) -> float:
    prepared = built.prepare(batch)
    if prepared.ready is not None:
        prepared.ready.wait()
    return built.step(prepared, lr)[0].item()


def one_process(cfg: DlrmRun, changes: dict[str, Any], device: torch.device) -> DlrmTrainer:
    found = small_dlrm.config(1, cfg.optimizer.name, data=cfg.data, device=device, **changes)
    return small_dlrm.trainer(
        dataclasses.replace(found, micro_batch=found.global_batch, accumulate=1), single(device)
    )


def on_ranks(rank: int, folder: Path, engine: str, device_kind: str = "cpu") -> None:
    device = joining.join(rank, 2, folder / f"store-{engine}", device_kind)
    mesh = meshes.build(device, {"dp": 2})
    data = str(folder / "data")

    def placed(kind: str, optimizer: str, changes: dict[str, Any]) -> DlrmRun:
        if engine == "torchrec":
            return torchrec_ranks.placed(2, kind, optimizer, folder, data=data, **changes)
        return small_dlrm.placed(2, optimizer, kind, folder, data=data, device=device, **changes)

    for kind, optimizer, changes in BY_HAND[engine] if device_kind == "cpu" else ():
        cfg = placed(kind, optimizer, changes | {"eps": bags_by_hand.EPS})
        alone = one_process(cfg, changes, device)
        by_hand = ByHand(alone.model.tables.table_weights(), optimizer, cfg.model.pooling)
        check_by_hand(small_dlrm.trainer(cfg, mesh), by_hand, f"{engine} {kind} {optimizer}")
    for kind, optimizer, changes in TORCHREC if engine == "torchrec" else NATIVE:
        cfg = placed(kind, optimizer, changes)
        assert cfg.model.hotness == HOTNESS
        alone = one_process(cfg, changes, device)
        engines = MeanEngine if "pooling" in changes else LocalBagEngine | FusedBagEngine
        assert isinstance(alone.model.tables, engines)
        built = small_dlrm.trainer(cfg, mesh)
        check(built, alone, f"{engine} {kind} {optimizer} {changes}")
        if kind == "mixture" and not changes:
            continue_alone(built, alone, folder / f"saved-{engine}-{optimizer}")
    dist.barrier()
    dist.destroy_process_group()


def check_by_hand(built: DlrmTrainer, by_hand: ByHand, name: str) -> None:
    """Steps of this rank's engine, of unequal shares, and of the formulas."""
    engine, rank = built.model.tables, built.mesh.dp_rank
    for number in range(STEPS):
        shares = [7, 20]
        ids = bags_by_hand.draw_ids(TABLE_ROWS, HOTNESS, sum(shares), number)
        # TorchRec's kernels update rows in each backward pass.
        micro_batches = 2 if number == 1 and isinstance(engine, ShardedEngine) else 1
        bags_by_hand.train(
            engine, by_hand, ids, number, shares=shares, rank=rank, micro_batches=micro_batches
        )
    compare(engine, by_hand, name)


def whole_by_hand(optimizer: str, pooling: str) -> ByHand:
    """Begins as all engines do whose weights are drawn with seed 3."""
    engine = LocalEngine(TABLE_ROWS, small_dlrm.DIM, make_rule("sgd", eps=0, beta1=0, beta2=0))
    engine.to_empty(device="cpu")
    engine.init_weights(3)
    return ByHand(engine.table_weights(), optimizer, pooling)


def compare(engine: Any, by_hand: ByHand, name: str) -> None:
    """What this rank holds of tables and state is what the formulas give."""
    tables = {f"{table}.weight": rows for table, rows in by_hand.tables.items()}
    held, compared = {**engine.table_weights(), **engine.table_state()}, 0
    for key, array in (tables | by_hand.state).items():
        for found, part in small_dlrm.parts(held.get(key), torch.from_numpy(array)):
            told = partial("{}, {}: {}".format, name, key)
            torch.testing.assert_close(found.double(), part, rtol=1e-4, atol=1e-5, msg=told)
            compared += 1
    assert compared >= len(by_hand.tables) // 2


def continue_alone(built: DlrmTrainer, alone: DlrmTrainer, folder: Path) -> None:
    """What two ranks saved, one process goes on with."""
    path = save_checkpoint(folder, STEPS, small_dlrm.tensors(built), {}, keep=1)
    built.mesh.barrier()
    again = small_dlrm.trainer(alone.cfg, single(built.mesh.device))
    checkpoints.load(path, small_dlrm.tensors(again))
    again.state_loaded()
    last = list(build_data(alone.cfg, "train", 0, 1))[-1]
    losses = [step(trainer, last, 0.1) for trainer in (alone, again)]
    assert abs(losses[0] - losses[1]) < 1e-5 * losses[0]
