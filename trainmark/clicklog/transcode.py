"""CSV or Parquet that a feature specification describes -> `split_binary`.

This is NVIDIA's transcoding: the data are split and numbered already (categorical values are ids, 0
to cardinality - 1; labels 0 or 1; no header in CSV), and only change their form. The rows of a
chunk's files follow one another; the chunks of a mapping lie side by side, so all must have equally
many rows. A cardinality of `auto` becomes the largest id plus one over all mappings; a declared one
is kept, and must suffice. Features get the published names, num_0 ... and cat_0.bin ... Numbers
become float16, or float32 where the specification has that.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
from numpy.typing import NDArray

from trainmark import files
from trainmark.clickdata import feature_spec, spec_rules
from trainmark.clickdata.feature_spec import CHANNELS, Chunk, FeatureSpec
from trainmark.clicklog.engine import split_binary
from trainmark.clicklog.engine.summary import MANIFEST, SCHEMA
from trainmark.clicklog.sources.parquet_files import batches, open_parquet
from trainmark.clicklog.sources.source import names_and_sizes
from trainmark.errors import InputError, raise_all

MAPPINGS = ("train", "test")
BATCH_ROWS = 65_536
Matrix = NDArray[np.float64]
Reader = Callable[[Path, Sequence[str]], Iterator[Matrix]]


def check(spec: FeatureSpec, kind: str, source: Path) -> None:
    """Raise one `InputError` with everything that keeps `spec` from being transcoded."""
    raise_all(f"{source}: {problem}" for problem in _problems(spec, kind))


def _problems(spec: FeatureSpec, kind: str) -> Iterator[str]:
    yield from spec_rules.channel_problems(spec)
    if set(spec.channel_spec) != set(CHANNELS):
        return
    if set(spec.source_spec) != {"train", "test"}:
        found = ", ".join(spec.source_spec) or "none"
        yield f"source_spec should have exactly the mappings train, test; it has {found}."
    for name in spec.categorical:
        cardinality = spec.feature_spec[name].cardinality if name in spec.feature_spec else "auto"
        if cardinality != "auto" and not (isinstance(cardinality, int) and cardinality > 0):
            received = "none" if cardinality is None else repr(cardinality)
            yield f"categorical feature {name!r} needs a cardinality, or auto; it has {received}."
    for mapping, chunks in spec.source_spec.items():
        for number, chunk in enumerate(chunks):
            where = f"source_spec {mapping}, chunk {number}"
            if chunk.type != kind:
                yield f"{where} has type {chunk.type!r}; 'trainmark prepare {kind}' reads {kind}."
            if not chunk.files:
                yield f"{where} has no files."
        used = [name for chunk in chunks for name in chunk.features]
        for name in sorted(set(used) | set(spec.feature_spec)):
            if used.count(name) != 1:
                yield f"source_spec {mapping} holds feature {name!r} {used.count(name)} times."


@dataclass(frozen=True)
class Transcoding:
    """A specification and how to read its files."""

    spec: FeatureSpec
    base: Path
    reader: Reader

    def files(self) -> list[Path]:
        """All files, each once; an `InputError` where one is missing."""
        chunks = [chunk for chunks in self.spec.source_spec.values() for chunk in chunks]
        paths = list(dict.fromkeys(self.base / file for chunk in chunks for file in chunk.files))
        raise_all(f"{path} does not exist." for path in paths if not path.is_file())
        return paths

    def cardinalities(self) -> list[int]:
        """Number of ids of each feature: as declared, or as found."""
        largest = dict.fromkeys(self.spec.categorical, -1)
        for chunks in self.spec.source_spec.values():
            for chunk in chunks:
                self._find_largest(chunk, largest)
        declared = {name: self.spec.feature_spec[name].cardinality for name in largest}
        raise_all(
            f"categorical feature {name!r} has id {largest[name]}, but its cardinality is "
            f"{cardinality}. Correct it, or write cardinality: auto."
            for name, cardinality in declared.items()
            if isinstance(cardinality, int) and largest[name] >= cardinality
        )
        return [
            cardinality if isinstance(cardinality, int) else largest[name] + 1
            for name, cardinality in declared.items()
        ]

    def _find_largest(self, chunk: Chunk, largest: dict[str, int]) -> None:
        wanted = [(i, name) for i, name in enumerate(chunk.features) if name in largest]
        if not wanted:
            return
        for path, row, batch in self._batches(chunk):
            for column, name in wanted:
                ids = batch[:, column]
                wrong = ~((ids >= 0) & (ids == np.floor(ids)) & (ids < 2**31))
                if wrong.any():
                    place = int(np.argmax(wrong))
                    raise InputError(
                        f"{path}: row {row + place + 1} has {ids[place]:g} for {name!r}; an id, "
                        "0 or more, is expected. For values of any kind, describe them with "
                        "--columns instead of a specification."
                    )
                largest[name] = max(largest[name], int(ids.max()))

    def write(self, folder: Path, mapping: str, written: FeatureSpec) -> tuple[int, int]:
        """Write a mapping; returns its rows and clicks."""
        spec, clicks = self.spec, 0
        with split_binary.Writer(folder, mapping, written) as writer:
            for row, columns in self._side_by_side(mapping):
                numbers = [columns[name] for name in spec.numerical]
                labels = self._labels(columns[spec.label], mapping, row)
                matrix = np.stack(numbers, axis=1) if numbers else np.empty((len(labels), 0))
                floats = self._floats(matrix, mapping, row)
                writer.append(labels, floats, [columns[name] for name in spec.categorical])
                clicks += int(labels.sum())
            return writer.rows, clicks

    def _labels(self, labels: Any, mapping: str, row: int) -> NDArray[np.bool_]:
        wrong = (labels != 0) & (labels != 1)
        if wrong.any():
            place = int(np.argmax(wrong))
            raise InputError(
                f"Row {row + place + 1} of {mapping} has label {labels[place]:g}; "
                "0 or 1 is expected."
            )
        return np.asarray(labels == 1)

    @property
    def numerical_dtype(self) -> str:
        """Of the numbers that are written."""
        declared = {self.spec.feature_spec[name].dtype for name in self.spec.numerical}
        return "float32" if "float32" in declared else "float16"

    def _floats(self, numbers: Matrix, mapping: str, row: int) -> NDArray[np.floating]:
        dtype = np.dtype(self.numerical_dtype)
        wrong = ~(np.abs(numbers) <= float(np.finfo(dtype).max))
        if wrong.any():
            place, column = (int(i) for i in np.argwhere(wrong)[0])
            raise InputError(
                f"Row {row + place + 1} of {mapping} has {numbers[place, column]:g} for "
                f"{self.spec.numerical[column]!r}; a number within {dtype} is expected"
                + ("." if dtype == np.float32 else " (dtype: float32 takes larger ones).")
            )
        return numbers.astype(dtype)

    # --- reading

    def _batches(self, chunk: Chunk) -> Iterator[tuple[Path, int, Matrix]]:
        """(file, row in the file, [rows, features]) through all files of a chunk."""
        for file in chunk.files:
            path, row = self.base / file, 0
            for batch in self.reader(path, chunk.features):
                yield path, row, batch
                row += len(batch)

    def _side_by_side(self, mapping: str) -> Iterator[tuple[int, dict[str, Any]]]:
        """(row, columns by feature): equally many rows of every chunk at a time."""
        chunks = self.spec.source_spec[mapping]
        streams = [_Rows(batch for _, _, batch in self._batches(chunk)) for chunk in chunks]
        row = 0
        while True:
            blocks = [stream.take(BATCH_ROWS) for stream in streams]
            lengths = [len(block) for block in blocks]
            if len(set(lengths)) != 1:
                found = "; ".join(
                    f"{', '.join(chunk.files)}: "
                    f"{'' if length < BATCH_ROWS else 'at least '}{row + length:,}"
                    for chunk, length in zip(chunks, lengths, strict=True)
                )
                raise InputError(f"The chunks of {mapping} differ in rows: {found}.")
            if lengths[0] == 0:
                return
            yield (
                row,
                {
                    name: block[:, column]
                    for chunk, block in zip(chunks, blocks, strict=True)
                    for column, name in enumerate(chunk.features)
                },
            )
            row += lengths[0]


class _Rows:
    """A stream of matrices, cut anew."""

    def __init__(self, batches: Iterable[Matrix]) -> None:
        self._batches = iter(batches)
        self._rest: list[Matrix] = []

    def take(self, rows: int) -> Matrix:
        """The next `rows` rows, fewer at the end."""
        have = sum(map(len, self._rest))
        while have < rows and (batch := next(self._batches, None)) is not None:
            self._rest.append(batch)
            have += len(batch)
        together = np.concatenate(self._rest) if self._rest else np.empty((0, 1))
        self._rest = [together[rows:]]
        return together[:rows]


def read_csv(path: Path, features: Sequence[str], delimiter: str = ",") -> Iterator[Matrix]:
    """Batches of a CSV file without a header, all columns as numbers."""
    # Whole numbers may be written as 3.0: so does pandas where a file holds floats too.
    kinds = dict.fromkeys(features, pa.float64())
    try:
        with pa.csv.open_csv(
            path,
            pa.csv.ReadOptions(column_names=list(features), block_size=4 << 20),
            pa.csv.ParseOptions(delimiter=delimiter),
            pa.csv.ConvertOptions(column_types=kinds, null_values=[]),
        ) as batches:
            for batch in batches:
                yield np.stack([column.to_numpy() for column in batch.columns], axis=1)
    except pa.ArrowInvalid as error:
        raise InputError(f"{path}: {error}.") from None


def read_parquet(path: Path, features: Sequence[str]) -> Iterator[Matrix]:
    """Batches of a Parquet file, whose columns have the names of the features."""
    with open_parquet(path) as file:
        raise_all(
            f"{path} has no column {name!r}; it has {', '.join(file.schema_arrow.names)}."
            for name in features
            if name not in file.schema_arrow.names
        )
        for batch in batches(file, path, BATCH_ROWS, columns=list(features)):
            columns = [batch.column(name) for name in features]
            if any(column.null_count for column in columns):
                raise InputError(f"{path} has missing values; none are expected.")
            yield np.stack([column.cast(pa.float64()).to_numpy() for column in columns], axis=1)


# --- the whole


READERS = {"csv": read_csv, "parquet": read_parquet}


def prepare(spec_path: Path, output: Path, kind: str, **reading: Any) -> dict[str, Any]:
    """Write the dataset, unless the folder already holds it; returns what prepare.json says."""
    if spec_path.is_dir():
        spec_path = feature_spec.path_of(spec_path)
    spec = feature_spec.read(spec_path)
    check(spec, kind, spec_path)
    job = Transcoding(spec, spec_path.parent, partial(READERS[kind], **reading))
    settings = {
        "spec": feature_spec.plain(spec),
        "input": names_and_sizes(job.files()),
    }
    if files.is_finished(output, MANIFEST, settings):
        print(f"{output} already holds this dataset; nothing to do.")
        return files.read_json(output / MANIFEST)
    cardinalities, numerical = job.cardinalities(), len(spec.numerical)
    written = feature_spec.default_spec(
        cardinalities, numerical, spec.metadata, numerical_dtype=job.numerical_dtype
    )
    with files.building(output) as folder:
        sizes = {mapping: job.write(folder, mapping, written) for mapping in MAPPINGS}
        raise_all(f"{mapping} has no rows." for mapping, (rows, _) in sizes.items() if not rows)
        split_binary.write_specs(folder, written, validation=False)
        manifest = {
            "schema": SCHEMA,
            "settings": settings,
            "rows": {mapping: rows for mapping, (rows, _) in sizes.items()},
            "click_rate": {mapping: clicks / rows for mapping, (rows, clicks) in sizes.items()},
            "cardinalities": cardinalities,
        }
        files.write_json(folder / MANIFEST, manifest)
    return manifest
