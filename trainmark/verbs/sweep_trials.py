"""`sweep.json`: the values of each run of a sweep, and how it ended."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainmark import checksums
from trainmark.errors import InputError
from trainmark.files import read_json, write_atomically
from trainmark.run.result import Evaluation, Result
from trainmark.validation import parse

FILE_NAME = "sweep.json"


@dataclass(kw_only=True)
class Trial:
    """One run of a sweep. Its fields change as the sweep goes on."""

    folder: str
    """Its folder, relative to the sweep's."""
    values: dict[str, str]
    """The value of each field."""
    outcome: str | None = None
    """A word of `attempt.py`; None while it runs, or if it was killed."""
    reason: str = ""
    """Why it failed."""
    value: float | None = None
    """What the sweep compares it by."""
    evaluations: list[float] = field(default_factory=list)
    """The metric during training."""


def judged_split(finished: Result) -> str:
    """The split that runs of a sweep are compared on.

    The best of many runs is also the luckiest. So validation chooses, where there is one, and the
    test split tells how good the choice is.
    """
    return "validation" if "validation" in finished.final_metrics() else finished.quality.split


def judged(finished: Result) -> float | None:
    """The metric of a finished run on that split."""
    metrics = finished.final_metrics().get(judged_split(finished), {})
    return metrics.get(finished.quality.metric)


def during(finished: Result) -> list[float]:
    """The metric at the evaluations before the last step."""
    split = finished.best.split if finished.best else finished.quality.split
    before = [
        e for e in finished.evaluations if e.split == split and e.at_sample < finished.samples
    ]
    return values_of(before, finished.quality.metric)


def values_of(evaluations: Sequence[Evaluation], metric: str) -> list[float]:
    """The values of a metric, where defined, without the evaluation before the first step."""
    found = [e.metrics[metric] for e in evaluations if e.at_sample > 0]
    return [value for value in found if value is not None]


# --- the file


def read(output: Path, identity: Mapping[str, Any]) -> list[Trial]:
    """The trials so far of the sweep in `output`; that of another sweep is refused."""
    path = output / FILE_NAME
    if not path.is_file():
        return []
    data = read_json(path)
    if not {"sweep", "trials"} <= data.keys():
        raise InputError(f"{path} is damaged; remove it to sweep again.")
    if data["sweep"] != identity:
        raise InputError(f"{output} holds another sweep. Give another --output.")
    return parse(list[Trial], data["trials"], str(path))


def write(output: Path, identity: Mapping[str, Any], trials: Sequence[Trial]) -> None:
    output.mkdir(parents=True, exist_ok=True)
    plain = {"sweep": identity, "trials": [dataclasses.asdict(trial) for trial in trials]}
    write_atomically(output / FILE_NAME, checksums.dumps(plain))
