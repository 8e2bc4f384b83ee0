"""`trainmark predict`: a trained model's scores for every row of files, in bounded memory.

A model of a run scores a dataset, which raw files are encoded as first, by the rules of what the
run was trained on: the road of `trainmark evaluate --input`, and the same scores. Where there is a
shorter way (`contract.Definition.score_files`), and for exported models, that is taken. Rows are
done in parts, each kept as soon as it is, so that a run that was broken off goes on.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trainmark.clicklog.engine import kept
from trainmark.clicklog.sources.source import find_days
from trainmark.config import filled
from trainmark.contract import AnyWorkload, Definition
from trainmark.errors import InputError, unknown
from trainmark.inference import serving
from trainmark.inference.options import PredictOptions
from trainmark.inference.scored_parts import Parts, check_output, unfinished
from trainmark.progress import say, share_bar
from trainmark.run import run_folder
from trainmark.scoring import EncodedFiles, RawFiles, ScoredRows, Served

if TYPE_CHECKING:  # a model that needs no torch does not wait for it
    from trainmark.run.trained import Loaded

PART_ROWS = 1 << 18
"""Rows of a part, at least; a full part is written."""


def predict(options: PredictOptions) -> Path:
    """Score all rows and write them. Returns the file's path."""
    definition, run = serving.identify(options.folder)
    inputs = _inputs(options)
    check_output(options.output, inputs)
    _check(options, definition, run, is_dataset=inputs[0].is_dir())
    path = run_folder.find_checkpoint(options.folder, options.checkpoint) if run else None
    with unfinished(options.output, _about(options, inputs, path)) as parts:
        with share_bar("scoring") as advance:
            for scored in _scored(options, inputs, definition, run, path, parts):
                _check_finite(scored.answers.values(), parts.rows)
                parts.add(_columns(scored))
                advance(scored.share)
        if not parts.rows:
            raise InputError(f"{' '.join(options.input)}: there are no rows to score.")
        parts.join()
    chosen = f" by {path} ({run_folder.role(path)})" if path else ""
    say(f"{parts.rows:,} rows scored{chosen}.")
    return options.output


def _inputs(options: PredictOptions) -> list[Path]:
    """The files to score, or the folder of a dataset."""
    folders = [Path(name) for name in options.input if Path(name).is_dir()]
    if not folders:
        return find_days(options.input, options.bad_rows)
    if len(options.input) > 1:
        raise InputError(
            f"--input {folders[0]} is a dataset; give one of them, or raw files. Received: "
            f"{' '.join(options.input)}."
        )
    return folders


def _check(
    options: PredictOptions, definition: Definition[Any], run: Any, *, is_dataset: bool
) -> None:
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:  # `launched_ranks`, without torch
        raise InputError("predict is for one process: start it once, without torchrun.")
    serving.device(options.device)
    reads_dataset = run is not None and (is_dataset or definition.encode_files is not None)
    if definition.score_files is None and not reads_dataset:
        raise InputError(
            f"{options.folder} holds a {definition.name} model, which gives no scores for rows."
        )
    if run is None and options.checkpoint:
        raise InputError(
            f"--checkpoint chooses among those of a run; {options.folder} is an exported model."
        )
    if options.precision and not reads_dataset:
        raise InputError(
            f"--precision is for runs that read a dataset; the model in {options.folder} scores in "
            "fp32."
        )
    if is_dataset and run is None:
        raise InputError(
            f"--input {options.input[0]} is a folder; an exported model scores raw files."
        )
    if is_dataset and options.keep:
        raise InputError("--keep is for raw files: a dataset holds numbers and ids alone.")
    if options.split and not is_dataset:
        raise InputError("--split is for a dataset: of raw files, all rows are scored.")
    if options.column and reads_dataset:
        raise InputError("--column is for sentences; the columns of a log are found by name.")


def _keep(options: PredictOptions) -> tuple[str, ...]:
    """The columns to carry along; commas separate them too, as in `prepare --columns`."""
    names = (name.strip() for word in options.keep for name in word.split(","))
    return tuple(dict.fromkeys(filter(None, names)))


