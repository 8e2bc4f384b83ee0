"""`trainmark prepare criteo`: raw Criteo days -> the dataset that `trainmark train` reads.

The semantics are those of NVIDIA's preparation:

- Categorical values are counted over all days. Those seen at least `frequency_threshold` times get
  the ids 1, 2, ... by falling count (NVIDIA leaves the order of equal counts open; here the smaller
  32-bit number comes first). Missing, rare and unseen values are 0.
- Integers become ln(x + 3) in float16, 0.0 where missing or not above -3.
- All days but the last are the training split, in one random order. The first half of the
  last day (rounded down) is the test split and the rest the validation split, in input order.
- A single file, such as Kaggle's train.txt, counts as seven days: its last seventh is the last day.

Everything passes through memory: parse each file to integer columns, count, map to ids, write.
"""

import glob
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track
from rich.table import Table

from trainmark.clicklog import folder, split_binary, synthetic
from trainmark.clicklog.columns import NUM_CATEGORICAL, NUM_NUMERICAL, Batch, Categorical
from trainmark.clicklog.vocabulary import ValueCounts, Vocabulary
from trainmark.errors import InputError, raise_all

MANIFEST = "prepare.json"
DAYS_IN_SINGLE_FILE = 7


@dataclass(frozen=True, kw_only=True)
class Options:
    """Turn raw click logs in Criteo's format into a dataset for training."""

    input: str
    """Raw files: a pattern such as 'raw/day_*' (in quotes), or one file. Days in number order."""
    output: Path
    """Folder to write; it appears when everything is written."""
    frequency_threshold: int = 15
    """Categorical values seen less often share id 0. 0 keeps all (published: 15, 3 and 0)."""
    seed: int = 0
    """Seed of the training rows' random order."""


@dataclass(frozen=True)
class Split:
    """Rows of one split as lists of parsed batches."""

    name: str
    batches: list[Batch]

    @property
    def rows(self) -> int:
        return sum(len(batch) for batch in self.batches)


def prepare(options: Options) -> None:
    """Write the dataset, unless the folder already holds it."""
    if options.frequency_threshold < 0:
        raise InputError(
            f"--frequency-threshold is {options.frequency_threshold}; 0 or more is expected."
        )
    paths = find_days(options.input)
    settings = {
        "input": [[path.name, path.stat().st_size] for path in paths],
        "frequency_threshold": options.frequency_threshold,
        "seed": options.seed,
    }
    if folder.is_finished(options.output, MANIFEST, settings):
        print(f"{options.output} already holds this dataset; nothing to do.")
    else:
        _build(options, paths, settings)
    _show(options.output, folder.read_json(options.output / MANIFEST))


def find_days(pattern: str) -> list[Path]:
    """The files that match, in the order of the numbers in their names."""
    paths = [Path(path) for path in glob.glob(pattern) if Path(path).is_file()]
    if not paths:
        raise InputError(f"No file matches --input {pattern!r}.")
    raise_all(f"{path} is empty." for path in paths if path.stat().st_size == 0)
    return sorted(paths, key=day_order)


def day_order(path: Path) -> list[tuple[bool, int, str]]:
    """A sort key that puts day_2 before day_10."""
    parts = re.findall(r"\d+|\D+", path.name)
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in parts]


def _build(options: Options, paths: list[Path], settings: dict[str, Any]) -> None:
    from trainmark.clicklog.criteo_text import parse  # pyarrow, which `--help` need not wait for

    started = time.perf_counter()
    metadata = _best_auc(paths[0].parent)
    days = [parse(path) for path in _progress(paths, "Reading days")]
    splits = _split(days)
    vocabularies = _count(days, options.frequency_threshold)
    cardinalities = [vocabulary.cardinality for vocabulary in vocabularies]
    order = np.random.default_rng(options.seed).permutation(splits[0].rows)
    with folder.building(options.output) as partial:
        for split in splits:
            with split_binary.Writer(partial, split.name, cardinalities, NUM_NUMERICAL) as writer:
                _write(split, vocabularies, writer, order if split.name == "train" else None)
        split_binary.write_specs(partial, cardinalities, NUM_NUMERICAL, metadata)
        folder.write_json(
            partial / MANIFEST,
            {
                "schema": "trainmark.prepare/1",
                "settings": settings,
                "rows": {split.name: split.rows for split in splits},
                "click_rate": {split.name: _click_rate(split) for split in splits},
                "cardinalities": cardinalities,
                "seconds": round(time.perf_counter() - started, 3),
                **metadata,
            },
        )


