"""What shared code and a workload promise each other.

A workload tells of itself in two objects. `Definition` is what can be known without torch: its
named runs, how they are resolved, what `list`, `show` and `plan` print. `Workload` is what the
training loop calls. Both are plain functions, gathered; optional ones have their default here.
`Batch`, `Prepared`, `Data`, `Trainer` and `Scorer` are the objects that these functions hand over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, TypeVar

from trainmark.config import PRECISIONS, Run
from trainmark.metrics.binary import Importance

if TYPE_CHECKING:  # torch is not loaded for `trainmark list`
    import torch
    from numpy.typing import NDArray
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
        """0 where a workload has none."""
        ...

    @property
    def partial(self) -> bool:
        """Whether the global batch is smaller than the others."""
        ...

    @property
    def position(self) -> int:
        """Global samples up to its end."""
        ...

    @property
    def ready(self) -> torch.Event | None:
        """The event after which it lies on the device; None on a CPU."""
        ...


T = TypeVar("T")
RunT = TypeVar("RunT", bound=Run)
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
        """Of the whole split, over all ranks."""
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
"""By name; None where one is undefined."""


@dataclass(frozen=True, kw_only=True)
class Predictions:
    """Of yes or no, for all rows of a split in their order; the same on all ranks."""

    logits: Tensor
    """[N], before the sigmoid."""
    labels: Tensor
    """[N] bool"""


class Trainer(Protocol[BatchT_contra, PreparedT]):
    """A model on this rank's device, with its optimiser."""

    def prepare(self, batch: BatchT_contra) -> PreparedT:
        """Copy (sort, exchange) a batch, one or more ahead of its step."""
        ...

    def step(self, prepared: PreparedT, lr: float) -> tuple[Tensor, Tensor]:
        """One optimiser step, micro-batches and all. Returns (loss, skipped).

        Both stay on the device, so that the host never waits, and are the same on all ranks. A
        loss or gradient that is not finite leaves the weights as they were, and `skipped` is 1.
        """
        ...

    def weights(self) -> dict[str, Tensor]:
        """By global name; a checkpoint fills them in place."""
        ...

    def state_dict(self) -> dict[str, Tensor]:
        """Optimiser, loss scale and random state, likewise."""
        ...


@dataclass(frozen=True, kw_only=True)
class DeviceBytes:
    """Bytes of a model on one device, without activations."""

    weights: int
    gradients: int
    optimizer: int


# --- what a workload does where it brings no function of its own


def _unchanged(given: T, *_: Any) -> T:
    return given


def _none(*_: Any) -> None:
    return None


def _empty_list(*_: Any) -> list[Any]:
    return []


def _empty_dict(*_: Any) -> dict[str, Any]:
    return {}


def _no_fields(cfg: Any) -> frozenset[str]:
    return frozenset()


def _own_name(cfg: Run) -> str:
    return cfg.workload


# --- what the training loop calls

MODEL_FOLDER = "model"
"""In the folder of a run: what `save_model` writes."""


