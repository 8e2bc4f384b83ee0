"""`trainmark evaluate`: how good a run's predictions are, and how sure that is."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import RenderableType

from trainmark import checksums
from trainmark.errors import InputError
from trainmark.files import write_atomically
from trainmark.hardware.backends import DeviceChoice
from trainmark.inference.options import Checkpoint
from trainmark.metrics.binary import Assessment, Importance
from trainmark.progress import SafeConsole
from trainmark.report import assessments
from trainmark.report.tables import Grid, metrics_table
from trainmark.scoring import BadRows
from trainmark.validation import parse


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions:
    """Evaluate a checkpoint in a run's folder."""

    folder: Annotated[Path, tyro.conf.Positional]
    """Output folder of a run."""
    checkpoint: Checkpoint = None
    """Which one; default: the best if the run had --patience, else the last."""
    data: str | None = None
    """Another dataset to evaluate on; default: the run's own."""
    input: tuple[str, ...] = ()
    """Raw files to evaluate on instead, all of their rows: paths or patterns. They are read as the
    run's data were, with their vocabularies."""
    bad_rows: BadRows = "stop"
    """Rows of --input that cannot be read: stop at the first, skip them, or keep them with the bad
    fields as missing."""
    device: DeviceChoice = "auto"
    """Where to evaluate."""
    importance: bool = False
    """Also measure how much AUC is lost when the values of each column are shuffled."""
    importance_rows: int = 50_000
    """Most rows of the quality split to use for --importance."""


def evaluate(options: EvaluateOptions) -> None:
    """Evaluate a run's checkpoint, print what came out, and keep it in the run's folder."""
    from trainmark.distributed.mesh import is_main_process
    from trainmark.run import evaluation as evaluations
    from trainmark.run.assessment import EVALUATION_FILE

    if options.importance_rows < 2:
        raise InputError(
            f"--importance-rows must be at least 2. Received: {options.importance_rows}."
        )
    evaluation = evaluations.evaluate(
        options.folder,
        data=options.data,
        device=options.device,
        checkpoint=options.checkpoint,
        importance_rows=options.importance_rows if options.importance else None,
        inputs=options.input,
        bad_rows=options.bad_rows,
    )
    if not is_main_process():
        return
    console = SafeConsole()
    console.say(f"{evaluation['checkpoint']} ({evaluation['role']})")
    for part in _parts(evaluation):
        console.print(part)
    if evaluation["best_possible"]:
        metric, best = evaluation["metric"], evaluation["best_possible"]
        console.print(f"best possible {metric} {best:.6f}, target {evaluation['target']:.6f}")
    # Last: what is printed cannot get lost.
    write_atomically(options.folder / EVALUATION_FILE, checksums.dumps(evaluation))


def _parts(evaluation: dict[str, Any]) -> Iterator[RenderableType]:
    """The tables, and the sentences between them."""
    found = evaluation["assessments"]
    assessed = {split: parse(Assessment, found[split], split) for split in found}
    yield metrics_table(assessments.metrics_grid(evaluation["splits"], assessed))
    for split, one in assessed.items():
        yield assessments.remarks(split, one)
    for split, one in assessed.items():
        yield metrics_table(assessments.calibration_grid(one), f"\nCalibration on {split}")
    if "unknown_share" in evaluation:
        yield from _of_files(evaluation)
    columns = [parse(Importance, column, "importance") for column in evaluation["importance"]]
    if columns:
        yield metrics_table(assessments.importance_grid(columns), "\nWhat each column is worth")


def _of_files(evaluation: dict[str, Any]) -> Iterator[RenderableType]:
    """Tables about raw files: values the model does not know, and bad rows."""
    shares = sorted(evaluation["unknown_share"].items(), key=lambda share: -share[1])
    rows = [[name, f"{share:.1%}"] for name, share in shares]
    grid = Grid(["column", "rare or new"], rows, [False, True])
    yield metrics_table(grid, "\nValues that the model does not know")
    if evaluation["bad_rows"]:
        yield f"{evaluation['bad_rows']:,} bad rows (--bad-rows)."
