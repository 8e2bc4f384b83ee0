"""vocabulary.json, beside the vocabularies of a dataset: what its ids and numbers mean.

`prepare` writes it, and a checksum with it; whoever edits it by hand is held to its shape.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from trainmark.bounds import Count, CountOrZero
from trainmark.files import read_json
from trainmark.validation import parse

NAME = "vocabulary.json"


def read(folder: Path) -> dict[str, Any]:
    """That of a folder of vocabularies; empty if it has none."""
    facts = read_json(folder / NAME)
    if facts:
        parse(_Facts, facts, str(folder / NAME))
    return facts


@dataclass(frozen=True)
class _Grown:
    digest: str
    rows: Count


@dataclass(frozen=True)
class _Rule:
    threshold: CountOrZero
    max_rows: Count | None
    digest: str
    extends: tuple[_Grown, ...] = ()


@dataclass(frozen=True)
class _Use:
    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    column: str
    role: Literal["label", "numerical", "categorical", "timestamp"]
    reading: str | None = None
    comparison: tuple[str, float | str] | None = None
    parameters: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.role == "numerical" and self.reading is None:
            raise ValueError(f"its column {self.column} lacks its reading")


@dataclass(frozen=True)
class _Inputs:
    missing: list[str]
    columns: list[_Use]
    label: _Use | None = None


@dataclass(frozen=True)
class _Facts:
    recipe: str
    columns: dict[str, _Rule]
    inputs: _Inputs = _Inputs(missing=[], columns=[])
