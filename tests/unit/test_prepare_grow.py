"""`prepare --vocabulary OLD --grow`: old ids stay, new values get ids behind them."""

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests.unit.criteo_oracle import random_lines, write_day
from tests.unit.test_prepare_engine import ROOMY, TIGHT, files
from tests.unit.test_prepare_engine import prepare as prepare_criteo
from tests.unit.test_prepare_npy import read
from trainmark.clickdata import feature_spec, identity
from trainmark.clicklog import csv_data
from trainmark.clicklog.engine import vocabulary_files
from trainmark.errors import InputError

COLUMNS = "label=clicked numerical=one categorical=user:int64,city,score:float64"
Row = tuple[int, int | str, str, float | str]


def random_rows(seed: int, first: int) -> list[Row]:
    """Values of a window that moves with `first`, so that weeks have some in common."""
    rng = random.Random(seed)

    def word(number: int) -> str:
        return f"{'zäa日'[number % 4]}{number}"

    rows: list[Row] = []
    for _ in range(600):
        a, b, c = (first + int(rng.paretovariate(1.1)) % 40 for _ in range(3))
        missing = rng.random() < 0.05
        rows.append((rng.randrange(2), "" if missing else a - 20, word(b), (c - 20) / 4))
    return rows


def prepare(folder: Path, rows: list[Row], **options: Any) -> Path:
    lines = [
        ",".join(map(str, row))
        for row in [("clicked", "user", "city", "score", "one"), *((*row, 1) for row in rows)]
    ]
    log = folder.with_suffix(".csv")
    log.write_text("\n".join(lines) + "\n")
    options = {"vocabulary_from": "all"} | options
    csv_data.prepare(csv_data.Options(input=str(log), output=folder, **options))
    return folder


def ids_of(data: Path, column: int) -> dict[Any, int]:
    table = pq.read_table(data / "vocabulary" / f"cat_{column}.parquet").to_pydict()
    values = table["value"]
    known = values[1:] if values[0] is None else values
    assert known == sorted(known, key=lambda v: v.encode() if isinstance(v, str) else v)
    return dict(zip(values, table["id"], strict=True))


def grown_by_hand(old: dict[Any, int], values: list[Any], threshold: int) -> dict[Any, int]:
    counts = Counter(value for value in values if value != "" and value not in old)
    new = [value for value in counts if counts[value] >= threshold]
    new.sort(key=lambda v: (-counts[v], v.encode() if isinstance(v, str) else v))
    if "" in values and None not in old:
        new.append(None)  # a missing value is one too, behind all others
    return old | {value: 1 + len(old) + rank for rank, value in enumerate(new)}


