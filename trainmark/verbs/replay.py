"""`trainmark replay`: the command that gives a result again, and what is different here."""

import importlib.metadata
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import trainmark
from trainmark.errors import InputError
from trainmark.hardware.devices import cpu_name
from trainmark.hardware.environment import commit
from trainmark.progress import printable
from trainmark.run import result
from trainmark.run.result import Result


def command(path: Path, output: Path | None) -> list[str]:
    """Words after `trainmark`: the run's whole configuration is taken from its result.

    Args:
        path: a result.json, or the folder of a run.
    """
    file = path if path.is_file() else path / result.FILE_NAME
    found = result.read(path)
    if (shape := re.search(r"x([1-9][0-9]*)x([1-9][0-9]*)$", found.case)) is None:
        raise InputError(f"{file}: its case is {found.case!r}; expected DEVICExNODESxDEVICES.")
    nodes, devices = shape.groups()
    again = output or file.parent.with_name(f"{file.resolve().parent.name}-again")
    train = ["train", found.run, "--config", str(file)]
    train += [*_typed_besides(found), "--output", str(again)]
    if (nodes, devices) == ("1", "1"):
        return train
    return ["launch", "--on", "torchrun", "-j", f"{nodes}x{devices}", *train]


def _typed_besides(found: Result) -> list[str]:
    """Flags that were typed but are not part of the run's configuration: where its weights came
    from, and the description of its hardware."""
    try:
        typed = shlex.split(str(found.software.get("command") or ""))
    except ValueError:  # nothing that a shell could have read
        return []
    flags = ["--with-optimizer"] if "--with-optimizer" in typed else []
    for name in ("--from", "--hardware"):
        if name in typed[:-1]:
            flags += [name, typed[typed.index(name) + 1]]
    return flags


def described(path: Path, words: list[str]) -> str:
    """The command, after comments: what was typed then, and what is not as it was.

    It may be handed to a shell, and who wrote the result is anybody: a comment has one line.
    """
    found = result.read(path)
    typed = found.software.get("command")
    comments = [f"typed on {found.started}: {typed}"] if typed else []
    comments += [f"{what}: {then} then, {now} here" for what, then, now in _differences(found)]
    lines = [f"# {' '.join(line.splitlines())}" for line in comments]
    return printable("\n".join([*lines, shlex.join(["trainmark", *words])]))


def _differences(found: Result) -> Iterator[tuple[str, Any, Any]]:
    """What may make the figures differ, where both are known."""
    then = found.software | found.hardware
    here = {
        "commit": commit(),
        "trainmark": trainmark.__version__,
        "torch": importlib.metadata.version("torch"),
        "cpu": cpu_name(),
    }
    for name, now in here.items():
        before = then.get(name)
        if before is not None and now is not None and before != now:
            yield name, before, now
