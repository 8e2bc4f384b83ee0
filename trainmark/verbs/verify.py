"""`trainmark verify`: whether every byte of a folder is as it was written."""

from collections.abc import Iterator
from pathlib import Path

from trainmark import checksums
from trainmark.checkpoint import checkpoints
from trainmark.checkpoint.manifest import MANIFEST
from trainmark.errors import InputError, raise_all
from trainmark.files import read_json
from trainmark.formatting import readable_size
from trainmark.progress import printable


def verify(folder: Path) -> None:
    """Read all that has checksums in `folder`: datasets, checkpoints, exports, results.

    Raises:
        InputError: naming everything that is damaged.
    """
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder.")
    found, problems = 0, []
    for path in sorted(path for path in folder.rglob("*.json") if path.is_file()):
        try:
            for name, size in _verified(path):
                print(printable(f"{name}: intact, {readable_size(size)}"))
                found += 1
        except InputError as error:
            problems.append(str(error))
    raise_all(problems)
    if not found:
        raise InputError(
            f"{folder} holds nothing with a checksum: expected a dataset, a run, a checkpoint or "
            "an exported model that this version of trainmark wrote."
        )


def _verified(path: Path) -> Iterator[tuple[Path, int]]:
    """What a JSON file has checksums for, with its bytes: a folder, a checkpoint, files, itself."""
    if path.name == checksums.FILE_NAME:
        yield path.parent, checksums.check(path.parent)
    elif path.name == MANIFEST and path.parent.name.startswith("step-"):
        checkpoints.verify(path.parent)
        yield path.parent, sum(file.stat().st_size for file in path.parent.iterdir())
    elif checksums.KEY in _end(path) or checksums.KIND in _end(path):  # one may be damaged
        read_json(path)
        yield path, path.stat().st_size + checksums.check(path.parent, listed_in=path.name)


def _end(path: Path) -> str:
    return path.read_bytes()[-100:].decode(errors="replace")
