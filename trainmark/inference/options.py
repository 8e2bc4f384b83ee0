"""The flags of `trainmark infer`, `predict` and `serve`. No torch here."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from trainmark.bounds import Positive
from trainmark.hardware.backends import DeviceChoice
from trainmark.hardware.devices import Precision
from trainmark.inference.server.limits import Limits
from trainmark.scoring import BadRows

Checkpoint = Annotated[str | None, tyro.conf.arg(metavar="best|last|step-N")]


@dataclass(frozen=True, kw_only=True)
class InferOptions:
    """Time the predictions of a run's checkpoint, batch size by batch size."""

    folder: Annotated[Path, tyro.conf.Positional]
    """Output folder of a run."""
    checkpoint: Checkpoint = None
    """Which one; default: the best if the run had --patience, else the last."""
    batches: str | None = None
    """Samples per request: sizes separated by commas. By default the workload's own, without
    those that exceed the held-out data."""
    steps: int = 200
    """Requests of each size to time, after 10 untimed ones."""
    clients: int = 1
    """Concurrent requests, each from a client that waits for its answer."""
    device: DeviceChoice = "auto"
    """Where to predict."""
    data: str | None = None
    """Another dataset whose held-out samples to predict; default: the run's own."""
    precision: Precision | None = None
    """Another precision of the dense computation; default: the run's own."""


@dataclass(frozen=True, kw_only=True)
class PredictOptions:
    """Score every row of files, in their order; a run that was broken off is continued."""

    folder: Annotated[Path, tyro.conf.Positional]
    """Output folder of a run, or a folder of trainmark export (safetensors)."""
    input: tuple[str, ...]
    """Raw files, paths or patterns, read as the run's data were (labels are not needed); or the
    folder of a prepared dataset."""
    output: Path
    """File to write, .parquet or .csv."""
    keep: tuple[str, ...] = ()
    """Columns of the files to carry along."""
    checkpoint: Checkpoint = None
    """Which one; default: the best if the run had --patience, else the last."""
    device: DeviceChoice = "auto"
    """Where to score."""
    precision: Precision | None = None
    """Another precision of the dense computation; default: the run's own."""
    bad_rows: BadRows = "stop"
    """Rows that cannot be read: stop at the first, skip them, or keep them with the bad fields as
    missing."""
    split: str | None = None
    """Of a prepared dataset: which of its held-out splits; default: test, or the only one."""
    column: str | None = None
    """For sentences in a table: the column that has them; default: sentence."""
    memory: str | None = None
    """Memory for encoding raw files, such as 4G; default: a quarter of the machine's."""


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Answer over HTTP and gRPC: scores of clicks, or of sentences."""

    folders: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="DIR")]
    """Output folders of runs, or of trainmark export (safetensors); NAME=DIR gives a model another
    name than its run's."""
    checkpoint: Checkpoint = None
    """Which one of a run's; default: the best if the run had --patience, else the last."""
    reload_every: Positive | None = None
    """Seconds between two looks for a newer checkpoint or export, to switch to it without a
    pause. Default: never."""
    host: str = "127.0.0.1"
    """Address to listen at; 0.0.0.0 opens the server to everyone who reaches this machine."""
    port: int = 8000
    """Port to listen at; 0 takes a free one."""
    grpc_port: int | None = None
    """Port for gRPC (8001 is usual); 0 takes a free one. Default: no gRPC."""
    api_key: Path | None = None
    """File with keys, one per line. Requests must send one: Authorization: Bearer KEY."""
    tls_certificate: Path | None = None
    """PEM file with the certificate and its chain: HTTPS, and gRPC over TLS."""
    tls_key: Path | None = None
    """PEM file with the certificate's private key."""
    limits: Limits = Limits()
    device: DeviceChoice = "auto"
    """Where to score."""
    values: Literal["auto", "raw", "prepared"] = "auto"
    """What requests for a recommender hold: raw values, as in the log that was prepared, or the
    numbers and ids of the dataset. auto: raw, unless the dataset has no vocabularies."""
    data: str | None = None
    """Dataset whose vocabularies encode raw values; default: the run's own."""
