"""Whether bytes are as they were written: checksums of files, of folders and of JSON.

A folder that was made whole has a `checksums.json`; whoever reads its files first checks them, and
`trainmark verify` checks them all. JSON that has to be told from an edited one carries its own
checksum under one more key. What earlier versions or other software wrote has neither, and passes.
"""

import json
import zlib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from trainmark.errors import InputError, raise_all

FILE_NAME = "checksums.json"
SCHEMA = "trainmark.checksums/1"
KEY, KIND = "checksum", "crc32:"
_READ_BYTES = 1 << 22
_THREADS = 4

# --- a file


class Checksum:
    """The sum of a file's 64-bit words (the last one filled up with zeros), and its size.

    At the speed of memory: enough against files that a crash left short, torn or zeroed, and any
    byte that has changed.

    Args:
        place: of the first byte in its file, if it is a part of one (`joined`).
    """

    def __init__(self, place: int = 0) -> None:
        self.size = 0
        self._sum = 0
        self._rest = bytes(place % 8)

    def update(self, data: Any) -> None:
        """Add the bytes of an array or buffer."""
        import numpy as np  # not before it is needed: importing it takes a tenth of a second

        if isinstance(data, np.ndarray):
            data = data.reshape(-1).view(np.uint8)
        data = memoryview(data)
        self.size += len(data)
        if self._rest:
            missing = 8 - len(self._rest)
            self._rest, data = self._rest + bytes(data[:missing]), data[missing:]
            if len(self._rest) < 8:
                return
            self._sum += int.from_bytes(self._rest, "little")
        whole = len(data) // 8 * 8
        self._sum += int(np.frombuffer(data[:whole], "<u8").sum(dtype=np.uint64))
        self._rest = bytes(data[whole:])

    def value(self) -> list[Any]:
        """For a JSON record."""
        total = self._sum + int.from_bytes(self._rest, "little")
        return [self.size, f"{total % 2**64:016x}"]


def joined(parts: Iterable[list[Any]]) -> list[Any]:
    """The checksum of a file from those of its parts."""
    sizes, sums = zip(*parts, strict=True)
    return [sum(sizes), f"{sum(int(one, 16) for one in sums) % 2**64:016x}"]


def matches(path: Path, expected: list[Any]) -> bool:
    """Whether the file is there and has this size and sum."""
    if not path.is_file() or path.stat().st_size != expected[0]:
        return False
    return of_file(path) == expected


def of_file(path: Path) -> list[Any]:
    """For a JSON record."""
    checksum = Checksum()
    with path.open("rb") as file:
        while data := file.read(_READ_BYTES):
            checksum.update(data)
    return checksum.value()


# --- a folder


def seal(
    folder: Path,
    besides: Iterable[str] = (),
    known: Mapping[str, list[Any]] = {},
    made_of: Any = None,
) -> None:
    """Write the checksums of all files in `folder`.

    Args:
        besides: files at its top that are left out.
        known: checksums by name, of files that need not be read again.
        made_of: JSON that tells the folder's content from any other, for `is_made_of`.
    """
    for unfinished in folder.rglob(".*.writing"):  # by a process that was killed
        unfinished.unlink()
    names = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    left = sorted(names - {FILE_NAME, *besides} - known.keys())
    with ThreadPoolExecutor(_THREADS) as pool:
        read = dict(zip(left, pool.map(lambda name: of_file(folder / name), left), strict=True))
    found = {name: value for name, value in known.items() if name in names} | read
    origin = {} if made_of is None else {"made_of": made_of}
    text = dumps({"schema": SCHEMA, **origin, "files": dict(sorted(found.items()))})
    (folder / FILE_NAME).write_text(text, encoding="utf-8")


def is_made_of(folder: Path, made_of: Any) -> bool:
    """Whether a folder was sealed with this content."""
    return bool(_read(folder / FILE_NAME).get("made_of") == made_of)


def check(folder: Path, names: Iterable[str] | None = None, *, listed_in: str = FILE_NAME) -> int:
    """Read files of a sealed folder, or all of them; the bytes that were found to be good.

    Args:
        listed_in: the JSON file in it that has, under "files", their checksums.

    Raises:
        InputError: naming every file that is not as it was written.
    """
    sealed: dict[str, list[Any]] = _read(folder / listed_in).get("files", {})
    wanted = sealed if names is None else {n: sealed[n] for n in names if n in sealed}
    with ThreadPoolExecutor(_THREADS) as pool:
        good = list(pool.map(lambda item: matches(folder / item[0], item[1]), wanted.items()))
    raise_all(
        f"{folder / name} is not as it was written: its checksum differs from the one in "
        f"{listed_in}. Restore it from a copy, or make {folder} again; if it was changed on "
        f"purpose, remove {folder / listed_in}."
        for name, is_good in zip(wanted, good, strict=True)
        if not is_good
    )
    return sum(size for size, _ in wanted.values())


def check_file(path: Path) -> Path:
    """`path`, after it was checked, if it lies in a sealed folder or in one of its folders."""
    for folder in (path.parent, path.parent.parent):
        if (folder / FILE_NAME).is_file():
            check(folder, [str(path.relative_to(folder))])
            break
    return path


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        data = checked(json.loads(path.read_bytes()), path)
        sums = dict(data.get("files", {})).values()
        if all([type(size), type(words)] == [int, str] for size, words in sums):
            return data
    except InputError:
        raise
    except (ValueError, AttributeError, TypeError, RecursionError):
        pass
    raise InputError(f"{path} is damaged. Make {path.parent} again, or restore it from a copy.")


# --- JSON


def dumps(data: Mapping[str, Any]) -> str:
    """JSON with a checksum of its own."""
    plain = json.loads(json.dumps(data))
    return json.dumps(plain | {KEY: _of_json(plain)}, indent=2) + "\n"


def checked(data: dict[str, Any], path: Path) -> dict[str, Any]:
    """What `dumps` was given, as it was parsed from `path`."""
    written = data.get(KEY)
    if not isinstance(written, str) or not written.startswith(KIND):
        return data
    rest = {name: value for name, value in data.items() if name != KEY}
    if _of_json(rest) != written:
        raise InputError(
            f"{path} is not as it was written: its checksum does not match its content. Restore it "
            f"from a copy; if it was changed on purpose, remove its last key, {KEY!r}."
        )
    return rest


def _of_json(data: Mapping[str, Any]) -> str:
    return f"{KIND}{zlib.crc32(json.dumps(data, sort_keys=True).encode()):08x}"
