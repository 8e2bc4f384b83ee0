"""DLRM's configuration and its named runs. The table sizes are those of the published systems."""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import tyro
from annotated_types import Ge

from trainmark.bounds import Count, CountOrZero, Finite, NotNegative, Positive, Share
from trainmark.clickdata import planted, terabyte
from trainmark.clickdata.terabyte import THRESHOLD_0, THRESHOLD_3, THRESHOLD_15
from trainmark.config import SYNTHETIC, Better, Hidden, Run, Schedule, filled
from trainmark.hardware.backends import has_own_kernels, is_accelerator
from trainmark.workloads.dlrm.network import Model

TERABYTE = "terabyte"
"""The value of `data` for the planted Terabyte."""
SYNTHETIC_ROWS = 33_554_432
INFERENCE_BATCHES = (1, 64, 4096)  # NVIDIA's
PRECISIONS = ("fp32", "tf32", "bf16", "fp16", "fp8")

Elements = Annotated[Finite, Ge(1)]


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """The optimiser of tables and MLPs; the MLPs take plain Adagrad for `rowwise_adagrad`."""

    name: Literal["sgd", "adagrad", "rowwise_adagrad", "adam"] = "sgd"
    """Update rule. Tables are updated sparsely: only the rows that a batch touched."""
    eps: Positive | None = 1e-8
    """Added to the denominator of Adagrad and Adam; None in dlrm-auto, which chooses it."""
    beta1: Share = 0.9
    """Adam's decay of the first moment."""
    beta2: Share = 0.999
    """Adam's decay of the second moment."""
    weight_decay: NotNegative = 0.0
    """Decoupled weight decay, times the learning rate, of MLP weights (not biases) and of the
    table rows that a batch looks up."""


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """Which device holds which part of which table (`trainmark plan` shows it)."""

    engine: Literal["native", "torchrec"] = "native"
    """Trainmark's embedding engine, or TorchRec's (an extra), with its planner."""
    placement: str = "auto"
    """auto, round_robin, memory_balanced, memory_optimized, greedy; or a file of `plan --json`."""
    column_slice_threshold: Elements | None = None
    """Elements above which a table is halved by columns, until none has more (published: 5e9)."""
    data_parallel_threshold: Elements | None = None
    """Elements up to which a table is replicated on every device; `auto` decides if not given."""
    host_tables: tuple[CountOrZero, ...] = ()
    """Tables to keep in host memory, by number; their rows travel for each batch."""
    network_gb_s: Positive | None = None
    """A device's share of the network between nodes, GB/s; default: that of the vendor's system."""
    force_exchange: bool = False
    """Send ids and rows through a process group even if one device holds all tables."""
    cluster: Annotated[str | None, tyro.conf.Suppress] = None
    """The devices to place for (set when the run is resolved)."""


@dataclass(frozen=True, kw_only=True)
class TableFormat:
    """How embedding tables are stored."""

    table_precision: Literal["fp32", "bf16", "fp16", "int8", "fp8"] = "fp32"
    """Precision of large tables."""
    state_precision: Literal["fp32", "bf16"] = "fp32"
    """Precision of Adagrad's sums of squares, for the same tables."""
    table_rounding: Literal["stochastic", "nearest"] = "stochastic"
    """Rounding of updates below 32 bits; with `nearest`, small updates are lost."""
    fp32_up_to_rows: CountOrZero = 100_000
    """Tables of at most this many rows stay fp32: they take little memory and most updates."""
    fp32_tables: tuple[CountOrZero, ...] = ()
    """Further tables to keep fp32, by number."""


PageCache = Literal["auto", "use", "bypass"]


