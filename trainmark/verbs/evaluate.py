"""`trainmark evaluate`: how good a run's predictions are, and how sure that is."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType

from trainmark.errors import InputError
from trainmark.metrics.binary import Assessment, Importance
from trainmark.report import assessments
from trainmark.report.tables import grid_table
from trainmark.validation import parse


def evaluate(
    folder: Path,
    *,
    data: str | None,
    device: str,
    checkpoint: str | None = None,
    importance_rows: int | None = None,
) -> None:
    """Evaluate a run's checkpoint, print what came out, and keep it in the run's folder."""
    from trainmark.distributed.mesh import is_main_process
    from trainmark.run import runner

    if importance_rows is not None and importance_rows < 2:
        raise InputError(f"--importance-rows must be at least 2. Received: {importance_rows}.")
    evaluation = runner.evaluate(
        folder,
        data=data,
        device=device,
        checkpoint=checkpoint,
        importance_rows=importance_rows,
    )
    if not is_main_process():
        return
    console = Console()
    chosen = f"{evaluation['checkpoint']} ({evaluation['role']})"
    console.print(chosen, markup=False, highlight=False, soft_wrap=True)
    for part in _parts(evaluation):
        console.print(part)
    if evaluation["best_possible"]:
        metric, best = evaluation["metric"], evaluation["best_possible"]
        console.print(f"best possible {metric} {best:.6f}, target {evaluation['target']:.6f}")
    runner.write_evaluation(evaluation, folder)  # last: what is printed cannot get lost


def _parts(evaluation: dict[str, Any]) -> Iterator[RenderableType]:
    """The tables, and the sentences between them."""
    found = evaluation["assessments"]
    assessed = {split: parse(Assessment, found[split], split) for split in found}
    yield grid_table(assessments.metrics_grid(evaluation["splits"], assessed))
    for split, one in assessed.items():
        yield assessments.remarks(split, one)
    for split, one in assessed.items():
        yield grid_table(assessments.calibration_grid(one), f"Calibration on {split}")
    columns = [parse(Importance, column, "importance") for column in evaluation["importance"]]
    if columns:
        yield grid_table(assessments.importance_grid(columns), "What each column is worth")
