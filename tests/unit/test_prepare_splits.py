"""Which rows train, test and validate: by files, by a column, at random, in groups; labels."""

import datetime
import json
import os
import random
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.unit.criteo_oracle import random_lines, write_day
from tests.unit.logs import prepare_log
from tests.unit.test_prepare_engine import ROOMY, TIGHT, failing_at_the_end, files
from tests.unit.test_prepare_engine import prepare as prepare_criteo
from tests.unit.test_prepare_npy import read
from trainmark.clicklog import csv_data
from trainmark.clicklog.arrays import shuffle
from trainmark.clicklog.engine.limits import Limits
from trainmark.clicklog.sources.csv_source import CsvSource
from trainmark.errors import InputError

COLUMNS = "label=clicked numerical=row:plain categorical=user:int64,city"
SPLITS = ("train", "test", "validation")
START = datetime.datetime(2024, 5, 1)


def random_rows(count: int = 500, seed: int = 0) -> list[dict[str, Any]]:
    """Rows in no order of time, some at the same time, some without a user."""
    rng = random.Random(seed)
    return [
        {
            "clicked": int(rng.random() < 0.3),
            "row": row,
            "user": "" if rng.random() < 0.1 else rng.randrange(40) - 20,
            "city": rng.choice("abcdefgh"),
            "seen": START + datetime.timedelta(hours=rng.randrange(count // 3)),
            "day": rng.randrange(7),
        }
        for row in range(count)
    ]


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    lines = [",".join(rows[0]), *(",".join(map(str, row.values())) for row in rows)]
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def prepare(output: Path, limits: Limits = ROOMY, **options: Any) -> Path:
    """As `csv_data.prepare`, with other limits."""
    parsed = csv_data.Options(output=output, **{"columns": COLUMNS} | options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Limits, "of", lambda memory: limits)
        csv_data.prepare(parsed)
    return output


def rows_of(data: Path) -> dict[str, list[int]]:
    """The input rows of each split, in the order of the dataset."""
    there = [split for split in SPLITS if (data / split).is_dir()]
    return {split: read(data, split)["numerical"][:, 0].astype(int).tolist() for split in there}


def assert_whole(data: Path, rows: list[dict[str, Any]]) -> dict[str, list[int]]:
    """Every row is in one split, with its label; held-out rows are in input order."""
    found = rows_of(data)
    assert sorted(chain(*found.values())) == list(range(len(rows)))
    for split, numbers in found.items():
        labels = read(data, split)["labels"].tolist()
        assert labels == [bool(rows[number]["clicked"]) for number in numbers]
    assert found["test"] == sorted(found["test"])
    assert found["train"] != sorted(found["train"])
    return found


# --- files


def test_files_of_each_split(tmp_path: Path) -> None:
    rows = random_rows()
    parts = {"train": rows[:200], "test": rows[200:280], "validation": rows[280:]}
    flags: dict[str, Any] = {
        name: write(tmp_path / f"{name}.csv", part) for name, part in parts.items()
    }
    data = prepare(tmp_path / "data", **flags)
    found = assert_whole(data, rows)
    assert sorted(found["train"]) == list(range(200))
    assert (found["test"], found["validation"]) == ([*range(200, 280)], [*range(280, 500)])
    flags.pop("validation")
    data = prepare(tmp_path / "two", **flags)
    assert {split: len(numbers) for split, numbers in rows_of(data).items()} == {
        "train": 200,
        "test": 80,
    }
    assert not (data / "feature_spec_validation.yaml").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"train": "a.csv"}, "Give --input, whose rows are divided, or --train and --test"),
        ({"train": "a.csv", "test": "b.csv", "input": "c.csv"}, "Give --input, whose"),
        ({"train": "a.csv", "test": "b.csv", "holdout": "0.5"}, "--holdout and --test-half divide"),
        ({"train": "a.csv", "test": "b.csv", "split_by": "seen"}, "--split-by seen divides --inpu"),
        ({"train": "a.csv", "test": "[ab].csv"}, "a.csv is in two of --train, --test"),
        ({"train": "a.csv", "test": "link.csv"}, "link.csv is the same file as a.csv: give one"),
        ({"input": "[al]*.csv"}, "link.csv is the same file as a.csv: give one of them"),
        ({"train": "a.csv", "test": "x.csv"}, "No file matches --test"),
        ({"input": ("a.csv", "empty.csv")}, "0 held out; .*last file are held out; --holdout 0.1"),
        ({"train": "a.csv", "test": "empty.csv"}, "The files of --test have no rows"),
        ({"input": "a.csv", "holdout": "random:2"}, "random:0.1 takes them at random"),
        ({"input": "a.csv", "holdout": "random", "split_by": "seen"}, "Give one of the two"),
        ({"input": "a.csv", "split_by": "city"}, "city is 'a', expected a time.*--split-by city:n"),
        ({"input": "a.csv", "split_by": "sen"}, "Unknown column .* for --split-by 'sen'. Did you"),
        ({"input": "a.csv", "split_by": "day:hex"}, "Unknown way to read day for --split-by"),
        ({"input": "a.csv", "split_by": "one:number"}, "has one value in all rows"),
        ({"input": "a.csv", "group": "one", "holdout": "random:0.3"}, "--group one has one value"),
        ({"input": "a.csv", "group": "two", "holdout": "random:0.3"}, "leaves a single group"),
        ({"input": "a.csv", "negative_rate": 0.0}, "--negative-rate is 0; a share above 0"),
    ],
)
def test_what_cannot_be_divided(
    options: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [row | {"one": 1, "two": i % 2} for i, row in enumerate(random_rows(50))]
    for name in ("a.csv", "b.csv", "c.csv"):
        write(tmp_path / name, rows)
    (tmp_path / "link.csv").symlink_to("a.csv")
    write(tmp_path / "empty.csv", rows[:1])
    (tmp_path / "empty.csv").write_text(",".join(rows[0]) + "\n")
    with pytest.raises(InputError, match=message):
        prepare(tmp_path / "data", **options)
    assert not (tmp_path / "data").exists()


# --- by a column


@pytest.mark.parametrize("split_by", ["seen", "day:number", "row"])
def test_rows_are_ordered_by_a_column(split_by: str, tmp_path: Path) -> None:
    rows = random_rows()
    log = write(tmp_path / "log.csv", rows)
    data = prepare(tmp_path / "data", input=log, split_by=split_by, holdout="0.3")
    found = assert_whole(data, rows)
    values = [row[split_by.split(":")[0]] for row in rows]
    order = sorted(range(len(rows)), key=lambda row: (values[row], row))
    # Between two values, where that is nearest to 30 %.
    cuts = [i for i in range(1, 500) if values[order[i - 1]] != values[order[i]]]
    train = min(cuts, key=lambda cut: (abs(cut - 350), cut))
    middle = train + (500 - train) // 2
    assert set(found["train"]) == set(order[:train])
    assert set(found["test"]) == set(order[train:middle])
    assert set(found["validation"]) == set(order[middle:])


def test_times_of_parquet_files_and_rows_without_one(tmp_path: Path) -> None:
    rows = [row | {"user": None} for row in random_rows()]
    for row in rows[::9]:
        row["seen"] = None
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "log.parquet")
    columns = "label=clicked numerical=row:plain categorical=city timestamp=seen"
    log, data = tmp_path / "log.parquet", tmp_path / "data"
    found = assert_whole(prepare_log(log, data, columns=columns, split_by="seen"), rows)
    assert set(range(0, 500, 9)) <= set(found["train"])
    latest = max(rows[number]["seen"] or START for number in found["train"])
    assert all(rows[n]["seen"] > latest for n in found["test"] + found["validation"])
    assert len(found["train"]) == pytest.approx(500 * 6 / 7, abs=5)