@dataclass(frozen=True, kw_only=True)
class Workload(Generic[RunT, ModelT, PartT, BatchT, TrainerT]):
    """What a run needs of a workload; importing it loads torch."""

    build_model: Callable[[RunT], ModelT]
    """The model, on the meta device, written for one device."""
    parallelize: Callable[[ModelT, Mesh, RunT], list[PartT]]
    """The modules that this rank owns, still on the meta device."""
    init_weights: Callable[[list[PartT], RunT, torch.device], None]
    """Allocate and fill in place from (seed, parameter name, global row)."""
    build_data: Callable[[RunT, str, int, int], Data[BatchT]]
    """(cfg, split, dp_rank, dp_size) -> the batches of this rank."""
    build_trainer: Callable[[list[PartT], Mesh, RunT], TrainerT]
    state_loaded: Callable[[TrainerT], None] = _none
    """Called after a checkpoint has filled the trainer's tensors, where that is not enough."""
    checked_step: (
        Callable[[TrainerT, Any, float], tuple[Tensor, Tensor, dict[str, Tensor]]] | None
    ) = None
    """`Trainer.step` for `--check-every`: loss and gradients are computed twice (by
    `training/checking.py`), and by name it says whether their bits differ."""
    observed: Callable[[TrainerT], Mapping[str, Tensor]] = _empty_dict
    """Of the last step besides its loss, as scalars that stay on the device and are the same on all
    ranks: `gradient_norm` (of dense parameters, over all ranks, unscaled, before any clipping) and,
    where there is one, the `loss_scale` that it was computed with."""
    evaluate: Callable[[TrainerT, Data[BatchT]], Metrics] | None = None
    """On all ranks, each sample once. A workload has this or `predict`."""
    predict: Callable[[TrainerT, Data[BatchT]], Predictions] | None = None
    """Likewise, where labels are yes or no: their metrics are those of `metrics/binary.py`."""
    groups: Callable[[RunT, str], Tensor | None] = _none
    """(cfg, split) -> the number of each row's group, for the AUC within groups, if there are."""
    importance: Callable[[TrainerT, str, int], list[Importance]] | None = None
    """(trainer, split, most rows) -> what the AUC loses where a column says nothing, of each column
    that a user knows; on all ranks."""
    held_out_splits: Callable[[RunT], tuple[str, ...]]
    """The splits that are evaluated at the end."""
    flops: Callable[[RunT, int, int], dict[str, float]]
    """(cfg, samples, tokens) -> floating-point operations of training, per convention."""
    activation_bytes: Callable[[RunT], int]
    """Estimated, on one device."""
    mlperf: Callable[[RunT], str] = _own_name
    """What MLPerf's rules call this benchmark, or the workload's own name where they do not."""
    mlperf_settings: Callable[[RunT], dict[str, Any]] = _empty_dict
    """What its rules want logged of the optimiser and the model, by MLPerf's keys."""
    plan_devices: Callable[[RunT], list[MemoryPlan]] = _empty_list
    """Bytes on each device, where they differ."""
    host_bytes: Callable[[RunT], list[int]] = _empty_list
    """Bytes that each device keeps in its host's memory."""
    device_bytes: Callable[[TrainerT], DeviceBytes] | None = None
    """What the fullest device holds, where it is not the trainer's tensors and a gradient for each
    parameter (masters, gathered shards)."""
    sent_bytes_per_step: Callable[[TrainerT], dict[str, float]] = _empty_dict
    """Bytes that this rank sends to others, by what they are."""
    build_predictor: Callable[[TrainerT], Callable[[BatchT], Tensor]] | None = None
    """A function from a batch in host memory to its samples' scores, there too. From then on the
    trainer can only predict. Several of one trainer may be called at a time, each in a thread."""
    predicts_on_ranks: bool = False
    """Whether ranks predict a batch together: each is given a share, and gets all scores."""
    answers: Callable[[Tensor], Mapping[str, Tensor]] | None = None
    """What a predictor gives, as the columns that `trainmark predict` writes, by name."""
    save_model: Callable[[TrainerT, Path], None] | None = None
    """Write the trained model for other software, at the end of a run."""


AnyWorkload = Workload[Any, Any, Any, Any, Any]

# --- scores


@dataclass(frozen=True, kw_only=True)
class Served(Generic[RunT]):
    """What is to be served."""

    folder: Path
    """Of a run, or of an exported model."""
    run: RunT | None = None
    """The run's configuration; None for an exported model."""
    checkpoint: Path | None = None
    """The run's checkpoint; None for an exported model."""
    device: str
    """As PyTorch names it."""
    data: str | None = None
    """Dataset whose preparation encodes raw values; None: the run's own."""
    values: Literal["auto", "raw", "prepared"] = "auto"
    """What requests hold."""


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """A tensor of requests or answers, in the words of the KServe v2 protocol."""

    name: str
    datatype: str
    """FP32, INT64, BYTES and so on."""
    shape: tuple[int, ...]
    """-1 stands for the rows of a request."""


