"""The work folder of an unfinished preparation: its finished pieces, and a lock."""

import json
import os
import shutil
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import psutil

from trainmark import files
from trainmark.errors import InputError, reason
from trainmark.files import write_atomically

LOCK_SECONDS = 30
"""The processes of a run that was killed have ended by then."""


class Work:
    """A folder beside the output, named after it.

    blocks/, blocks.jsonl     the store, and a record for each of its blocks
    columns.jsonl             a record for each column that is written
    dataset/                  what becomes the output
    """

    def __init__(self, output: Path) -> None:
        self.output, self.folder = files.in_the_making(output, "work")
        self.blocks = self.folder / "blocks"
        self.dataset = self.folder / "dataset"
        self.block_log = Log(self.folder / "blocks.jsonl")
        self.column_log = Log(self.folder / "columns.jsonl")
        self._about = self.folder / "work.json"

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Create the folder and hold its lock. A run without a finished block leaves none."""
        try:
            with self._locked() as lock:
                lock.truncate(0)
                lock.write(str(os.getpid()).encode())
                try:
                    yield
                finally:
                    if not self.block_log.path.exists():
                        shutil.rmtree(self.folder, ignore_errors=True)
        except OSError as error:
            raise InputError(
                f"{error.filename or self.output} cannot be written: {reason(error)}"
            ) from error

    def _locked(self) -> BinaryIO:
        """The lock, which belongs to a run and its processes: after a kill, these hold it until
        they have ended, too, a moment later."""
        path, since = self.folder / "lock", time.monotonic()
        while True:
            try:
                return files.locked(path, f"Another process is preparing {self.output} now.")
            except InputError:
                owner = path.read_text() if path.exists() else ""
                gone = owner.isdigit() and not psutil.pid_exists(int(owner))
                if not gone or time.monotonic() - since > LOCK_SECONDS:
                    raise
                time.sleep(0.05)

    def agree(
        self, settings: Mapping[str, Any], fresh: Mapping[str, Any], inputs: Sequence[Path]
    ) -> dict[str, Any]:
        """Facts about the store: of an earlier run with the same settings and files, or `fresh`."""
        about = files.read_json(self._about)
        now = {str(path): _fingerprint(path) for path in inputs}
        if about:
            if about["settings"].get("store") != settings["store"]:
                raise InputError(
                    f"{self.folder} holds unfinished work of another version of Trainmark. Remove "
                    "that folder to begin again, or finish it with that version."
                )
            then = about.get("inputs", now)
            changed = [path for path in now if then.get(path, now[path]) != now[path]]
            if changed:
                raise InputError(
                    f"{changed[0]} has changed since {self.folder}, which holds unfinished work on "
                    "it, was begun. Remove that folder to begin again."
                )
            difference = files.difference(about["settings"], settings)
            if difference:
                raise InputError(
                    f"{self.folder} holds unfinished work with other settings ({difference}). "
                    f"Run the earlier command again, or remove that folder."
                )
            return dict(about["facts"])
        self.blocks.mkdir(exist_ok=True)
        about = {"settings": settings, "facts": fresh, "inputs": now}
        write_atomically(self._about, json.dumps(about) + "\n")
        return dict(fresh)

    def publish(self) -> None:
        """Turn the dataset into the output, and remove the rest."""
        try:
            # An existing empty folder is replaced; a filled one (another process) makes this fail.
            os.replace(self.dataset, self.output)
        except OSError as error:
            raise InputError(f"{self.output} cannot be written: {error.strerror}.") from None
        self.remove()

    def remove(self) -> None:
        # Several at a time: freeing what a file holds takes as long as writing it does.
        with suppress(OSError), ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            list(pool.map(os.unlink, self.blocks.iterdir()))
        shutil.rmtree(self.folder, ignore_errors=True)


def _fingerprint(path: Path) -> list[int]:
    """What tells a file from another of its name: size, time of change, checksum of samples."""
    found, sum_so_far = path.stat(), 0
    with path.open("rb", buffering=0) as file:
        for place in range(SAMPLES):
            file.seek(place * max(found.st_size - SAMPLE_BYTES, 0) // (SAMPLES - 1))
            sum_so_far = zlib.crc32(file.read(SAMPLE_BYTES), sum_so_far)
    return [found.st_size, found.st_mtime_ns, sum_so_far]


SAMPLES, SAMPLE_BYTES = 32, 4096


class Log:
    """Records of finished pieces of work, a line of JSON each."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, record: Mapping[str, Any]) -> None:
        # One write, so that lines of several threads do not mix.
        with self.path.open("ab", buffering=0) as file:
            file.write(json.dumps(record).encode() + b"\n")

    def read(self) -> list[dict[str, Any]]:
        """All records. A line that a crash cut off is none."""
        if not self.path.exists():
            return []
        lines = self.path.read_bytes().split(b"\n")[:-1]
        return [json.loads(line) for line in lines]

    def keep(self, wanted: Callable[[dict[str, Any]], bool]) -> list[dict[str, Any]]:
        """Drop the records that are not wanted, for good."""
        records = [record for record in self.read() if wanted(record)]
        if self.path.exists():
            write_atomically(self.path, "".join(json.dumps(record) + "\n" for record in records))
        return records
