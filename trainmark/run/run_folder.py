"""The folder of a run: which run it belongs to, and where its configuration and checkpoints lie.

`runlog.py` and the verbs write files into it. Besides these it holds

    config.json               the resolved configuration that it was made with
    checkpoints/step-*        see `checkpoint/`
    model/                    the trained model for other software, where a workload saves one
    .lock                     held by the process that trains
"""

import dataclasses
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trainmark import checksums, workloads
from trainmark.checkpoint import folders
from trainmark.config import (
    EXTENSION,
    LAYOUT,
    OBSERVATION,
    SYNTHETIC,
    AnyRun,
    Run,
    differences,
    to_plain,
)
from trainmark.errors import InputError
from trainmark.files import locked, read_json, unfinished, write_atomically
from trainmark.validation import parse

CONFIG_FILE = "config.json"
CHECKPOINTS = "checkpoints"
LOCK_FILE = ".lock"
TRIALS = "trials"
CHOICE = "choice.json"
"""The file that says what trials chose, and why."""


def check(
    output: Path, cfg: Run, *, fresh: bool, began_with: Mapping[str, Any] | None = None
) -> None:
    """Refuse a folder that cannot be this run's; nothing is changed.

    Args:
        began_with: what --from gives, as the run's checkpoints keep it.
    """
    if output.exists() and not output.is_dir():
        raise InputError(f"Output {output} is a file; give a folder.")
    contents = set(output.iterdir()) if output.is_dir() else set()
    # A run that was killed before it had written anything leaves these alone.
    contents -= {output / name for name in (LOCK_FILE, TRIALS, CHOICE)} | set(unfinished(output))
    if fresh and contents:
        raise InputError(f"--fresh: {output} is not empty. Give another --output or remove it.")
    if (output / CONFIG_FILE).exists():
        _check_same_run(read_config(output), cfg, output)
    elif contents:
        raise InputError(
            f"Output {output} is not empty and is not the folder of a run. Give another --output."
        )
    _check_checkpoints(output)
    latest = folders.latest(output / CHECKPOINTS)
    if began_with and latest and folders.read_state(latest).get("start") != began_with:
        raise InputError(
            f"{output} has a checkpoint to continue, of a run that began otherwise than --from "
            "says. Leave --from out to continue it, or give another --output."
        )


def _check_checkpoints(output: Path) -> None:
    """Refuse a run that has lost its checkpoints: it would begin again, and cut the loss curve."""
    log, root = output / "perf.log", output / CHECKPOINTS
    if folders.latest(root) or not log.is_file():
        return
    if '"event": "CHECKPOINT"' in log.read_text(encoding="utf-8", errors="replace"):
        raise InputError(
            f"{root} holds no checkpoint, but {log} says that the run has saved some. If they lie "
            "on a disk that is not mounted now, mount it; else start again with another --output."
        )


def with_full_path(cfg: AnyRun) -> AnyRun:
    """The run with an absolute path to its data: `evaluate` and `export` may run elsewhere."""
    data = cfg.data or SYNTHETIC
    return dataclasses.replace(cfg, data=os.path.abspath(data)) if _lies_here(data) else cfg


def _lies_here(data: str) -> bool:
    """Whether data are at a path: a folder, or the prefix of an index."""
    return any(os.path.exists(name) for name in (data, f"{data}.idx"))


def _check_same_run(earlier: Run, cfg: Run, output: Path) -> None:
    if earlier.name != cfg.name:
        raise InputError(f"{output} holds a run of {earlier.name}, not of {cfg.name}.")
    workload = workloads.definition(cfg)
    if cfg.data is not None:
        try:
            workload.check_data(earlier, cfg.data)
        except InputError as error:
            raise InputError(
                f"The run in {output} cannot be continued: {error} To train on these data, give "
                "another --output."
            ) from None
    fitted = workload.fitted_fields(earlier) & workload.fitted_fields(cfg)
    may_differ = OBSERVATION | EXTENSION | LAYOUT | workload.layout_fields | fitted
    changed = differences(with_full_path(earlier), with_full_path(cfg), ignore=may_differ)
    if changed:
        then, now = earlier.data or SYNTHETIC, cfg.data or SYNTHETIC
        have_moved = "data" in changed and _lies_here(now) and not _lies_here(then)
        raise InputError(
            f"{output} holds a run with another configuration (other {', '.join(changed)}). "
            "Use the same flags to continue it, or another --output to start a new run."
            + f" If {then} has moved to {now}, put a link in its place."
            * have_moved
        )


