"""Which checkpoints there are, what they say of themselves, and what to do about a damaged one. No
torch here."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trainmark.checkpoint.data_files import read_all
from trainmark.checkpoint.manifest import DamagedError, read_manifest
from trainmark.errors import InputError

_COMPLETE = re.compile(r"step-(\d{8,})(\.old)?")


def all_checkpoints(root: Path) -> list[Path]:
    """Every complete checkpoint under `root`, oldest first."""
    found = {path: _COMPLETE.fullmatch(path.name) for path in root.glob("step-*")}
    ages = {path: (int(match[1]), match[2] is None) for path, match in found.items() if match}
    return sorted(ages, key=ages.__getitem__)


def folder_of(root: Path, step: int) -> Path:
    """Where the checkpoint of a step lies, if there is one."""
    return root / f"step-{step:08d}"


def latest(root: Path) -> Path | None:
    """The newest complete checkpoint under `root`, if there is one."""
    return next(reversed(all_checkpoints(root)), None)


def read_state(path: Path) -> dict[str, Any]:
    """The state of a checkpoint, without reading any tensor."""
    with explained(path):
        return read_manifest(path).state


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Say what to do about a checkpoint that cannot be read."""
    try:
        yield
    except DamagedError as damage:
        raise InputError(f"{damage} {_way_out(path)}") from None
    except OSError as error:
        raise InputError(f"Cannot read checkpoint {path}: {error}.") from error


def _way_out(path: Path) -> str:
    """The newest intact checkpoint before a damaged one, and how to continue from it."""
    known = all_checkpoints(path.parent)
    in_the_way = [path]
    for candidate in reversed(known[: known.index(path)] if path in known else []):
        if _is_intact(candidate):
            listed = " and ".join(sorted(map(str, in_the_way)))
            return f"Remove {listed} to continue from {candidate}, which is intact."
        in_the_way.append(candidate)
    return "There is no intact checkpoint before it: start again, or restore it from a copy."


def _is_intact(path: Path) -> bool:
    try:
        read_all(path)
    except (InputError, OSError):
        return False
    return True
