"""What shared code and a workload promise each other.

A workload is two objects, each a collection of plain functions. `Definition` is what can be known
without torch: the named runs, how they are resolved, what `list`, `show` and `plan` print.
`Workload` is what the training loop calls. Optional functions have their default here. `Batch`,
`Prepared`, `Data` and `Trainer` are the objects that these functions pass on; `scoring.py` has
those for trained models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, runtime_checkable

from trainmark.config import PRECISIONS, Run
from trainmark.metrics.binary import Importance
from trainmark.scoring import EncodedFiles, RawFiles, RunT, ScoredRows, Scorer, Served

if TYPE_CHECKING:  # torch is not loaded for `trainmark list`
    import torch
    from torch import Tensor, nn

    from trainmark.distributed.mesh import Mesh
    from trainmark.hardware.devices import Cluster
    from trainmark.hardware.memory import MemoryPlan
    from trainmark.hardware.plans import Plan

# --- what a step is fed


class Batch(Protocol):
    """One optimiser step's samples of one data-parallel rank, in host memory."""

    @property
    def samples(self) -> int: ...


class Prepared(Protocol):
    """A batch on its way to the step."""

    @property
    def samples(self) -> int: ...
    @property
    def tokens(self) -> int:
        """0 for a workload without tokens."""
        ...

    @property
    def partial(self) -> bool:
        """Whether the global batch has fewer samples than a full one."""
        ...

    @property
    def position(self) -> int:
        """Samples of all ranks up to the end of this batch, over all epochs."""
        ...

    @property
    def ready(self) -> torch.Event | None:
        """The event after which the batch lies on the device; None on a CPU."""
        ...


T = TypeVar("T")
RunT_contra = TypeVar("RunT_contra", bound=Run, contravariant=True)
BatchT = TypeVar("BatchT", bound=Batch)
BatchT_co = TypeVar("BatchT_co", bound=Batch, covariant=True)
BatchT_contra = TypeVar("BatchT_contra", bound=Batch, contravariant=True)
PreparedT = TypeVar("PreparedT", bound=Prepared)
ModelT = TypeVar("ModelT")
PartT = TypeVar("PartT", bound="nn.Module")
TrainerT = TypeVar("TrainerT", bound="Trainer[Any, Any]")


class Data(Protocol[BatchT_co]):
    """The batches of one split for one data-parallel rank, epoch after epoch."""

    @property
    def split(self) -> str: ...
    @property
    def samples(self) -> int:
        """Samples of the whole split, over all ranks."""
        ...

    @property
    def steps_per_epoch(self) -> int: ...
    def __iter__(self) -> Iterator[BatchT_co]: ...
    def restore(self, state: dict[str, int]) -> None:
        """Begin after `state["samples"]` global samples; called before the first batch."""
        ...

    def describe(self, position: int) -> str:
        """Which samples the global batch that ends at `position` holds, for a message."""
        ...


Metrics = dict[str, float | None]
"""Values by name; None where a metric is undefined."""


@dataclass(frozen=True, kw_only=True)
class Predictions:
    """Answers to a yes-or-no question for all rows of a split, in order; the same on all ranks."""

    logits: Tensor
    """[N], before the sigmoid."""
    labels: Tensor
    """[N] bool"""


class Trainer(Protocol[BatchT_contra, PreparedT]):
    """A model on this rank's device, with its optimiser."""

    def prepare(self, batch: BatchT_contra) -> PreparedT:
        """Copy (sort, exchange) a batch, one or more steps before it is used."""
        ...

    def step(self, prepared: PreparedT, lr: float) -> tuple[Tensor, Tensor]:
        """One optimiser step, micro-batches and all. Returns (loss, skipped).

        Both stay on the device, so that the host never waits, and are the same on all ranks. If the
        loss or a gradient is not finite, the weights stay as they were, and `skipped` is 1.
        """
        ...

    def weights(self) -> dict[str, Tensor]:
        """Weights by global name; a checkpoint fills them in place."""
        ...

    def state_dict(self) -> dict[str, Tensor]:
        """Optimiser, loss scale and random state by name; a checkpoint fills them in place."""
        ...


@dataclass(frozen=True, kw_only=True)
class DeviceBytes:
    """Bytes of a model on one device, without activations."""

    weights: int
    gradients: int
    optimizer: int


# --- defaults of optional functions


def _unchanged(given: T, *_: Any) -> T:
    return given


def _none(*_: Any) -> None:
    return None


def _empty_list(*_: Any) -> list[Any]:
    return []


def _empty_dict(*_: Any) -> dict[str, Any]:
    return {}


# --- what the training loop calls

MODEL_FOLDER = "model"
"""The folder, in a run's own, that `save_model` writes."""


