"""The parts of an unfinished `trainmark predict`, and the file that is made of them.

.NAME.partial, a folder beside the output, is there until the output is whole:

    about.json            what is scored, and by which model
    parts/000000.parquet  rows that are done, in order
    data/                 raw files as a dataset, where the model reads one
    lock                  held by the process that scores
"""

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from trainmark import checksums, files
from trainmark.errors import InputError
from trainmark.progress import say

SUFFIXES = (".parquet", ".csv")


class Parts:
    """Finished parts in a folder.

    Args:
        folder: see above.
        output: what they become.
    """

    def __init__(self, folder: Path, output: Path) -> None:
        self.folder, self._output = folder, output
        self._parts = folder / "parts"
        self._parts.mkdir(exist_ok=True)
        self.paths = sorted(self._parts.glob("*.parquet"))
        self.rows = sum(pq.read_metadata(path).num_rows for path in self.paths)

    def add(self, columns: Mapping[str, Any]) -> None:
        """The next one, whole or not at all."""
        table = pa.table(dict(columns))
        for column in table.schema:
            if self._output.suffix == ".csv" and pa.types.is_nested(column.type):
                raise InputError(
                    f"--keep {column.name}: it holds {column.type}, which CSV has no form for. "
                    "Give an --output that ends in .parquet."
                )
        path = self._parts / f"{len(self.paths):06d}.parquet"
        with files.replacing(path) as temporary:
            pq.write_table(table, temporary)
        self.paths.append(path)
        self.rows += table.num_rows

    def join(self) -> None:
        """Write them all to the output, one at a time; it appears whole or not at all."""
        schema = pq.read_schema(self.paths[0])
        with files.replacing(self._output) as temporary, open(temporary, "xb") as file:
            make = pa.csv.CSVWriter if self._output.suffix == ".csv" else pq.ParquetWriter
            with make(file, schema) as writer:
                for path in self.paths:
                    writer.write_table(pq.read_table(path))
            file.flush()
            os.fsync(file.fileno())


@contextmanager
def unfinished(output: Path, about: Mapping[str, Any]) -> Iterator[Parts]:
    """What is done of an output, to go on with; nothing, if that was about something else.

    The folder is removed at the end, and after a failure before anything was done.
    """
    target = Path(os.path.realpath(output))  # of a link, what it names
    folder = target.with_name(f".{target.name}.partial")
    with files.locked(folder / "lock", f"Another process is writing {output} now."):
        before = files.read_json(folder / "about.json")
        before.pop("checksum", None)
        difference = files.difference(before, about)
        if before and difference:
            say(f"What was done of {output} was something else ({difference}): it begins again.")
            for name in ("parts", "data", ".data.work"):
                shutil.rmtree(folder / name, ignore_errors=True)
        files.write_atomically(folder / "about.json", checksums.dumps(about))
        parts = Parts(folder, output)
        if parts.rows:
            say(f"{parts.rows:,} rows of {output} are done already.")
        try:
            yield parts
        except BaseException:
            if not parts.rows and not any(folder.glob("*data*")):
                shutil.rmtree(folder, ignore_errors=True)
            raise
        shutil.rmtree(folder)


def check_output(output: Path, inputs: list[Path]) -> None:
    """Refuse, before any work, what no scores can be written to."""
    expected = "expected a file to write, .parquet or .csv"
    if output.is_dir():
        raise InputError(f"--output {output} is a folder; {expected}.")
    if output.exists() and not output.is_file():
        raise InputError(f"--output {output} is a device or a pipe; {expected}.")
    if output.suffix not in SUFFIXES:
        raise InputError(f"--output {output}: {expected}.")
    if any(output.exists() and path.exists() and output.samefile(path) for path in inputs):
        raise InputError(f"--output {output} is one of the files to score. Give another.")