class Scorer(Protocol):
    """A model, loaded. `read...` and `score` are called in one thread at a time."""

    facts: dict[str, Any]
    """What `GET /model` tells."""
    answer: str
    """What the list of scores is called."""
    example: dict[str, Any]
    """A body that `read` takes."""
    output: TensorSpec
    """What `score` gives."""

    @property
    def inputs(self) -> Sequence[TensorSpec]:
        """What `read_tensors` takes."""
        ...

    def read(self, body: dict[str, Any]) -> Sized:
        """The rows of a request.

        Raises:
            InputError: one sentence that names the row (from 0) and what is wrong with it.
        """
        ...

    def read_tensors(self, tensors: Mapping[str, NDArray[Any]]) -> Sized:
        """The same of tensors, whose types and shapes are those of `inputs`."""
        ...

    def score(self, requests: Sequence[Sized]) -> NDArray[Any]:
        """A score for each row of several requests, in their order. Raises as `read`."""
        ...


# --- what is known without torch


BadRows = Literal["stop", "skip", "keep"]
"""What to do with rows of raw files that cannot be read."""


@dataclass(frozen=True, kw_only=True)
class RawFiles:
    """Raw files that a trained model is to be used with, and how to read them."""

    patterns: tuple[str, ...]
    """Paths, or patterns of them."""
    bad_rows: BadRows = "stop"
    labelled: bool = True
    """False: labels are not read, and need not be there."""
    keep: tuple[str, ...] = ()
    """Names of columns to carry along."""
    column: str | None = None
    """Of a model that reads one column alone: its name, where it is not the usual one."""
    memory: str | None = None
    """What encoding them may take, such as 4G; None: a quarter of the machine's."""


@dataclass(frozen=True, kw_only=True)
class EncodedFiles:
    """Raw files as a dataset that a trained model takes, all rows in its first held-out split."""

    folder: Path
    kept: Path | None = None
    """Parquet with the columns of `RawFiles.keep`, row by row; None where there are none."""
    unknown_share: Mapping[str, float]
    """By column: the share of rows whose value is rare, missing, or new to the model."""
    bad_rows: int
    """That could not be read as they are."""


@dataclass(frozen=True, kw_only=True)
class ScoredRows:
    """Consecutive rows of files, with what a model says of them."""

    answers: Mapping[str, Any]
    """What it says, by name: arrays of one length."""
    kept: Any = None
    """An Arrow table of the columns of `RawFiles.keep`; None where there are none."""
    share: float
    """Of the input that ends with them, from 0 to 1."""