@dataclass(frozen=True, kw_only=True)
class Workload(Generic[RunT, ModelT, PartT, BatchT, TrainerT]):
    """What a run needs of a workload; importing it loads torch."""

    # The model and its data
    build_model: Callable[[RunT], ModelT]
    """The whole model on the meta device, written for one device."""
    parallelize: Callable[[ModelT, Mesh, RunT], list[PartT]]
    """The modules that this rank owns, still on the meta device."""
    init_weights: Callable[[list[PartT], RunT, torch.device], None]
    """Allocate the weights, and fill them from (seed, parameter name, global row)."""
    build_data: Callable[[RunT, str, int, int], Data[BatchT]]
    """(cfg, split, dp_rank, dp_size) -> the batches of this rank."""
    held_out_splits: Callable[[RunT], tuple[str, ...]]
    """The splits that are evaluated at the end."""

    # Training
    build_trainer: Callable[[list[PartT], Mesh, RunT], TrainerT]
    state_loaded: Callable[[TrainerT], None] = _none
    """Called after a checkpoint has filled the trainer's tensors, where that is not enough."""
    checked_step: (
        Callable[[TrainerT, Any, float], tuple[Tensor, Tensor, dict[str, Tensor]]] | None
    ) = None
    """`Trainer.step` for `--check-every`: computes loss and gradients twice (see
    `training/checking.py`) and also returns, by name, whether their bits differ."""
    observed: Callable[[TrainerT], Mapping[str, Tensor]] = _empty_dict
    """What else is known of the last step: `gradient_norm` (of dense parameters, over all ranks,
    unscaled, before clipping) and, where there is one, the `loss_scale` of that step. Scalars that
    stay on the device and are the same on all ranks."""
    warnings: Callable[[RunT, Mapping[str, Metrics]], list[str]] = _empty_list
    """(cfg, final metrics of each held-out split) -> sentences: why the result should not be
    trusted, and what to do. `run/warnings.py` adds those on steps and on the loss."""
    save_model: Callable[[TrainerT, Path], None] | None = None
    """Write the trained model for other software, at the end of a run."""

    # Evaluation: a workload has `evaluate` or `predict`
    evaluate: Callable[[TrainerT, Data[BatchT]], Metrics] | None = None
    """Metrics over all ranks, each sample counted once."""
    predict: Callable[[TrainerT, Data[BatchT]], Predictions] | None = None
    """The same for yes-or-no labels: `metrics/binary.py` computes the metrics."""
    groups: Callable[[RunT, str], Tensor | None] = _none
    """(cfg, split) -> the number of each row's group, for the AUC within groups; None without."""
    importance: Callable[[TrainerT, str, int], list[Importance]] | None = None
    """(trainer, split, most rows) -> what the AUC loses without each column that a user knows. All
    ranks call it."""

    # What it costs
    flops: Callable[[RunT, int, int], dict[str, float]]
    """(cfg, samples, tokens) -> floating-point operations of training, per convention."""
    activation_bytes: Callable[[RunT], int]
    """An estimate for one device."""
    plan_devices: Callable[[RunT], list[MemoryPlan]] = _empty_list
    """Bytes on each device, where devices differ."""
    host_bytes: Callable[[RunT], list[int]] = _empty_list
    """Bytes that each device keeps in its host's memory."""
    device_bytes: Callable[[TrainerT], DeviceBytes] | None = None
    """What the fullest device holds. By default, the trainer's tensors and a gradient for each
    parameter; others have masters, or gathered shards."""
    sent_bytes_per_step: Callable[[TrainerT], dict[str, float]] = _empty_dict
    """Bytes that this rank sends to others, by what they are."""

    # MLPerf's log
    mlperf: Callable[[RunT], str] = lambda cfg: cfg.workload
    """What MLPerf's rules call this benchmark; by default the workload's name."""
    mlperf_settings: Callable[[RunT], dict[str, Any]] = _empty_dict
    """What the rules want logged of the optimiser and the model, by MLPerf's keys."""

    # `infer` and `predict`
    build_predictor: Callable[[TrainerT], Callable[[BatchT], Tensor]] | None = None
    """A function from a batch in host memory to its scores in host memory. From then on the trainer
    can only predict. Several threads may each have a predictor of one trainer. A predictor whose
    batch may be under way while its caller does something else is also `InFlight`."""
    predicts_on_ranks: bool = False
    """Whether ranks predict a batch together: each is given a share, and returns all scores."""
    answers: Callable[[Tensor], Mapping[str, Tensor]] | None = None
    """A predictor's scores as the columns that `trainmark predict` writes, by name."""


AnyWorkload = Workload[Any, Any, Any, Any, Any]


@runtime_checkable
class InFlight(Protocol):
    """A predictor that can begin a batch without waiting for its scores."""

    def begin(self, batch: Any, /) -> Callable[[], Tensor]:
        """Returns what waits for the scores. Until then the batch must stay as it is, and no other
        may begin."""
        ...


# --- what is known without torch


