"""What the engine asks of a source of rows, and which files it reads."""

import glob
import re
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn, Protocol

from trainmark.clicklog.sources import remote
from trainmark.clicklog.sources.rows import BadRow, ParsedRows, Schema
from trainmark.errors import InputError, no_file_matches, raise_all

BadRows = Literal["stop", "skip", "keep"]
Patterns = tuple[str, ...] | str
"""Files and patterns such as 'raw/day_*'."""


@dataclass(frozen=True)
class Position:
    """A place in the input at which reading can start again."""

    file: int = 0
    """Index into `Source.files`."""
    offset: int = 0
    """In the unit of the source: a byte of the decompressed text, a row, ... A line belongs to the
    piece in which it starts."""
    line: int = 1
    """Number of the line (or row) there, for messages. Known when all before it are parsed."""


def starts(files: Sequence[Path], start: Position) -> list[Position]:
    """Where the files that are left begin, if reading goes on at `start`."""
    if start.file >= len(files):
        return []
    return [start, *(Position(number) for number in range(start.file + 1, len(files)))]


@dataclass(frozen=True)
class Piece:
    """The input of one block, which is yet to be read."""

    start: Position
    stop: Position
    """Where the next piece starts. `stop.file` is beyond `start.file` at the end of a file."""
    raw: Any
    """For the source's own `parse`, which may run in another process."""
    num_bytes: int
    """How much input this is, for progress, in bytes of its file."""
    disk_bytes: int = 0
    """Of a piece that was unpacked (unpack.py): what it takes until it is parsed."""


class Source(Protocol):
    """Rows of one or more files.

    A piece never reaches over the end of a file, so that every block belongs to one file; the
    engine needs this to know where the last day starts.
    """

    schema: Schema
    files: list[Path]
    bad_rows: BadRows
    """What to do with rows that break the rules of the format."""

    def settings(self) -> Mapping[str, Any]:
        """What decides the bytes of the result, for prepare.json: recognised on the next run."""

    def inputs(self) -> Mapping[str, Any] | None:
        """How its columns are read, for vocabulary.json; None where the format says it."""

    def bytes_per_row(self) -> float:
        """Roughly, of the files as they are: for the disk estimate."""

    def pieces(self, start: Position, piece_bytes: int, room: "Room") -> Generator[Piece]:
        """The pieces from `start` on, in order. May block on input that has to be unpacked."""

    def parse(self, piece: Piece) -> ParsedRows:
        """Read and parse a piece. Called in several processes."""


@dataclass(frozen=True)
class Room:
    """For input that can only be read from its start on (unpack.py)."""

    folder: Path
    """Which is empty, or yet to be made."""
    threads: int
    """How many files are unpacked, and pieces parsed, at a time."""
    memory: int = 1 << 62
    """Bytes that those who unpack may take together."""


def stop_at(bad: BadRow) -> NoReturn:
    """Raise a bad row."""
    raise InputError(
        f"{bad}. With --bad-rows skip such lines are left out and listed; with --bad-rows keep "
        "bad fields count as missing (of lists that are too long, the last values) where the rest "
        "of the line can be used."
    )


# --- input files


def names_and_sizes(paths: Sequence[Path]) -> list[list[Any]]:
    """What input files are known by on the next run."""
    return [[path.name, path.stat().st_size] for path in paths]


def find_days(patterns: Patterns, bad_rows: BadRows = "stop", flag: str = "--input") -> list[Path]:
    """The files that match, each once, in the order of the numbers in their names."""
    found = [path for pattern in listed(patterns) for path in _matching(pattern, flag)]
    paths = list(dict.fromkeys(found))
    if bad_rows == "stop":
        raise_all(f"{path} is empty." for path in paths if path.stat().st_size == 0)
    return sorted(paths, key=lambda path: (day_order(path.name), day_order(str(path))))


def listed(patterns: Patterns) -> tuple[str, ...]:
    """Callers in Python may give a single one."""
    return (patterns,) if isinstance(patterns, str) else patterns


def _matching(pattern: str, flag: str) -> list[Path]:
    if remote.is_remote(pattern):
        return [path for each in expand_braces(pattern) for path in remote.find(each, flag)]
    if "://" in pattern.removeprefix("file://"):
        raise InputError(
            f"{flag} is {pattern!r}. Besides files of this machine, those at "
            f"{', '.join(remote.SCHEMES)} are read."
        )
    pattern = pattern.removeprefix("file://")
    expanded = [pattern] if Path(pattern).is_file() else expand_braces(pattern)
    for each in expanded:
        if not any(Path(path).is_file() for path in _glob(each)):
            raise no_file_matches(each, flag)
    return [Path(path) for each in expanded for path in _glob(each) if Path(path).is_file()]


def _glob(pattern: str) -> list[str]:
    # A file may have a name that reads as a pattern: day[1].csv
    return [pattern] if Path(pattern).is_file() else glob.glob(pattern)


def expand_braces(pattern: str) -> list[str]:
    """As a shell does it: day_{0,3} and day_{0..3} stand for several patterns."""
    match = re.search(r"\{([^{}]*,[^{}]*|\d+\.\.\d+)\}", pattern)
    if not match:
        return [pattern]
    words = match.group(1).split(",")
    if ".." in match.group(1):
        first, last = map(int, match.group(1).split(".."))
        words = [str(number) for number in range(first, last + 1)]
    before, after = pattern[: match.start()], pattern[match.end() :]
    return [each for word in words for each in expand_braces(before + word + after)]


def day_order(name: str) -> list[tuple[bool, int, str]]:
    """A sort key that puts day_2 before day_10."""
    parts = re.findall(r"\d+|\D+", name)
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in parts]