@dataclass(frozen=True, kw_only=True)
class DlrmRun(Run):
    """A DLRM run."""

    metric: ClassVar[str] = "auc"
    better: ClassVar[Better] = "higher"

    workload: Hidden = "dlrm"
    data: str | None = None
    """Folder of train-ready data (see `trainmark prepare`); `terabyte`, a planted log like Criteo's
    whose rows are made as they are needed; or `synthetic`, for speed alone."""
    global_batch: Count | None = 65536
    lr: NotNegative = 24.0
    model: Model = Model()
    optimizer: Optimizer = Optimizer()
    table_format: Annotated[TableFormat, tyro.conf.arg(name="")] = TableFormat()
    sharding: Annotated[Sharding, tyro.conf.arg(name="")] = Sharding()
    positive_weight: Positive = 1.0
    """Weight of a click in the training loss, also in the reported one. Predictions are
    corrected for it."""
    shuffle: Literal["none", "batches", "rows"] = "none"
    """Order of the training rows: as stored, windows shuffled, or rows within windows too."""
    shuffle_window: Count = 262_144
    """Rows that are read and shuffled together."""
    validation_share: Share = 0.0
    """If a dataset has no validation split: share of the training rows, the last as stored, to
    hold out for validation."""
    page_cache: PageCache = "auto"
    """How to read training rows: `use` keeps them in the page cache for the next epoch or run,
    `bypass` reads straight into the batch, `auto` bypasses if they exceed half of memory."""
    synthetic_rows: Count | None = None
    """Training rows of generated data: of `--data synthetic` (default 33,554,432), or the first of
    `--data terabyte` (default: all 4,195,197,692)."""
    multi_hot: Literal["data", "uniform"] = "data"
    """Where the ids of model.hotness come from: the data; or one id per feature from the data,
    the others drawn uniformly for each id, as MLPerf does."""
    synthetic_ids: Literal["uniform", "planted"] = "uniform"
    """Synthetic ids: uniform, or by a power law with clicks from a hidden model (`planted`)."""
    best_auc: Annotated[Finite | None, tyro.conf.Suppress] = None
    """Best possible AUC on this data, where it is known (set from planted data)."""
    schedule_steps: Annotated[Count | None, tyro.conf.Suppress] = None
    """Steps that a schedule was made for which nobody chose (set from a dataset's rows, and the
    epochs)."""
    auto_rows: Annotated[Count | None, tyro.conf.Suppress] = None
    """Training rows that dlrm-auto chose its settings for (set from a dataset)."""
    auto_clicks: Annotated[CountOrZero | None, tyro.conf.Suppress] = None
    """Training rows of the rarer label that dlrm-auto chose its settings for."""
    negative_rate: Annotated[Positive, tyro.conf.Suppress] = 1.0
    """Share of the training rows without a click that preparation kept (set from the dataset)."""
    score_offset: Annotated[Finite | None, tyro.conf.Suppress] = None
    """What predictions add to the logit, whatever data they are for (set of a trained run)."""
    dataset: Annotated[tuple[str, ...], tyro.conf.Suppress] = ()
    """The dataset's columns, a line each (set from it; see `clickdata.identity`)."""


def with_model(cfg: DlrmRun, **changes: Any) -> DlrmRun:
    """The run with another network in these respects."""
    return dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, **changes))


# --- named runs

_NVIDIA_SCHEDULE = Schedule(warmup_steps=8000, decay_start=48000, decay_steps=24000)


def _nvidia(name: str, rows: tuple[int, ...]) -> DlrmRun:
    return DlrmRun(
        name=name,
        model=Model(table_rows=rows),
        schedule=_NVIDIA_SCHEDULE,
        precision="fp16",
        loss_scale=1024.0,
        target=0.8025,
    )


def dlrm_small() -> DlrmRun:
    """NVIDIA TF2, frequency threshold 15."""
    return _nvidia("dlrm-small", THRESHOLD_15)


def dlrm_large() -> DlrmRun:
    """NVIDIA TF2, frequency threshold 3."""
    return _nvidia("dlrm-large", THRESHOLD_3)


def dlrm_xlarge() -> DlrmRun:
    """NVIDIA TF2, every value kept."""
    return _nvidia("dlrm-xlarge", THRESHOLD_0)