class Exporter(Protocol[RunT_contra]):
    """Writes a checkpoint in the layout of other software."""

    def __call__(self, cfg: RunT_contra, checkpoint_path: Path, folder: Path, /) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Definition(Generic[RunT]):
    """What is known of a workload before anything heavy is loaded.

    Only `exporters`, `encode_files`, `score_files`, `load_scorer` and `load` may import torch.
    """

    # Configuration
    name: str
    """The name of its folder under `trainmark/workloads/`."""
    runs: Mapping[str, Callable[[], RunT]]
    """Named runs; `list` prints the first line of each docstring."""
    resolve: Callable[[RunT, Cluster], tuple[RunT, list[str]]]
    """The configuration filled in for a cluster, and all that is wrong with it."""
    mesh_axes: Callable[[RunT, int], dict[str, int]] = lambda cfg, devices: {"dp": devices}
    """(cfg, devices) -> the named degrees of parallelism."""
    sizes: Callable[[RunT], dict[str, int]]
    """What `list` and `show` print about the model: `parameters`, and others. A name that ends in
    " bytes" is printed as a size."""
    precisions: tuple[str, ...] = PRECISIONS

    # Comparing and continuing runs
    closed: Callable[[RunT], frozenset[str]]
    """Fields that may change while a result stays comparable with the named run's."""
    layout_fields: frozenset[str] = frozenset()
    """Fields that only lay the arithmetic out over devices: they may differ when a run goes on."""
    fitted_fields: Callable[[RunT], frozenset[str]] = lambda cfg: frozenset()
    """Fields that nobody chose: they follow from the data, or from how far the run goes."""
    like_the_earlier: Callable[[RunT, RunT], RunT] = _unchanged
    """(unresolved cfg, cfg of the run that it continues or takes its weights from) -> the first,
    with what these weights decide where nobody chose it."""
    check_weights: Callable[[RunT, RunT], None] = _none
    """(cfg, cfg of the run that --from names): refuse, by an `InputError`, weights that would fit
    but mean something else."""
    candidates: Callable[[RunT, RunT], Mapping[str, RunT]] = _empty_dict
    """(unresolved cfg, the same resolved) -> runs to try, by their flags: training takes the one
    that validates best. Empty where there is nothing to choose."""
    grown_tables: Callable[[RunT, str], Mapping[str, int]] = _empty_dict
    """(cfg of a finished run, data) -> tables that are larger in data that extend the run's, with
    their rows in the run; empty for any other data."""
    on_other_data: Callable[[RunT, str], RunT] = _unchanged
    """A finished run's settings, without what `resolve` took from its data."""
    check_data: Callable[[RunT, str], None] = _none
    """Refuse, by an `InputError`, a dataset that a finished run's model cannot be used with. Called
    before that dataset is resolved."""

    # Results
    notes: Callable[[RunT], list[str]] = _empty_list
    """Sentences that a reader of the result must know."""
    best_possible: Callable[[RunT], float | None] = _none
    """The best value of the metric that any model can reach on this data, where it is known."""

    # Planning
    smaller: Callable[[RunT], Iterable[tuple[str, RunT]]] = _empty_list
    """Flags with which a run takes less memory, each with the run that it makes; the one that costs
    the least quality comes first. `resolve` may refuse some of them."""
    plan: Callable[[RunT, Cluster], Plan] | None = None
    """Memory and predicted time of a resolved run; without it, only memory is planned."""
    alternatives: Callable[[RunT, Cluster], Iterable[tuple[str, RunT]]] | None = None
    """Other layouts of the same training on a cluster, each with its flags, for `plan --search`.
    `resolve` may refuse some of them."""

    # A trained model
    for_prediction: Callable[[RunT], RunT] = _unchanged
    """The configuration without what only training needs, for whatever devices are here."""
    inference_batches: tuple[int, ...] = ()
    """Batch sizes that `infer` times by default."""
    tables_precision: Callable[[RunT], str | None] = _none
    """The type of large embedding tables, for `infer`'s rows."""
    exported_types: tuple[str, ...] = ()
    """The `model_type` in config.json of an exported model."""
    exporters: Callable[[], Mapping[str, Exporter[RunT]]] = dict
    """For each layout of other software, what writes it."""
    encode_files: Callable[[RunT, RawFiles, Path], EncodedFiles] | None = None
    """(cfg, files, a folder to write): for `trainmark evaluate --input` and `trainmark predict`."""
    score_files: (
        Callable[[Served[RunT], RawFiles, Path, int], Iterator[ScoredRows] | None] | None
    ) = None
    """(model, files, a folder to work in, rows that are done) -> the other rows, in fp32, in parts
    that are the same each time. `trainmark predict` calls it for exported models and for runs;
    None: a trainer, which reads what `encode_files` writes, is as fast."""
    load_scorer: Callable[[Served[RunT]], Scorer] | None = None
    """The model of a run or of an export, ready to score rows."""
    load: Callable[[], Workload[RunT, Any, Any, Any, Any]]
    """The `Workload`."""
