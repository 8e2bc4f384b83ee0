"""Which dataset a model belongs to: its columns, in order, and what their ids stand for.

Two datasets of equal table sizes may give one id to different values. A model that learned one of
them scores the other without an error, and wrongly. So a run keeps a line for each column:

    numerical log - - price
    categorical int64 57 8f3c21aa90b1c4de user

These are the kind, how the column was read (the transform of a number, the type of a value), the
rows of its table, a digest of its vocabulary (of a number: of what its transform was fitted to),
and its name; a hyphen stands for what is not known (NVIDIA's datasets have no vocabularies), and
only what two datasets both know is compared. Rows, dates and paths are no part of it: other days
that were prepared with `--vocabulary` are equal.

A dataset that was prepared with `--vocabulary OLD --grow` *extends* OLD: every id of OLD stands for
the same value, and new values have ids behind them. vocabulary.json says so, column by column:

    "extends": [{"digest": "8f3c21aa90b1c4de", "rows": 57}, ...]      the vocabularies before it

A model of OLD may learn on from it (`train --from`), with larger tables; nothing else takes one for
the other. Nor does a model of the larger dataset score OLD: there, values that have ids by now may
still be rare.
"""

import hashlib
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trainmark.clickdata import feature_spec, spec_rules, vocabulary_file
from trainmark.errors import InputError
from trainmark.files import read_json