def dlrm_flagperf() -> DlrmRun:
    """FlagPerf, cases 1x1, 1x8, 2x8.

    Its fix_hp rows are --global-batch 262144 (1x1), 2097152 (1x8) and 2752512 (2x8).
    """
    return dataclasses.replace(
        _nvidia("dlrm-flagperf", THRESHOLD_15),
        model=Model(table_rows=THRESHOLD_15, init="nvidia_pytorch"),
        schedule=dataclasses.replace(_NVIDIA_SCHEDULE, first_step=1),
        loss_scale="dynamic",
        target=0.802,
    )


def _torchrec(name: str, rows: tuple[int, ...], global_batch: int = 65536) -> DlrmRun:
    return DlrmRun(
        name=name,
        model=Model(table_rows=rows, init="torchrec"),
        global_batch=global_batch,
        lr=15.0,
        precision="fp32",
        target=0.8025,
    )


def _capped(limit: int) -> tuple[int, ...]:
    return tuple(min(rows, limit) for rows in THRESHOLD_0)


def dlrm_mlperf() -> DlrmRun:
    """TorchRec's MLPerf row: tables of at most 40 M rows."""
    return _torchrec("dlrm-mlperf", _capped(40_000_000))


def dlrm_mlperfx2() -> DlrmRun:
    """TorchRec's MLPerfx2 row: tables of at most 80 M rows."""
    return _torchrec("dlrm-mlperfx2", _capped(80_000_000))


def dlrm_full() -> DlrmRun:
    """TorchRec's full-size row."""
    return _torchrec("dlrm-full", THRESHOLD_0, global_batch=65520)


MLPERF_HOTNESS = (
    3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1,
)  # fmt: skip


def dlrm_dcnv2() -> DlrmRun:
    """MLPerf's DLRM-DCNv2: several ids per feature, cross layers."""
    return DlrmRun(
        name="dlrm-dcnv2",
        model=Model(
            table_rows=_capped(40_000_000),
            hotness=MLPERF_HOTNESS,
            interaction="dcn",
            cross_layers=3,
            cross_rank=512,
            init="torchrec",
        ),
        optimizer=Optimizer(name="adagrad"),
        lr=0.005,
        precision="fp32",
        multi_hot="uniform",
        target=0.80275,
    )


def dlrm_demo() -> DlrmRun:
    """A planted click log that two CPU cores learn in a minute.

    1, 2 and 4 ranks, and CPUs and GPUs, agree to its end (docs/parallelism.md), and for that it has
    no ReLU: there rounding decides whether a sample passes a gradient or none, and Adagrad gives a
    rare id's row a whole step of that. Ids have their products, as in the hidden model.
    """
    return DlrmRun(
        name="dlrm-demo",
        data=SYNTHETIC,
        model=Model(
            table_rows=planted.CARDINALITIES,
            embedding_dim=16,
            bottom_mlp=(16,),
            bottom_output="linear",
            top_mlp=(1,),
            init="torchrec",
        ),
        optimizer=Optimizer(name="adagrad", eps=5e-5),
        global_batch=2048,
        eval_batch=16384,
        lr=0.15,
        schedule=demo_schedule(782),
        evals_per_epoch=8,
        stop_at_target=False,
        log_every=50,
        synthetic_rows=1_600_000,
        synthetic_ids="planted",
    )


def dlrm_auto() -> DlrmRun:
    """Your own log, with settings that follow from its rows."""
    return DlrmRun(
        name="dlrm-auto",
        model=Model(
            # Rows of 4 or 8 numbers and MLPs a quarter as wide lost; rows of 32, and rows by the
            # size of a table, helped some logs and cost others more.
            embedding_dim=16,
            bottom_mlp=(256, 128, 16),
            top_mlp=(256, 128, 1),
            init="torchrec",
            # A row that was hardly trained must say hardly anything. As published, those of a small
            # table begin as large as others end.
            table_init=0.02,
            interaction="auto",
            dropout=None,
        ),
        optimizer=Optimizer(name="adagrad", eps=None),
        global_batch=None,
        eval_batch=16384,
        lr=AS_LARGE_STEPS_AS_IT_TAKES,
        epochs=AS_MANY_EPOCHS_AS_IT_TAKES,
        shuffle="rows",
        validation_share=0.1,
        evals_per_epoch=2,
        # A few clicks are a noisy judge: four epochs without a better evaluation.
        patience=8,
        stop_at_target=False,
        log_every=50,
    )


