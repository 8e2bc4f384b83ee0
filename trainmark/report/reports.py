"""From folders of runs to pages, tables and comparisons: `trainmark report` and `compare`."""

import dataclasses
import sys
from collections import Counter
from collections.abc import Sequence
from itertools import count
from pathlib import Path

from rich.console import Group, RenderableType
from rich.text import Text

from trainmark.errors import InputError
from trainmark.files import write_atomically
from trainmark.inference import figures
from trainmark.report import comparison, formats
from trainmark.report.html import page, tables_page
from trainmark.report.like import tables_like
from trainmark.report.paired import paired_differences
from trainmark.report.sections import ReportedRun
from trainmark.report.tables import metrics_table
from trainmark.run import alignment, result
from trainmark.run.assessment import read_evaluation
from trainmark.run.curves import CURVES, read_curves, read_loss

FILE_NAME = "report.html"


def report(folders: Sequence[Path], output: Path | None = None) -> Path:
    """Write a self-contained page about the runs in `folders` and return its path.

    Args:
        folders: output folders of finished runs. A folder of repeats (0, 1, ...) stands for all
            of them. Of several, as of a sweep's `*`, those without a result are left out.
        output: a file, or a folder for `report.html`. By default the run's folder, or the current
            one for several runs.
    """
    found = _runs_in(folders)
    return _write(_target(found, output), page(_load(found)))


def table_report(folders: Sequence[Path], like: str | None, kind: str, output: Path | None) -> str:
    """Tables of the runs in `folders`: their text, or where it was written to.

    Args:
        like: the family of published pages that they are to be like; None for our own.
        kind: the format. A page (`html`) is always a file, others only with `output`.
    """
    found = _runs_in(folders)
    tables = tables_like(like, _load(found))
    if kind == "html":
        return str(_write(_target(found, output), tables_page(f"Results like {like}", tables)))
    text = formats.WRITERS[kind](tables)
    if output is None:
        return text.rstrip("\n")
    return str(_write(output, text))


def compare(a: Path, b: Path) -> RenderableType:
    """Two runs side by side, for a terminal; where they have scores, also row by row."""
    sides = comparison.compare(result.read(a), result.read(b), (f"A: {a}", f"B: {b}"))
    grid, left_out = paired_differences(_home(a), _home(b))
    paired = [metrics_table(grid, "On the same rows")] if grid.rows else []
    return Group(sides, *paired, *map(Text, left_out))


def _runs_in(folders: Sequence[Path]) -> list[Path]:
    found = [run for folder in _with_results(folders) for run in _with_repeats(folder)]
    if not found:
        raise InputError("Nothing to report: expected the output folder of at least one run.")
    return found


def _write(target: Path, text: str) -> Path:
    target.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(target, text)
    return target


def _with_results(given: Sequence[Path]) -> Sequence[Path]:
    """Leave out folders without a result, and say so; a single folder is always kept."""
    if len(given) < 2:
        return given
    left_out = [path for path in given if _is_no_result(path)]
    if left_out:
        print(f"Left out, without a result: {', '.join(map(str, left_out))}.", file=sys.stderr)
    return [path for path in given if path not in left_out]


def _is_no_result(path: Path) -> bool:
    """What is there, but holds no result: `sweep.json`, a run that failed. A path that is not there
    is a mistake, and a damaged `result.json` wants to be known."""
    if path.is_dir():
        return not any((run / result.FILE_NAME).is_file() for run in _with_repeats(path))
    if path.name == result.FILE_NAME or not path.exists():
        return False
    try:
        result.read(path)
    except InputError:
        return True
    return False


def _with_repeats(folder: Path) -> list[Path]:
    """The folder itself, or the runs 0, 1, ... of `--repeats` in it."""
    repeats = [run for run in folder.glob("[0-9]*") if (run / result.FILE_NAME).is_file()]
    if (folder / result.FILE_NAME).is_file() or not repeats:
        return [folder]
    return sorted(repeats, key=lambda run: (len(run.name), run.name))


def _target(folders: Sequence[Path], output: Path | None) -> Path:
    if output is not None:
        return output / FILE_NAME if output.is_dir() else output
    if len(folders) == 1:
        return _home(folders[0]) / FILE_NAME
    return Path(FILE_NAME)


def _home(folder: Path) -> Path:
    """The run's folder, also where its `result.json` was named."""
    return folder.parent if folder.is_file() else folder


def _names(folders: Sequence[Path]) -> list[str]:
    """Names of folders: as many of their last parts as tell them apart, and of a repeat, called 0
    or 1, its run's name, too."""
    parts = [folder.resolve().parts for folder in folders]
    apart = next(n for n in count(1) if len({one[-n:] for one in parts}) == len(set(parts)))
    return ["/".join(one[-max(apart, 2 if one[-1].isdigit() else 1) :]) for one in parts]


def _read(folder: Path) -> result.Result:
    """A result, with what `trainmark align` has found out about it since."""
    found = result.read(folder)
    aligned = alignment.known(_home(folder)) or found.aligned
    return dataclasses.replace(found, aligned=aligned)


def _load(folders: Sequence[Path]) -> list[ReportedRun]:
    results = [_read(folder) for folder in folders]
    names = _names([_home(folder) for folder in folders])
    same_run = Counter(one.run for one in results)
    return [
        ReportedRun(
            label=one.run if same_run[one.run] == 1 else f"{one.run} ({name})",
            result=one,
            loss=read_loss(_home(folder) / one.loss.curve),
            curves=read_curves(_home(folder) / CURVES.name),
            colour=index,
            inference=figures.read(_home(folder)),
            evaluated=read_evaluation(_home(folder)),
        )
        for index, (folder, one, name) in enumerate(zip(folders, results, names, strict=True))
    ]
