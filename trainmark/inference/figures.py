"""What `trainmark infer` found out: `inference.json`. `docs/inference.md` defines the numbers."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from trainmark import checksums
from trainmark.errors import InputError
from trainmark.files import read_json, write_atomically
from trainmark.validation import parse

SCHEMA = "trainmark.inference/1"
FILE_NAME = "inference.json"


@dataclass(frozen=True, kw_only=True)
class Row:
    """Requests of one size, one after another."""

    batch: int
    """Samples of a request."""
    requests: int
    """That were timed."""
    samples: int
    """Of all of them."""
    mean_ms: float
    median_ms: float
    p90_ms: float
    p95_ms: float
    p99_ms: float
    samples_per_s: float


@dataclass(frozen=True, kw_only=True)
class Inference:
    """Latency and throughput of a run's checkpoint."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    run: str
    workload: str
    checkpoint: str
    step: int
    samples: int
    """That the checkpoint was trained on."""
    data: str
    split: str
    """Where the requests are from."""
    case: str
    precision: str
    threads: int
    """Of PyTorch, on the host."""
    dropped: int
    """First requests of each size, not timed."""
    rows: list[Row]
    hardware: dict[str, Any]
    software: dict[str, Any]
    started: str
    schema: str = SCHEMA

    def write(self, folder: Path) -> Path:
        """Keep it in a run's folder, whole or not at all."""
        path = folder / FILE_NAME
        plain = dataclasses.asdict(self)
        ordered = {"schema": plain.pop("schema"), **plain}
        write_atomically(path, checksums.dumps(ordered))
        return path


def read(folder: Path) -> Inference | None:
    """What was measured of a run; None if nothing was."""
    path = folder / FILE_NAME
    if not path.is_file():
        return None
    data = read_json(path)
    found = parse(Inference, data, str(path))
    if found.schema != SCHEMA:
        raise InputError(f"{path} has schema {found.schema!r}; expected {SCHEMA!r}.")
    return found