@contextmanager
def claimed(output: Path, cfg: Run) -> Iterator[None]:
    """Make `output` this run's folder, and this process the only one that trains in it."""
    otherwise = f"Another process trains in {output} now. Wait, or give another --output."
    with locked(output / LOCK_FILE, otherwise):
        for path in unfinished(output):
            path.unlink()
        write_atomically(output / CONFIG_FILE, checksums.dumps(to_plain(cfg)))
        yield


def newer_data(output: Path, cfg: Run) -> str:
    """A warning if data were written after the run's newest checkpoint, else nothing."""
    saved = folders.latest(output / CHECKPOINTS)
    if saved is None or cfg.data in (None, SYNTHETIC) or not Path(str(cfg.data)).is_dir():
        return ""
    made = saved.stat().st_mtime
    newer = [path for path in _data_files(Path(str(cfg.data))) if path.stat().st_mtime > made]
    if not newer:
        return ""
    return (
        f"{newer[0]} is newer than {saved}: if the data have changed, stop, and start a new run "
        "with another --output."
    )


def _data_files(folder: Path) -> list[Path]:
    """The files of a dataset, without the cache that runs keep there."""
    found = (path for path in folder.rglob("*") if path.is_file())
    return sorted(path for path in found if "cache" not in path.relative_to(folder).parts)


def read_config(folder: Path) -> Any:
    """The configuration that a run's folder was made with."""
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise InputError(f"{folder} is not the folder of a run: it has no {CONFIG_FILE}.")
    data = read_json(path)
    if "model_type" in data:
        raise InputError(
            f"{folder} is an exported model, not the folder of a run. Give the run's; predict and "
            "serve take both."
        )
    return parse_config(data, path)


def parse_config(data: Any, path: Path) -> Any:
    """A configuration as a checkpoint or config.json has it."""
    try:
        kind = type(workloads.named_run(str(data["name"])))
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} is damaged ({error}).") from None
    return parse(kind, data, str(path))


# --- its checkpoints


def find_checkpoint(path: Path, which: str | None = None) -> Path:
    """A checkpoint's folder, given itself or the folder of its run.

    Args:
        path: of either.
        which: `best`, `last` or `step-N` of a run's; None is the best one where the run kept it,
            else the last.
    """
    if not path.is_dir():
        raise InputError(f"Checkpoint {path} does not exist.")
    if (path / CONFIG_FILE).exists():
        return _choose(path / CHECKPOINTS, which)
    if path.name.startswith("step-"):
        return path
    raise InputError(
        f"{path} is not a checkpoint: expected the output folder of a run, or one of the folders "
        f"{CHECKPOINTS}/step-* in it."
    )


def _choose(root: Path, which: str | None) -> Path:
    last = folders.latest(root)
    if last is None:
        raise InputError(f"{root.parent} has no complete checkpoint.")
    if which == "last":
        return last
    best = _best(last)
    if which in (None, "best"):
        if which and best is None:
            raise InputError(
                f"{root.parent} kept no best checkpoint: it was trained without --patience. Use "
                f"--checkpoint last, which is {last.name}."
            )
        return best or last
    number = re.fullmatch(r"(?:step-)?0*(\d{1,18})", str(which), re.ASCII)
    found = folders.folder_of(root, int(number[1])) if number else root
    if number and found.is_dir():
        return found
    there = ", ".join(path.name for path in folders.all_checkpoints(root))
    raise InputError(
        f"--checkpoint must be best, last or one of {there}, which {root.parent} has. "
        f"Received: {which}."
    )


def _best(last: Path) -> Path | None:
    """The best checkpoint, as the last one knows it."""
    best = folders.read_state(last).get("progress", {}).get("best")
    found = folders.folder_of(last.parent, best["step"]) if best else None
    return found if found is not None and found.is_dir() else None


def role(checkpoint: Path) -> str:
    """Which of its run's checkpoints it is, in words."""
    last = folders.latest(checkpoint.parent)
    if last is None or last == checkpoint:
        return "best and last" if last and _best(last) == checkpoint else "last"
    return "best" if _best(last) == checkpoint else "neither best nor last"