class Exporter(Protocol[RunT_contra]):
    """Writes a checkpoint in the layout of other software."""

    def __call__(self, cfg: RunT_contra, checkpoint_path: Path, folder: Path, /) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Definition(Generic[RunT]):
    """A workload before anything heavy is loaded: only `exporters`, `load_scorer` and `load` may
    import torch.

    `trainmark list`, `show`, `plan` and `--help` read it.
    """

    name: str
    """Of its folder under `trainmark/workloads/`."""
    run_type: type[RunT]
    """The dataclass that configures it."""
    runs: Mapping[str, Callable[[], RunT]]
    """Named runs; the docstring of each is what `list` prints."""
    resolve: Callable[[RunT, Cluster], tuple[RunT, list[str]]]
    """The configuration filled in for a cluster, and all that is wrong with it."""
    mesh_axes: Callable[[RunT, int], dict[str, int]]
    """The named degrees of parallelism over so many devices."""
    closed: Callable[[RunT], frozenset[str]]
    """Fields that may change while a result stays comparable with the named run's."""
    sizes: Callable[[RunT], dict[str, int]]
    """What `list` and `show` print about the model: `parameters`, and others; a name that ends in
    " bytes" is printed as a size."""
    precisions: tuple[str, ...] = PRECISIONS
    layout_fields: frozenset[str] = frozenset()
    """Fields that lay the same arithmetic out over devices: a run may be continued with others."""
    fitted_fields: Callable[[RunT], frozenset[str]] = _no_fields
    """Fields that nobody chose and that follow from the data, or from how far the run goes."""
    notes: Callable[[RunT], list[str]] = _empty_list
    """Sentences that a reader of the result must know."""
    warnings: Callable[[RunT, Mapping[str, Metrics]], list[str]] = _empty_list
    """(cfg, last metrics of each held-out split) -> sentences: why the result should not be trusted
    as it is, and what to do. Those on steps and on the loss come from `run/warnings.py`."""
    smaller: Callable[[RunT], Iterable[tuple[str, RunT]]] = _empty_list
    """Flags with which a run takes less memory, each with the run that it makes; what costs the
    least quality comes first. `resolve` may refuse some of them."""
    for_prediction: Callable[[RunT], RunT] = _unchanged
    """Without what only training needs, for whatever devices are here."""
    on_other_data: Callable[[RunT, str], RunT] = _unchanged
    """A finished run's settings without what `resolve` took from its own data."""
    check_data: Callable[[RunT, str], None] = _none
    """Refuse, by an `InputError`, a dataset that a model of a finished run cannot be used with;
    asked before that dataset is resolved."""
    encode_files: Callable[[RunT, RawFiles, Path], EncodedFiles] | None = None
    """(cfg, files, a folder to write): for `trainmark evaluate --input` and `trainmark predict`."""
    score_files: Callable[[Served[RunT], RawFiles, Path, int], Iterator[ScoredRows]] | None = None
    """(model, files, a folder to work in, parts to leave out) -> the files' rows in parts that are
    the same each time: for `trainmark predict` with an exported model, and for those of runs where
    there is no `encode_files`."""
    like_the_earlier: Callable[[RunT, RunT], RunT] = _unchanged
    """(cfg that is not resolved yet, cfg of the run that it continues or takes its weights of) ->
    the first with what these weights decide, where nobody chose it."""
    candidates: Callable[[RunT, RunT], Mapping[str, RunT]] = _empty_dict
    """(cfg that is not resolved yet, the same resolved) -> by the flags that choose them, runs of
    which training shall take the one that validates best; none where there is no choice."""
    grown_tables: Callable[[RunT, str], Mapping[str, int]] = _empty_dict
    """(cfg of a finished run, data) -> tables by name that data which extend the run's make larger,
    with the rows that the run's have; empty for any other data."""
    best_possible: Callable[[RunT], float | None] = _none
    """The best value of the metric that any model can have on this data, where it is known."""
    plan: Callable[[RunT, Cluster], Plan] | None = None
    """Memory and predicted time of a resolved run; without it, memory alone is planned."""
    alternatives: Callable[[RunT, Cluster], Iterable[tuple[str, RunT]]] | None = None
    """Other layouts of the same training on a cluster, each with its flags, for `plan --search`;
    `resolve` may refuse some of them."""
    inference_batches: tuple[int, ...] = ()
    """Batch sizes that `infer` times by default."""
    tables_precision: Callable[[RunT], str | None] = _none
    """The type of large embedding tables, for `infer`'s rows."""
    exported_types: tuple[str, ...] = ()
    """What config.json of an exported model calls it (`model_type`)."""
    exporters: Callable[[], Mapping[str, Exporter[RunT]]] = dict
    """Layouts of other software -> what writes them."""
    load_scorer: Callable[[Served[RunT]], Scorer] | None = None
    """The model of a run or of an export, ready to score rows."""
    load: Callable[[], Workload[RunT, Any, Any, Any, Any]]
    """What the training loop calls."""