# --- at random


def test_random_splits_depend_on_the_seed(tmp_path: Path) -> None:
    rows = random_rows(1000)
    log = write(tmp_path / "log.csv", rows)
    found = [
        assert_whole(
            prepare(tmp_path / f"seed{seed}", input=log, holdout="random:0.2", seed=seed), rows
        )
        for seed in (1, 2)
    ]
    for split in found:
        assert [len(split[name]) for name in SPLITS] == [800, 100, 100]
        # A fair draw: as many from each fifth of the input, give or take.
        fifths = np.bincount(np.array(split["test"] + split["validation"]) // 200)
        assert fifths.min() > 20
        assert fifths.max() < 60
    shared = set(found[0]["test"] + found[0]["validation"]) & set(found[1]["test"])
    assert 5 < len(shared) < 40


def test_groups_stay_together(tmp_path: Path) -> None:
    rows = random_rows(2000)
    log = write(tmp_path / "log.csv", rows)
    data = prepare(tmp_path / "data", input=log, holdout="random:0.3", group="user")
    found = assert_whole(data, rows)
    users = {split: {rows[n]["user"] for n in found[split]} - {""} for split in SPLITS}
    assert not users["train"] & users["test"]
    assert not users["train"] & users["validation"]
    assert not users["test"] & users["validation"]
    assert set.union(*users.values()) == {row["user"] for row in rows} - {""}
    for split in SPLITS:  # rows without a user are drawn one by one
        assert any(rows[number]["user"] == "" for number in found[split])
    assert len(found["train"]) == pytest.approx(1400, abs=60)
    # Numbers of groups: the same for the same user, everywhere, and 0 for none.
    number_of: dict[Any, set[int]] = {}
    for split in SPLITS:
        groups = np.fromfile(data / split / "group.bin", "<i4")
        assert len(groups) == len(found[split])
        for number, group in zip(found[split], groups.tolist(), strict=True):
            number_of.setdefault(rows[number]["user"], set()).add(group)
    assert all(len(numbers) == 1 for numbers in number_of.values())
    assert number_of.pop("") == {0}
    numbers = sorted(number for (number,) in number_of.values())
    assert numbers == list(range(1, len(number_of) + 1))
    assert json.loads((data / "prepare.json").read_text())["group"] == "user"


def test_groups_of_texts_that_are_no_feature(tmp_path: Path) -> None:
    rows = random_rows(200)
    log = write(tmp_path / "log.csv", rows)
    columns = "label=clicked numerical=row:plain categorical=user"
    data = prepare(tmp_path / "data", input=log, group="city", columns=columns)
    found = assert_whole(data, rows)
    assert found["test"] == list(range(172, 186))  # the last seventh, whatever the groups
    groups = {split: np.fromfile(data / split / "group.bin", "<i4") for split in SPLITS}
    pairs = {
        (rows[n]["city"], group)
        for split in SPLITS
        for n, group in zip(found[split], groups[split].tolist(), strict=True)
    }
    assert len(pairs) == len({city for city, _ in pairs}) == len({group for _, group in pairs})


# --- fewer negatives


@pytest.mark.parametrize("holdout", ["0.3", "random:0.3"])
def test_negatives_of_training_rows_are_thinned_out(holdout: str, tmp_path: Path) -> None:
    rows = random_rows(3000)
    log = write(tmp_path / "log.csv", rows)
    whole = rows_of(prepare(tmp_path / "whole", input=log, holdout=holdout))
    thinned: dict[str, Any] = {"negative_rate": 0.2, "vocabulary_from": "all"}
    data = prepare(tmp_path / "data", input=log, holdout=holdout, max_rows="9", **thinned)
    found = rows_of(data)
    assert (found["test"], found["validation"]) == (whole["test"], whole["validation"])
    clicks = {number for number in whole["train"] if rows[number]["clicked"]}
    assert clicks <= set(found["train"]) <= set(whole["train"])
    others, kept = len(whole["train"]) - len(clicks), len(found["train"]) - len(clicks)
    assert kept / others == pytest.approx(0.2, abs=4 * (0.2 * 0.8 / others) ** 0.5)
    facts = json.loads((data / "prepare.json").read_text())
    assert facts["negative_rate"] == 0.2
    assert facts["rows"] == {name: len(numbers) for name, numbers in found.items()}
    assert facts["click_rate"]["train"] == len(clicks) / len(found["train"])
    # Vocabularies count what is kept, and so do the shares of missing values.
    users = [rows[number]["user"] for numbers in found.values() for number in numbers]
    counts = pq.read_table(data / "vocabulary" / "cat_0.parquet").to_pydict()
    there = dict(zip(counts["value"], counts["count"], strict=True))
    assert there == {user if user != "" else None: users.count(user) for user in set(users)}
    assert facts["features"]["user"]["missing_share"] == users.count("") / len(users)
    # Only what is kept counts for numbers, too.
    log = write(
        tmp_path / "gaps.csv", [r | {"row": "" if r["row"] % 2 else r["row"]} for r in rows]
    )
    gaps = prepare(tmp_path / "gaps", input=log, holdout=holdout, **thinned)
    kept_rows = [number for numbers in found.values() for number in numbers]
    told = json.loads((gaps / "prepare.json").read_text())["numerical"]["row"]
    even = [number for number in kept_rows if number % 2 == 0]
    assert told["missing"] == len(kept_rows) - len(even)
    assert (told["minimum"], told["maximum"]) == (min(even), max(even))


# --- the same bytes


OPTIONS: dict[str, dict[str, Any]] = {
    "time": {"split_by": "seen", "holdout": "0.3", "group": "city"},
    "random": {"holdout": "random:0.3", "negative_rate": 0.5},
    "groups": {"holdout": "random:0.3", "group": "city", "vocabulary_from": "train"},
    "negatives": {"negative_rate": 0.3},
}


@pytest.mark.parametrize("case", OPTIONS)
def test_memory_and_kills_do_not_matter(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shuffle, "BUCKET_ROWS", 64)
    rows = random_rows(900)
    log = write(tmp_path / "log.csv", rows)
    options = {
        "input": log,
        "columns": "label=clicked numerical=row:plain,day categorical=user,city",
    }
    options |= OPTIONS[case]
    first = prepare(tmp_path / "first", ROOMY, **options)
    tight = prepare(tmp_path / "tight", TIGHT, **options)
    assert files(tight) == files(first)
    killed = tmp_path / "killed"
    parse, left = CsvSource.parse, [2]  # in each process

    def stops(source: CsvSource, piece: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return parse(source, piece)

    with monkeypatch.context() as patch:
        patch.setattr(CsvSource, "parse", stops)
        with pytest.raises(KeyboardInterrupt):
            prepare(killed, TIGHT, **options)
    with failing_at_the_end():
        prepare(killed, TIGHT, **options)
    assert (tmp_path / ".killed.work").exists()
    assert files(prepare(killed, ROOMY, **options)) == files(first)
    os.utime(log)


def test_criteo_at_random(tmp_path: Path) -> None:
    for day in range(2):
        write_day(tmp_path / f"day_{day}", random_lines(random.Random(day), 300))
    flags: dict[str, Any] = {"holdout": "random:0.2", "negative_rate": 0.5}
    roomy = prepare_criteo(tmp_path / "day_*", tmp_path / "roomy", ROOMY, **flags)
    tight = prepare_criteo(tmp_path / "day_*", tmp_path / "tight", TIGHT, **flags)
    assert files(tight) == files(roomy)
    rows = json.loads((roomy / "prepare.json").read_text())["rows"]
    assert (rows["test"], rows["validation"]) == (60, 60)
    assert rows["train"] < 480


# --- what is told


def test_a_large_held_out_part_is_warned_about(tmp_path: Path, capsys: Any) -> None:
    log = write(tmp_path / "log.csv", random_rows(100))
    prepare(tmp_path / "data", input=log, holdout="0.6")
    told = " ".join(capsys.readouterr().out.split())
    assert "Warning: 60 rows are held out, more than the 40 to train on." in told
    prepare(tmp_path / "usual", input=log, holdout="0.4", negative_rate=0.25)
    told = capsys.readouterr().out
    assert "rows are held out" not in told
    assert "without a click, 0.25 of all are kept" in told


def test_data_of_a_specification_are_divided_already(tmp_path: Path) -> None:
    flags: dict[str, Any] = {"group": "user", "input": "x.csv", "negative_rate": 0.5}
    for flag, value in flags.items():
        options = csv_data.Options(output=tmp_path / "x", spec=tmp_path / "s", **{flag: value})
        with pytest.raises(InputError, match=f"--{flag.replace('_', '-')} goes without it"):
            csv_data.prepare(options)


# --- labels of two values


def labelled(tmp_path: Path, values: list[str]) -> str:
    rows = random_rows(len(values))
    for row, value in zip(rows, values, strict=True):
        row["clicked"] = value
    return write(tmp_path / "log.csv", rows)


def test_any_two_values(tmp_path: Path) -> None:
    rng = random.Random(0)
    values = [rng.choice([" >50K", "<=50K "]) for _ in range(100)]
    log = labelled(tmp_path, values)
    data = prepare(tmp_path / "data", input=log, positive=">50K")
    for split, numbers in rows_of(data).items():
        expected = [values[number].strip() == ">50K" for number in numbers]
        assert read(data, split)["labels"].tolist() == expected
    # It goes on with the dataset.
    again = prepare(tmp_path / "again", input=log, columns=None, vocabulary=data)
    assert (again / "test" / "label.bin").read_bytes() == (data / "test" / "label.bin").read_bytes()


@pytest.mark.parametrize(
    ("values", "options", "message"),
    [
        (
            ["yes", "no"],
            {},
            "clicked is 'yes', expected 0, 1, true or false .--positive VALUE",
        ),
        (["a", "b", "c"], {"positive": "a"}, "should have one value; it has 'b', 'c'"),
        (["12345678", "12345679", "3"], {"positive": "3.0"}, "it has '12345678', '12345679'"),
        (["yes", "no"], {"positive": "Yes"}, "it has 'no', 'yes'. Is --positive spelled as in"),
        (list("abcdefgh"), {"positive": "a"}, "it has 'b', 'c', 'd', 'e', 'f', ..."),
        (
            ["1", "2"],
            {"positive": "2", "columns": COLUMNS.replace("clicked", "clicked>=2")},
            "--positive is '2', but --columns says when clicked is a click: label=clicked>=2",
        ),
    ],
)
def test_labels_that_are_no_two_values(
    values: list[str], options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    log = labelled(tmp_path, values * (40 // len(values)))
    with pytest.raises(InputError, match=message):
        prepare(tmp_path / "data", input=log, **options)
    assert not list(tmp_path.glob(".*"))


def test_two_numbers_in_parquet(tmp_path: Path) -> None:
    rows = [row | {"clicked": 1.0 + row["clicked"], "user": 1} for row in random_rows(70)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "log.parquet")
    data = tmp_path / "data"
    prepare_log(tmp_path / "log.parquet", data, columns=COLUMNS, positive="2")
    for split, numbers in rows_of(data).items():
        expected = [rows[number]["clicked"] == 2 for number in numbers]
        assert read(data, split)["labels"].tolist() == expected
