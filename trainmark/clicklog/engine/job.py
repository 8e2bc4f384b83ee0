"""A job: what to prepare, and how."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from trainmark.clicklog.engine.splits import SplitRule
from trainmark.clicklog.engine.vocabulary import Rules
from trainmark.clicklog.sources.source import Source
from trainmark.errors import InputError

VOCABULARY = "vocabulary"


@dataclass(frozen=True, kw_only=True)
class Job:
    """What to prepare, and how."""

    source: Source
    output: Path
    rules: Sequence[Rules]
    """One per categorical column."""
    split: SplitRule
    seed: int = 0
    vocabulary_from: Literal["all", "train"] = "all"
    vocabulary: Path | None = None
    """Folder with vocabularies to use instead of building them."""
    grow: bool = False
    """Whether these are to be extended by new values."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """For feature_spec.yaml and prepare.json."""

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise InputError(f"--seed is {self.seed}; 0 or more is expected.")
        if self.grow and self.vocabulary is None:
            raise InputError("--grow needs --vocabulary: the dataset whose ids are to be extended.")

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Everything that decides the result, for prepare.json: as it was before the work."""
        return {
            **self.source.settings(),
            "frequency_threshold": _one_if_all_alike([rule.threshold for rule in self.rules]),
            "max_rows": _one_if_all_alike([rule.max_rows for rule in self.rules]),
            **self.split.settings(),
            "vocabulary_from": self.vocabulary_from,
            "vocabulary": str(self.vocabulary) if self.vocabulary else None,
            **({"grow": True} if self.grow else {}),
            "bad_rows": self.source.bad_rows,
            "seed": self.seed,
        }

    @property
    def told(self) -> dict[str, Any]:
        """Facts for prepare.json that training and evaluation ask for."""
        facts = {"group": self.split.group, "negative_rate": self.split.negative_rate}
        return {key: value for key, value in facts.items() if value is not None}


def _one_if_all_alike(of_columns: list[Any]) -> Any:
    return of_columns[0] if len(set(of_columns)) == 1 else of_columns
