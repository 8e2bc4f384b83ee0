"""What a trained model is asked, and how it answers: raw files, requests, scores.

`predict`, `serve` and `evaluate --input` hand these objects to a workload, and get them back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, TypeVar

from trainmark.config import Run

if TYPE_CHECKING:
    from numpy.typing import NDArray

RunT = TypeVar("RunT", bound=Run)


@dataclass(frozen=True, kw_only=True)
class Served(Generic[RunT]):
    """A model to score with: a run's checkpoint, or an exported model."""

    folder: Path
    """The folder of the run or of the exported model."""
    run: RunT | None = None
    """The run's configuration; None for an exported model."""
    checkpoint: Path | None = None
    """The run's checkpoint; None for an exported model."""
    device: str
    """PyTorch's name of the device."""
    data: str | None = None
    """Dataset whose vocabularies encode raw values; None: the run's own."""
    values: Literal["auto", "raw", "prepared"] = "auto"
    """What requests hold: raw values, or ids and numbers as the dataset has them."""


# --- requests


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """A tensor of requests or answers, in the words of the KServe v2 protocol."""

    name: str
    datatype: str
    """FP32, INT64, BYTES and so on."""
    shape: tuple[int, ...]
    """-1 stands for the rows of a request."""


class Scorer(Protocol):
    """A loaded model that answers requests. One thread at a time calls its methods."""

    facts: dict[str, Any]
    """What `GET /model` answers."""
    answer: str
    """The name of the list of scores in an answer."""
    example: dict[str, Any]
    """A body that `read` accepts."""
    output: TensorSpec
    """What `score` returns."""

    @property
    def inputs(self) -> Sequence[TensorSpec]:
        """What `read_tensors` accepts."""
        ...

    def read(self, body: dict[str, Any]) -> Sized:
        """The rows of a request.

        Raises:
            InputError: one sentence that names the row (from 0) and what is wrong with it.
        """
        ...

    def read_tensors(self, tensors: Mapping[str, NDArray[Any]]) -> Sized:
        """The rows of a request of tensors, whose types and shapes are those of `inputs`."""
        ...

    def score(self, requests: Sequence[Sized]) -> NDArray[Any]:
        """A score for each row of several requests, in their order. Raises as `read` does."""
        ...


# --- files

BadRows = Literal["stop", "skip", "keep"]
"""What to do with rows of raw files that cannot be read."""


@dataclass(frozen=True, kw_only=True)
class RawFiles:
    """Raw files to use a trained model with, and how to read them."""

    patterns: tuple[str, ...]
    """Paths, or patterns of paths."""
    bad_rows: BadRows = "stop"
    labelled: bool = True
    """False: labels are not read, and need not be there."""
    keep: tuple[str, ...] = ()
    """Names of columns to copy to the output."""
    column: str | None = None
    """For a model that reads a single column: its name, where it is not the usual one."""
    memory: str | None = None
    """What encoding may take, such as 4G; None: a quarter of the machine's memory."""


@dataclass(frozen=True, kw_only=True)
class EncodedFiles:
    """Raw files as a dataset for a trained model. Its first held-out split has all rows."""

    folder: Path
    kept: Path | None = None
    """Parquet file with the columns of `RawFiles.keep`, row by row; None where there are none."""
    unknown_share: Mapping[str, float]
    """For each column, the share of rows whose value is rare, missing, or new to the model."""
    bad_rows: int
    """How many rows could not be read as they are."""


@dataclass(frozen=True, kw_only=True)
class ScoredRows:
    """Consecutive rows of files, with the model's answers."""

    answers: Mapping[str, Any]
    """The answers by name: arrays of one length."""
    kept: Any = None
    """Arrow table with the columns of `RawFiles.keep`; None where there are none."""
    share: float
    """How much of the input is done after these rows, from 0 to 1."""
