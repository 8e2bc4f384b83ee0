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
    """Requests that were timed."""
    samples: int
    """Samples of all requests."""
    mean_ms: float
    median_ms: float
    p90_ms: float
    p95_ms: float
    p99_ms: float
    samples_per_s: float
    precision: str | None = None
    """Precision of the dense computation."""
    tables_precision: str | None = None
    """Type of large embedding tables; None without tables, and in files of earlier versions."""
    clients: int = 1
    """Requests that were under way at a time."""

    @property
    def key(self) -> tuple[Any, ...]:
        """Rows with the same key are measurements of the same thing."""
        return (self.batch, self.precision, self.tables_precision, self.clients)


@dataclass(frozen=True, kw_only=True)
class Inference:
    """Latency and throughput of a run's checkpoint."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    schema: str = SCHEMA
    run: str
    workload: str
    checkpoint: str
    step: int
    samples: int
    """Samples that the checkpoint was trained on."""
    data: str
    split: str
    """The split that the requests are from."""
    case: str
    precision: str
    """Precision of the rows that were measured last."""
    threads: int
    """PyTorch's threads on the host."""
    dropped: int
    """First requests of each size, not timed."""
    rows: list[Row]
    hardware: dict[str, Any]
    software: dict[str, Any]
    started: str

    def with_rows_of(self, earlier: "Inference | None") -> "Inference":
        """This, and the rows of an earlier file that are of nothing that was measured again.

        One of another checkpoint, other data or another machine or software has none.
        """
        if earlier is None or self._subject() != earlier._subject():
            return self
        measured = {row.key for row in self.rows}
        kept = [row for row in earlier.rows if row.key not in measured]
        return dataclasses.replace(self, rows=kept + self.rows)

    def _subject(self) -> tuple[Any, ...]:
        software = {key: value for key, value in self.software.items() if key != "command"}
        return (
            *(self.run, self.checkpoint, self.step, self.samples, self.data, self.split),
            *(self.case, self.threads, self.dropped, self.hardware, software),
        )

    def write(self, folder: Path) -> Path:
        """Keep it in a run's folder, whole or not at all."""
        path = folder / FILE_NAME
        write_atomically(path, checksums.dumps(dataclasses.asdict(self)))
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
    # Files of earlier versions say it once, for all rows.
    rows = [
        dataclasses.replace(row, precision=row.precision or found.precision) for row in found.rows
    ]
    return dataclasses.replace(found, rows=rows)
