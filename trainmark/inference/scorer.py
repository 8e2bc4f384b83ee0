"""What a workload gives the server: a model that reads requests and scores their rows.

A workload that can be served has a module `serving` with a function `load(Served) -> Scorer`.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

Values = Literal["auto", "raw", "prepared"]


@dataclass(frozen=True, kw_only=True)
class Served:
    """What is to be served."""

    folder: Path
    """Of a run, or of an exported model."""
    run: Any = None
    """The run's configuration; None for an exported model."""
    device: str
    """As PyTorch names it."""
    data: str | None = None
    """Dataset whose preparation encodes raw values; None: the run's own."""
    values: Values = "auto"
    """What requests hold."""


class Scorer(Protocol):
    """A model, loaded. `read` and `score` are called in one thread at a time."""

    facts: dict[str, Any]
    """What `GET /model` tells."""
    answer: str
    """What the list of scores is called."""
    example: dict[str, Any]
    """A body that `read` takes."""

    def read(self, body: dict[str, Any]) -> list[Any]:
        """The rows of a request.

        Raises:
            InputError: one sentence that names the row (from 0) and what is wrong with it.
        """

    def score(self, rows: list[Any]) -> list[Any]:
        """A score for each row; the rows may be those of several requests. Raises as `read`."""
