"""Whether a loss curve agrees with a reference, as `trainmark align` judges it.

The published rule: from step 21 on, the mean relative error of the loss is below 2 %.
"""

import dataclasses
import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainmark.errors import InputError
from trainmark.files import write_atomically
from trainmark.metrics import mean_relative_error
from trainmark.run import result
from trainmark.run.curves import LOSS, loss_rows
from trainmark.validation import parse

SCHEMA = "trainmark.alignment/1"
FIRST_STEP = 21
TOLERANCE = 0.02
FILE_NAME = "alignment.json"

_MEGATRON = re.compile(r"iteration\s+(\d+)/\s*\d+ \|.*?lm loss: ([-+.\deE]+|nan|inf)")
_MLLOG_KEYS = ("train_loss", "loss", "reduced_train_loss", "lm loss")


@dataclass(frozen=True, kw_only=True)
class Alignment:
    """How near a curve is to its reference."""

    reference: str
    first_step: int
    steps: int
    """How many steps both curves have, from the first one that counts."""
    error: float
    tolerance: float
    passed: bool


@dataclass(frozen=True, kw_only=True)
class _Stored:
    """The content of `alignment.json`."""

    schema: str
    curve_sha256: str
    """Digest of the loss curve that was judged; the verdict does not hold for another curve."""
    alignment: Alignment


def align(folder: Path, reference: Path) -> Alignment:
    """Compare; what was found is kept in `alignment.json` beside our curve."""
    found = compare(read_curve(folder), read_curve(reference), str(reference))
    file = curve_file(folder)
    stored = _Stored(schema=SCHEMA, curve_sha256=_digest(file), alignment=found)
    text = json.dumps(dataclasses.asdict(stored), indent=2)
    write_atomically(file.with_name(FILE_NAME), text + "\n")
    return found


def known(folder: Path) -> result.Aligned | None:
    """What `align` found out about the curve that the run in `folder` has now."""
    path, curve = folder / FILE_NAME, folder / LOSS.name
    if not path.is_file() or not curve.is_file():
        return None
    try:
        stored = parse(_Stored, json.loads(path.read_text(encoding="utf-8")), str(path))
    except ValueError as error:
        raise InputError(f"{path} is damaged ({error}). Run 'trainmark align' again.") from None
    return verdict(stored.alignment) if stored.curve_sha256 == _digest(curve) else None


def verdict(found: Alignment) -> result.Aligned:
    """An alignment as a result has it."""
    return result.Aligned(reference=found.reference, error=found.error, passed=found.passed)


def curve_file(path: Path) -> Path:
    return path / LOSS.name if path.is_dir() else path


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def compare(ours: dict[int, float], theirs: dict[int, float], reference: str) -> Alignment:
    """Compare two curves on the steps that both have."""
    steps = sorted(step for step in ours.keys() & theirs.keys() if step >= FIRST_STEP)
    if not steps:
        raise InputError(
            f"The two curves have no step from {FIRST_STEP} on in common: one ends at "
            f"{max(ours)}, {reference} at {max(theirs)}."
        )
    if any(theirs[step] == 0 for step in steps):
        raise InputError(f"{reference} has a loss of 0: no error is relative to that.")
    error = mean_relative_error([ours[s] for s in steps], [theirs[s] for s in steps])
    return Alignment(
        reference=reference,
        first_step=FIRST_STEP,
        steps=len(steps),
        error=error,
        tolerance=TOLERANCE,
        passed=error < TOLERANCE,
    )


# --- reading


def read_curve(path: Path) -> dict[int, float]:
    """Loss by step: a run's folder, a loss.csv, a Megatron log or an MLPerf log."""
    file = curve_file(path)
    if not file.is_file():
        raise InputError(f"{file} does not exist: expected a loss curve.")
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    if lines and lines[0].strip() == LOSS.header:
        curve = {step: loss for step, _, loss in loss_rows(file)}
    elif any(line.lstrip().startswith(":::MLLOG") for line in lines):
        curve = dict(_from_mllog(lines))
    else:
        matches = map(_MEGATRON.search, lines)
        curve = {int(match[1]): float(match[2]) for match in matches if match}
    if not curve:
        raise InputError(
            f"{file} has no loss: expected a {LOSS.name}, a Megatron log ('iteration 1/ 300 | ... "
            "lm loss: ...') or an MLPerf log (':::MLLOG' with train_loss)."
        )
    return curve


def _from_mllog(lines: list[str]) -> Iterator[tuple[int, float]]:
    """Losses with their step, or with the samples so far and the global batch."""
    batch = 0
    for line in lines:
        _, marker, text = line.partition(":::MLLOG")
        try:
            event = json.loads(text) if marker else {}
        except ValueError:
            continue  # a line that was cut
        if event.get("key") == "global_batch_size":
            batch = int(event["value"])
        loss = _loss_of(event)
        step = _step_of(event.get("metadata") or {}, batch)
        if loss is not None and step is not None:
            yield step, loss


def _loss_of(event: dict[str, Any]) -> float | None:
    value = event.get("value")
    if event.get("key") in _MLLOG_KEYS and isinstance(value, int | float):
        return float(value)
    if isinstance(value, dict):  # tracked_stats
        found = next((value[key] for key in _MLLOG_KEYS if key in value), None)
        return float(found) if isinstance(found, int | float) else None
    return None


def _step_of(metadata: dict[str, Any], batch: int) -> int | None:
    for key in ("step", "step_num", "iteration"):
        if isinstance(metadata.get(key), int):
            return int(metadata[key])
    samples = metadata.get("samples_count", metadata.get("epoch_num"))
    return int(samples) // batch if isinstance(samples, int) and batch else None


# --- in words


def sentence(found: Alignment) -> str:
    verdict = "aligned" if found.passed else "not aligned"
    return (
        f"Mean relative error {found.error:.4%} over {found.steps} steps from step "
        f"{found.first_step} on (limit {found.tolerance:.0%}): {verdict} with {found.reference}."
    )
