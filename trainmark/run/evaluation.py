"""`trainmark evaluate`: a checkpoint of a run on held-out data, on other data, or on raw files."""

import dataclasses
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from trainmark import workloads
from trainmark.contract import AnyWorkload, Metrics, Predictions
from trainmark.distributed.mesh import launched_ranks
from trainmark.errors import InputError
from trainmark.run import run_folder
from trainmark.run.assessment import INPUT, assessments, evaluated, write_scores
from trainmark.run.trained import Loaded, loaded
from trainmark.scoring import BadRows, EncodedFiles, RawFiles


def evaluate(
    folder: Path,
    *,
    data: str | None = None,
    device: str = "auto",
    checkpoint: str | None = None,
    importance_rows: int | None = None,
    inputs: Sequence[str] = (),
    bad_rows: BadRows = "stop",
) -> dict[str, Any]:
    """A checkpoint of a run on its held-out data.

    Args:
        folder: the run's output folder, which keeps the scores for its own data.
        data: another dataset than the run's own.
        device: auto, cpu or cuda.
        checkpoint: see `find_checkpoint`.
        importance_rows: find out on so many rows at most what each column is worth.
        inputs: raw files or patterns to evaluate on instead, all of their rows.
        bad_rows: of these, what to do with rows that cannot be read.
    """
    if inputs and data:
        raise InputError("Give --input or --data: raw files, or a dataset that was prepared.")
    check = partial(_check, folder, importance_rows)
    with _encoded(folder, inputs, bad_rows) as encoded:
        other = str(encoded.folder) if encoded else data
        with loaded(folder, checkpoint=checkpoint, device=device, data=other, check=check) as model:
            cfg, workload = model.cfg, model.workload
            splits = workload.held_out_splits(cfg)[: 1 if encoded else None]
            found, predictions = _on_splits(model, splits)
            columns = []
            if importance_rows and workload.importance:
                split = cfg.quality_split if cfg.quality_split in splits else splits[0]
                columns = workload.importance(model.trainer, split, importance_rows)
            is_main = model.mesh.is_main  # afterwards there are no ranks
        assessed = assessments(cfg, workload, predictions) if is_main else {}
    if encoded:  # one process, and one split with all rows
        (split,) = splits
        found, assessed = {INPUT: found[split]}, {INPUT: assessed[split]}
        predictions = {INPUT: predictions[split]}
    evaluated_on = " ".join(inputs) if encoded else cfg.data
    if is_main and (encoded or data is None):
        most, samples = cfg.keep_scores, model.samples
        write_scores(folder, predictions, most=most, samples=samples, data=evaluated_on)
    evaluation = {
        "schema": "trainmark.evaluation/1",
        "run": cfg.name,
        "checkpoint": str(model.path),
        "role": run_folder.role(model.path),
        "step": model.step,
        "samples": model.samples,
        "data": evaluated_on,
        "target": cfg.target,
        "metric": cfg.metric,
        "best_possible": workloads.definition(cfg).best_possible(cfg),
        "splits": found,
        "assessments": {split: dataclasses.asdict(one) for split, one in assessed.items()},
        "importance": [dataclasses.asdict(column) for column in columns],
    }
    if encoded:
        evaluation |= {"unknown_share": encoded.unknown_share, "bad_rows": encoded.bad_rows}
    return evaluation


@contextmanager
def _encoded(
    folder: Path, inputs: Sequence[str], bad_rows: BadRows
) -> Iterator[EncodedFiles | None]:
    """Raw files as a temporary dataset; None without files."""
    if not inputs:
        yield None
        return
    cfg = run_folder.read_config(folder)
    encode = workloads.definition(cfg).encode_files
    if encode is None:
        raise InputError(f"--input is for click logs; the run in {folder} is of {cfg.workload}.")
    if launched_ranks() > 1:
        raise InputError(
            "--input is for one process. Prepare the files with --vocabulary, and evaluate on "
            "what comes out with --data."
        )
    with tempfile.TemporaryDirectory(dir=folder, prefix=".input-") as temporary:
        raw = RawFiles(patterns=tuple(inputs), bad_rows=bad_rows)
        yield encode(cfg, raw, Path(temporary) / "data")


def _check(folder: Path, importance_rows: int | None, cfg: Any, workload: AnyWorkload) -> None:
    """Refuse a question that this run cannot answer."""
    if not workload.held_out_splits(cfg):
        raise InputError(
            f"There is nothing to evaluate: the run in {folder} held nothing out of {cfg.data}."
        )
    if importance_rows and workload.importance is None:
        raise InputError(
            f"--importance is for models of columns; the run in {folder} is of {cfg.workload}."
        )


def _on_splits(
    model: Loaded, splits: Sequence[str]
) -> tuple[dict[str, Metrics], dict[str, Predictions]]:
    """Metrics by split, and the predictions where labels are yes or no."""
    cfg, workload, mesh = model.cfg, model.workload, model.mesh
    found, predictions = {}, {}
    for split in splits:
        rows = workload.build_data(cfg, split, mesh.dp_rank, mesh.dp_size)
        found[split], made = evaluated(workload, model.trainer, rows)
        if made is not None:
            predictions[split] = made
    return found, predictions