@pytest.mark.parametrize(("batch_rows", "users"), [(7, "int64"), (1 << 16, "uint64")])
def test_new_values_get_ids_behind_the_old_ones(
    batch_rows: int, users: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(vocabulary_files, "BATCH_ROWS", batch_rows)
    weeks = [random_rows(seed, first=10 * seed) for seed in range(3)]
    if users == "uint64":  # some of these are too large for an int64
        weeks = [[(y, u and 2**63 + int(u), c, s) for y, u, c, s in week] for week in weeks]
    columns = COLUMNS.replace("int64", users)
    data = prepare(tmp_path / "week0", weeks[0], columns=columns, frequency_threshold="2,city=3")
    for week in (1, 2):
        old, data = data, tmp_path / f"week{week}"
        capsys.readouterr()
        prepare(data, weeks[week], vocabulary=old, grow=True)
        told = capsys.readouterr().out
        facts = json.loads((data / "prepare.json").read_text())["features"]
        spec = feature_spec.read(data)
        test_rows = weeks[week][600 - 85 : 600 - 43]
        for column, (name, threshold) in enumerate([("user", 2), ("city", 3), ("score", 2)]):
            before = ids_of(old, column)
            values = [row[1 + column] for row in weeks[week]]
            expected = grown_by_hand(before, values, threshold)
            assert ids_of(data, column) == expected
            assert facts[name]["new_ids"] == len(expected) - len(before) > 0
            assert f"{name} {len(expected) - len(before)}" in told
            assert spec.cardinalities[column] == len(expected) + 1
            found = read(data, "test")["ids"][column].tolist()
            asked = [None if row[1 + column] == "" else row[1 + column] for row in test_rows]
            assert found == [expected.get(value, 0) for value in asked]
    # The third week extends both; rows of any of them are refused to a model of another.
    for old in (tmp_path / "week0", tmp_path / "week1"):
        lines = identity.of_dataset(old)
        assert identity.no_extension(lines, data) is None
        assert identity.difference(lines, identity.of_dataset(data)) is not None
        with pytest.raises(InputError, match="extends what the model was trained on"):
            identity.check(lines, data, None)
    assert identity.no_extension(identity.of_dataset(data), tmp_path / "week0") is not None
    # Other rows by the grown vocabulary are the grown dataset, with its history.
    again = prepare(tmp_path / "again", weeks[0], vocabulary=data)
    assert identity.of_dataset(again) == identity.of_dataset(data)
    assert identity.no_extension(identity.of_dataset(tmp_path / "week0"), again) is None


def test_nothing_new(tmp_path: Path) -> None:
    rows = random_rows(0, 0)
    old = prepare(tmp_path / "old", rows, columns=COLUMNS, frequency_threshold="0")
    same = prepare(tmp_path / "same", rows[::-1], vocabulary=old, grow=True)
    assert identity.of_dataset(same) == identity.of_dataset(old)
    assert "extends" not in (same / "vocabulary" / "vocabulary.json").read_text()


def test_caps_hold(tmp_path: Path) -> None:
    old = prepare(
        tmp_path / "old", random_rows(0, 0), columns=COLUMNS, frequency_threshold="0", max_rows="30"
    )
    grown = prepare(tmp_path / "grown", random_rows(1, 30), vocabulary=old, grow=True)
    assert feature_spec.read(grown).cardinalities == (30, 30, 30)
    for column in range(3):
        before, after = ids_of(old, column), ids_of(grown, column)
        assert {value: after[value] for value in before} == before
        new = [after[value] for value in after if value not in before]
        assert sorted(new) == sorted((1 + len(before) + k) % 30 for k in range(len(new)))
    assert identity.no_extension(identity.of_dataset(old), grown) is None


@pytest.mark.parametrize("recipe", ["nvidia", "torchrec", "dlrm"])
def test_memory_does_not_matter(recipe: Any, tmp_path: Path) -> None:
    for day in range(2):
        write_day(tmp_path / f"day_{day}", random_lines(random.Random(day), 400))
    rules: dict[str, Any] = {"recipe": recipe, "frequency_threshold": "0"}
    old = prepare_criteo(tmp_path / "day_0", tmp_path / "old", **rules)
    flags: dict[str, Any] = {"vocabulary": old, "grow": True}
    roomy = prepare_criteo(tmp_path / "day_1", tmp_path / "roomy", ROOMY, **flags)
    tight = prepare_criteo(tmp_path / "day_1", tmp_path / "tight", TIGHT, **flags)
    assert files(tight) == files(roomy)
    lines = identity.of_dataset(old)
    assert identity.no_extension(lines, roomy) is None
    assert identity.of_dataset(roomy) != lines
    first_new = {"nvidia": 1, "torchrec": 2, "dlrm": 0}[recipe]
    for column in range(26):
        before, after = ids_of(old, column), ids_of(roomy, column)
        assert {value: after[value] for value in before} == before
        assert sorted(after.values()) == list(range(first_new, first_new + len(after)))


def test_grow_needs_a_vocabulary(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--grow needs --vocabulary"):
        prepare(tmp_path / "data", random_rows(0, 0), columns=COLUMNS, grow=True)
