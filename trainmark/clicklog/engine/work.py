"""The work folder of an unfinished preparation: its finished pieces, and a lock."""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trainmark import files
from trainmark.errors import InputError
from trainmark.files import write_atomically


class Work:
    """A folder beside the output, named after it.

    blocks/, blocks.jsonl     the store, and a record for each of its blocks
    columns.jsonl             a record for each column that is written
    dataset/                  what becomes the output
    """

    def __init__(self, output: Path) -> None:
        self.output = Path(os.path.realpath(output))  # of a link, what it names
        self.folder = self.output.with_name(f".{self.output.name}.work")
        self.blocks = self.folder / "blocks"
        self.dataset = self.folder / "dataset"
        self.block_log = Log(self.folder / "blocks.jsonl")
        self.column_log = Log(self.folder / "columns.jsonl")
        self._about = self.folder / "work.json"

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Create the folder and hold its lock. A run without a finished block leaves none."""
        otherwise = f"Another process is preparing {self.output} now."
        try:
            with files.locked(self.folder / "lock", otherwise):
                try:
                    yield
                finally:
                    if not self.block_log.path.exists():
                        shutil.rmtree(self.folder, ignore_errors=True)
        except OSError as error:
            raise InputError(
                f"{error.filename or self.output} cannot be written: {error.strerror or error}."
            ) from error

    def agree(self, settings: Mapping[str, Any], fresh: Mapping[str, Any]) -> dict[str, Any]:
        """Facts about the store: of an earlier run with the same settings, or `fresh` ones."""
        about = files.read_json(self._about)
        if about:
            difference = files.difference(about["settings"], settings)
            if difference:
                raise InputError(
                    f"{self.folder} holds unfinished work with other settings ({difference}). "
                    f"Run the earlier command again, or remove that folder."
                )
            return dict(about["facts"])
        self.blocks.mkdir(exist_ok=True)
        about = {"settings": settings, "facts": fresh}
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
        shutil.rmtree(self.folder, ignore_errors=True)


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