VOCABULARIES = "vocabulary"
DIGITS = 16  # of a digest: 64 bits
UNKNOWN = "-"
# The published names tell a column's place and nothing else.
NUMBERED = re.compile(r"num_\d+|cat_\d+\.bin")
# A reading may end with a blank or a tab between the values of a list: string[20 ].
_LINE = re.compile(r"(\S+) (\S+(?:\s\])?) (\S+) (\S+) (.*)", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class Column:
    """What is known of a column that a model learns from."""

    kind: str
    name: str
    reading: str | None = None
    """The transform of a number, the type of a categorical value."""
    rows: int | None = None
    """Rows of the column's table."""
    vocabulary: str | None = None
    """Digest of its values and their ids; of a number, of what its transform was fitted to."""
    extends: tuple[tuple[str, int], ...] = ()
    """Digests and table rows of the vocabularies that it has grown from; no part of its line."""

    def line(self) -> str:
        known = (self.reading, self.rows, self.vocabulary)
        return " ".join([self.kind, *(str(x or UNKNOWN) for x in known), self.name])


def of_dataset(folder: Path) -> tuple[str, ...]:
    """The lines of a dataset's columns."""
    return tuple(column.line() for column in _columns(folder))


def difference(lines: Sequence[str], others: Sequence[str]) -> str | None:
    """How the first column that differs between `lines` and `others` differs, in words.

    None if all agree; also if either is empty, of data that nobody has recorded.
    """
    if not lines or not others:
        return None
    for column, other in itertools.zip_longest(columns(lines), columns(others)):
        if other is None:
            return f"it has no {column.kind} column {column.name!r}"
        if column is None:
            return f"it has a {other.kind} column {other.name!r} more"
        if how := _how(column, other):
            return how
    return None


def no_extension(lines: Sequence[str], folder: Path) -> str | None:
    """Why the dataset in `folder` does not extend that of `lines`, in words: the first column that
    has neither stayed the same nor grown. None if it does extend it, or if `lines` are not known.
    """
    if not lines:
        return None
    found = list(_columns(folder))
    as_before = [
        grown.line() if column is None else _before(column, grown).line()
        for column, grown in itertools.zip_longest(map(_parse, lines[: len(found)]), found)
    ]
    return difference(lines, as_before)


def extends(lines: Sequence[str], folder: Path) -> bool:
    """Whether the dataset in `folder` is known to be that of `lines`, or to extend it."""
    return bool(lines) and folder.is_dir() and no_extension(lines, folder) is None


def _before(column: Column, grown: Column) -> Column:
    """A grown column as it was when it was `column`; itself, if it never was."""
    if (column.vocabulary, column.rows) not in grown.extends:
        return grown
    return replace(grown, vocabulary=column.vocabulary, rows=column.rows)


def check(lines: Sequence[str], data: Path, trained_on: str | None) -> None:
    """Refuse a dataset other than the one that a model was trained on.

    Args:
        lines: of the one that it was trained on.
        data: the folder of the one that it is given.
        trained_on: the folder of the first, if it is known.
    """
    if not lines or not data.is_dir():
        return
    how = difference(lines, of_dataset(data))
    if how is None:
        return
    if trained_on and data.resolve() == Path(trained_on).resolve():
        raise InputError(
            f"{data} has changed since the model was trained on it: {how}. Prepare it again as "
            "it was, or train a new run."
        )
    if no_extension(lines, data) is None:
        raise InputError(
            f"{data} extends what the model was trained on: {how}. `train --from` lets the model "
            "learn on from it. To use the model as it is, prepare these rows with "
            f"--vocabulary {trained_on or 'and the dataset that it is of'}, without --grow."
        )
    raise InputError(
        f"{data} is not what the model was trained on: {how}. {_remedy(lines, trained_on)}"
    )


def _remedy(lines: Sequence[str], trained_on: str | None) -> str:
    if not any(_parse(line).vocabulary for line in lines):  # there is none to prepare rows with
        return f"Give {trained_on or 'the dataset that it was trained on'}, or one of its columns."
    return (
        f"Prepare these rows with --vocabulary {trained_on or 'and the dataset that it is of'}, "
        "so that ids stand for the values that it learned, or give that dataset."
    )


# --- what columns there are

PARTS = ("hour", "weekday", "missing", "bin")
"""What is made of a column, as `NAME.PART`."""


def columns(lines: Sequence[str]) -> list[Column]:
    """What lines tell."""
    return list(map(_parse, lines))


def source(column: Column, others: Sequence[Column]) -> str:
    """The name of the column of the log that a column was made of."""
    name, _, part = column.name.rpartition(".")
    made_of_it = column.reading in ("timestamp", "bins") or any(o.name == name for o in others)
    return name if part in PARTS and made_of_it else column.name


# --- comparing


def _parse(line: str) -> Column:
    found = _LINE.fullmatch(line)
    try:
        kind, reading, rows, vocabulary, name = found.groups() if found else ()
        return Column(
            kind=kind,
            name=name,
            reading=None if reading == UNKNOWN else reading,
            rows=None if rows == UNKNOWN else int(rows),
            vocabulary=None if vocabulary == UNKNOWN else vocabulary,
        )
    except ValueError:
        raise InputError(
            f"{line!r} does not describe a column; expected its kind, reading, table rows, "
            "vocabulary and name. The configuration that it is from is damaged."
        ) from None


def _how(column: Column, other: Column) -> str | None:
    """How `other` differs, in words; None if it does not."""
    named = not (NUMBERED.fullmatch(column.name) or NUMBERED.fullmatch(other.name))
    if column.kind != other.kind or (named and column.name != other.name):
        return (
            f"it has the {other.kind} column {other.name!r} where the model has the {column.kind} "
            f"column {column.name!r}"
        )
    subject = f"its {column.kind} column {(other if named else column).name!r}"
    if _differ(column.reading, other.reading):
        return f"{subject} was read as {other.reading}, not as {column.reading}"
    if _differ(column.vocabulary, other.vocabulary):
        numerical = column.kind == "numerical"
        return f"{subject} " + (
            "was fitted to other numbers" if numerical else "has another vocabulary"
        )
    if _differ(column.rows, other.rows):
        return f"{subject} has {other.rows:,} ids, not {column.rows:,}"
    return None


def _differ(a: object, b: object) -> bool:
    return a is not None and b is not None and a != b


# --- reading


def _columns(folder: Path) -> Iterator[Column]:
    spec = feature_spec.read(folder)
    spec_rules.check(spec, source=str(feature_spec.path_of(folder)))
    facts = vocabulary_file.read(folder / VOCABULARIES)
    rules = facts.get("columns", {})
    inputs = facts.get("inputs", {}).get("columns", [])
    recipe = read_json(folder / "prepare.json").get("settings", {}).get("recipe")
    yield from _numerical(spec.numerical, inputs, recipe)
    readings = categorical_readings(inputs)
    ours = len(rules) == len(spec.categorical)  # else the vocabularies are of other data
    names = list(rules) if ours else list(spec.categorical)
    for name, rows in zip(names, spec.cardinalities, strict=True):
        yield Column(
            kind="categorical",
            name=name,
            reading=readings.get(name),
            rows=rows,
            vocabulary=rules[name]["digest"] if ours else None,
            extends=_extends(rules[name]) if ours else (),
        )


def _extends(rule: Mapping[str, Any]) -> tuple[tuple[str, int], ...]:
    return tuple((str(old["digest"]), int(old["rows"])) for old in rule.get("extends", ()))


def _numerical(
    names: Sequence[str], inputs: Sequence[Mapping[str, Any]], recipe: str | None
) -> Iterator[Column]:
    """Numbers under their own names where `prepare csv` or `parquet` recorded them; those of
    Criteo's logs are transformed as the recipe says."""
    read = [
        column for use in inputs if use["role"] == "numerical" for column in _number_features(use)
    ]
    if len(read) == len(names):
        yield from read
    else:
        yield from (Column(kind="numerical", name=name, reading=recipe) for name in names)


def _number_features(use: Mapping[str, Any]) -> Iterator[Column]:
    """The numerical features of a column: its number and its indicator, as far as it has them."""
    for reading in use["reading"].split("+"):
        if reading == "missing":
            yield Column(kind="numerical", name=f"{use['column']}.missing", reading=reading)
        elif reading != "bins":
            fitted = _digest_of_parameters(use.get("parameters"))
            yield Column(kind="numerical", name=use["column"], reading=reading, vocabulary=fitted)


def _digest_of_parameters(parameters: Mapping[str, Any] | None) -> str | None:
    """Digest of what a transform was fitted to."""
    if not parameters:
        return None
    text = json.dumps(parameters, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:DIGITS]


def categorical_readings(inputs: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """How each column was read. A timestamp's parts do not depend on how it was written."""
    readings = {}
    for use in inputs:
        if use["role"] == "categorical":
            readings[use["column"]] = use["reading"]
        elif use["role"] == "timestamp":
            readings |= {f"{use['column']}.{part}": "timestamp" for part in ("hour", "weekday")}
        elif "bins" in use["reading"].split("+"):
            readings[f"{use['column']}.bin"] = "bins"
    return readings


# --- vocabularies


def digest(path: Path) -> str:
    """Digest of a vocabulary's values and their ids, however its file is laid out.

    Counts are left out: they say how often a value occurred, not what its id stands for.
    """
    import pyarrow.parquet as pq

    values, lengths, ids = hashlib.sha256(), hashlib.sha256(), hashlib.sha256()
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(columns=["value", "id"], use_threads=False):
                _add_values(batch.column("value"), values, lengths)
                ids.update(_bytes_of(batch.column("id")))
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"{path} cannot be read as a vocabulary: {error}.") from None
    whole = hashlib.sha256(values.digest() + lengths.digest() + ids.digest())
    return whole.hexdigest()[:DIGITS]


def _add_values(column: Any, values: Any, lengths: Any) -> None:
    """Numbers by their bytes; texts by theirs, one after the other, and by how many each has.

    A missing value, the first of all, adds a length that no text has.
    """
    import numpy as np
    import pyarrow as pa

    if column.null_count:
        lengths.update(np.array([-1]))
        column = column.slice(1)

    if not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
        values.update(_bytes_of(column))
        return
    texts = column.cast(pa.large_binary())
    _, offsets, data = texts.buffers()
    ends = np.frombuffer(offsets, np.int64)[texts.offset : texts.offset + len(texts) + 1]
    lengths.update(np.diff(ends))
    if data is not None:
        values.update(memoryview(data)[ends[0] : ends[-1]])


def _bytes_of(numbers: Any) -> memoryview:
    """The bytes of an Arrow array of numbers without nulls; `to_numpy` would load pandas."""
    _, data = numbers.buffers()
    width = numbers.type.bit_width // 8
    start = numbers.offset * width
    return memoryview(data or b"")[start : start + len(numbers) * width]