AS_MANY_EPOCHS_AS_IT_TAKES = 1000
AS_LARGE_STEPS_AS_IT_TAKES = 1000.0
"""What epochs and the learning rate are before dlrm-auto chooses them."""


def demo_schedule(steps: int) -> Schedule:
    """The demo's learning rate over so many steps: a warm-up, and from a fifth on a decay to 0."""
    start = steps // 5
    return Schedule(
        warmup_steps=min(100, steps // 7),
        decay_start=start,
        decay_steps=max(steps - 1 - start, 1),
    )


RUNS: dict[str, Callable[[], DlrmRun]] = {
    "dlrm-demo": dlrm_demo,
    "dlrm-auto": dlrm_auto,
    "dlrm-small": dlrm_small,
    "dlrm-large": dlrm_large,
    "dlrm-xlarge": dlrm_xlarge,
    "dlrm-flagperf": dlrm_flagperf,
    "dlrm-mlperf": dlrm_mlperf,
    "dlrm-mlperfx2": dlrm_mlperfx2,
    "dlrm-full": dlrm_full,
    "dlrm-dcnv2": dlrm_dcnv2,
}


# --- generated data


def is_generated(data: str | None) -> bool:
    """Whether it is no folder: rows come from their numbers."""
    return data in (SYNTHETIC, TERABYTE)


def makes_rows_on_gpu(cfg: DlrmRun) -> bool:
    """Whether a kernel makes the rows of the planted Terabyte."""
    return is_accelerator(cfg.device) and has_own_kernels(cfg.device)


def notes(cfg: DlrmRun) -> list[str]:
    """A note on rows that were generated."""
    if cfg.data != TERABYTE:
        return []
    where = "the GPU" if makes_rows_on_gpu(cfg) else "the CPU"
    return [
        f"Rows of the planted Terabyte (docs/terabyte.md), made from their numbers by {where}: the "
        "quality is that of its hidden model, not of Criteo's log."
    ]


def has_power_law(cfg: DlrmRun) -> bool:
    """Whether a few generated ids are very frequent."""
    planted_ids = cfg.data == SYNTHETIC and cfg.synthetic_ids == "planted"
    return planted_ids or cfg.data == TERABYTE


def terabyte_range(cfg: DlrmRun, split: str) -> tuple[int, int]:
    """The rows of a split of the planted Terabyte; fewer training rows have as few held out."""
    train = filled(cfg.synthetic_rows)
    start, most = {
        "train": (0, terabyte.TRAIN_ROWS),
        "test": (terabyte.TRAIN_ROWS, terabyte.TEST_ROWS),
        "validation": (terabyte.TRAIN_ROWS + terabyte.TEST_ROWS, terabyte.VALIDATION_ROWS),
    }[split]
    return start, start + min(train, most)


# --- predictions


def score_offset(cfg: DlrmRun) -> float:
    """What to add to a logit, so that it is of the log's own click rate.

    Where negatives are kept at a rate r, and clicks count w times, a model learns odds that are
    w / r times too high.
    """
    if cfg.score_offset is not None:
        return cfg.score_offset
    return math.log(cfg.negative_rate) - math.log(cfg.positive_weight)


def for_prediction(cfg: DlrmRun) -> DlrmRun:
    """Tables placed on whatever devices are here, without an optimiser's state, which may take as
    much memory as they do: SGD has none. Scores stay those of the data that it was trained on."""
    return dataclasses.replace(
        cfg,
        optimizer=dataclasses.replace(cfg.optimizer, name="sgd", weight_decay=0.0),
        sharding=dataclasses.replace(cfg.sharding, placement="auto"),
        score_offset=score_offset(cfg),
    )