def _about(options: PredictOptions, inputs: list[Path], checkpoint: Path | None) -> dict[str, Any]:
    """What decides the scores: a broken-off run goes on only if all of it is the same."""
    names = ("device", "precision", "bad_rows", "split", "column")
    model = checkpoint or options.folder
    return {
        **{name: getattr(options, name) for name in names},
        "keep": list(_keep(options)),
        "model": [str(model.resolve()), model.stat().st_mtime_ns],
        "input": [
            [str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns] for path in inputs
        ],
    }


def _scored(
    options: PredictOptions,
    inputs: list[Path],
    definition: Definition[Any],
    run: Any,
    checkpoint: Path | None,
    parts: Parts,
) -> Iterator[ScoredRows]:
    """The rows that are still to be done, part by part."""
    raw = RawFiles(
        patterns=tuple(map(str, inputs)),
        bad_rows=options.bad_rows,
        labelled=False,
        keep=_keep(options),
        column=options.column,
        memory=options.memory,
    )
    if inputs[0].is_dir():
        return _of_dataset(options, str(inputs[0]), None, parts.rows)
    served = Served(
        folder=options.folder,
        run=run,
        checkpoint=checkpoint,
        device=serving.device(options.device),
    )
    of_run = run is not None and definition.encode_files is not None
    scored = None
    if definition.score_files and (not of_run or (options.precision or run.precision) == "fp32"):
        scored = definition.score_files(served, raw, parts.folder, parts.rows)
    if scored is not None:
        return scored
    encoded = filled(definition.encode_files)(run, raw, parts.folder / "data")
    return _of_dataset(options, str(encoded.folder), encoded, parts.rows)


# --- a model of a run, on a dataset


def _of_dataset(
    options: PredictOptions, data: str, encoded: EncodedFiles | None, done: int
) -> Iterator[ScoredRows]:
    """The rows of a split after the first `done`."""

    from trainmark.run import trained

    def check(cfg: Any, workload: AnyWorkload) -> None:
        if workload.build_predictor is None or workload.answers is None:
            raise InputError(f"{cfg.name} gives no scores for samples.")

    with trained.loaded(
        options.folder,
        checkpoint=options.checkpoint,
        device=options.device,
        data=data,
        precision=options.precision,
        check=check,
    ) as model:
        rows = model.workload.build_data(model.cfg, _split(options, model, data), 0, 1)
        rows.restore({"samples": done})
        per_part = max(1, PART_ROWS // filled(model.cfg.eval_batch)) * model.cfg.eval_batch
        sizes = [min(per_part, rows.samples - row) for row in range(done, rows.samples, per_part)]
        for size, answers in zip(sizes, _answers(model, rows, done, sizes), strict=True):
            done += size
            carried = encoded and encoded.kept and kept.rows(encoded.kept, done - size, done)
            yield ScoredRows(answers=answers, kept=carried, share=done / rows.samples)


def _split(options: PredictOptions, model: Loaded, data: str) -> str:
    splits: Sequence[str] = model.workload.held_out_splits(model.cfg)
    if options.split and options.split not in splits:
        raise unknown(f"held-out split of {data}", options.split, splits)
    return options.split or splits[0]


def _answers(
    model: Loaded, rows: Any, first: int, sizes: list[int]
) -> Iterator[dict[str, np.ndarray]]:
    """The answers for so many rows at a time, by name."""
    import torch

    predict = filled(model.workload.build_predictor)(model.trainer)
    batches = iter(rows)
    for size in sizes:
        found: list[torch.Tensor] = []
        while sum(map(len, found)) < size:
            found.append(predict(next(batches)))
        scores = torch.cat(found)
        _check_finite([scores.numpy()], first)  # the answers would not show an infinite one
        first += size
        answers = filled(model.workload.answers)(scores)
        yield {name: column.numpy() for name, column in answers.items()}


def _check_finite(columns: Iterable[np.ndarray], first: int) -> None:
    for column in columns:
        bad = np.flatnonzero(~np.isfinite(column).reshape(len(column), -1).all(1))
        if len(bad):
            raise InputError(
                f"The prediction for row {first + int(bad[0]):,} is not finite. Check its values; "
                "if all rows are affected, the model's weights have grown without bound."
            )


def _columns(scored: ScoredRows) -> dict[str, Any]:
    """All of them. Where one that is carried along has the name of an answer, both are there."""
    names = [] if scored.kept is None else scored.kept.column_names
    columns = {name: scored.kept[name] for name in names}
    for name, answer in scored.answers.items():
        while name in columns:
            name += "_predicted"
        columns[name] = answer
    return columns