def _best_auc(raw_folder: Path) -> dict[str, Any]:
    """The best possible AUC, where the log was generated and it is known."""
    known = folder.read_json(raw_folder / synthetic.MANIFEST).get("best_auc")
    return {} if known is None else {"best_auc": known}


def _split(days: list[list[Batch]]) -> list[Split]:
    """Train, test and validation."""
    *earlier, last = days if len(days) > 1 else _seven_days(days[0])
    train = [batch for day in earlier for batch in day]
    rows = sum(map(len, last))
    if not train or rows < 2:
        raise InputError(
            f"The input has {sum(map(len, train))} rows to train on and {rows} in its last day; "
            "at least 1 and 2 are needed."
        )
    test, validation = _cut(last, rows // 2)
    return [Split("train", train), Split("test", test), Split("validation", validation)]


def _seven_days(batches: list[Batch]) -> tuple[list[Batch], list[Batch]]:
    """A single file as its first six sevenths and its last one."""
    rows = sum(map(len, batches))
    return _cut(batches, rows - rows // DAYS_IN_SINGLE_FILE)


def _cut(batches: list[Batch], rows: int) -> tuple[list[Batch], list[Batch]]:
    """The first `rows` rows and the rest."""
    head, tail = [], []
    for batch in batches:
        first, second = batch[: max(rows, 0)], batch[max(rows, 0) :]
        head += [first] if len(first) else []
        tail += [second] if len(second) else []
        rows -= len(batch)
    return head, tail


def _count(days: list[list[Batch]], frequency_threshold: int) -> list[Vocabulary]:
    """The vocabulary of every categorical column, over all days, the last one included."""
    counts = [ValueCounts() for _ in range(NUM_CATEGORICAL)]
    for day in days:
        for batch in day:
            for column, total in zip(batch.categorical, counts, strict=True):
                total.add(column.values, column.counts())
    return [Vocabulary.of(total, frequency_threshold) for total in counts]


def _write(
    split: Split,
    vocabularies: list[Vocabulary],
    writer: split_binary.Writer,
    order: NDArray[np.int64] | None,
) -> None:
    """Map values to ids and write the rows, in `order` if given."""

    def arranged(parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
        column = np.concatenate(parts)
        return column if order is None else column[order]

    def ids() -> Iterator[NDArray[np.int32]]:
        numbered = list(enumerate(vocabularies))
        for number, vocabulary in _progress(numbered, f"Writing {split.name}"):
            yield arranged([_ids(b.categorical[number], vocabulary) for b in split.batches])

    writer.append(
        arranged([batch.labels for batch in split.batches]),
        arranged([batch.numerical for batch in split.batches]),
        ids(),
    )


def _ids(column: Categorical, vocabulary: Vocabulary) -> NDArray[np.int32]:
    # One entry more at the end for code -1, the missing value.
    id_of_code = np.append(vocabulary.lookup(column.values), np.int32(0))
    return id_of_code[column.codes]


def _click_rate(split: Split) -> float:
    return sum(int(batch.labels.sum()) for batch in split.batches) / split.rows


def _progress(items: Sequence[Any], description: str) -> Iterator[Any]:
    yield from track(items, description, console=Console(stderr=True))


def _show(output: Path, manifest: dict[str, Any]) -> None:
    table = Table("split", "rows", "click rate", title=str(output))
    for name, rows in manifest["rows"].items():
        table.add_row(name, f"{rows:,}", f"{manifest['click_rate'][name]:.4f}")
    console = Console()
    console.print(table)
    cardinalities = manifest["cardinalities"]
    console.print(f"{len(cardinalities)} tables, {sum(cardinalities):,} rows together")
    if "best_auc" in manifest:
        console.print(f"best possible AUC on the last day: {manifest['best_auc']:.4f}")
