"""`prepare csv` and `prepare parquet` with --columns: any types, headers, files, and bad rows."""

import datetime
import gzip
import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from tests.unit.logs import prepare_log
from tests.unit.test_prepare_npy import read
from trainmark import cli
from trainmark.clicklog.engine import summary
from trainmark.clicklog.sources import text_files
from trainmark.clicklog.sources.column_match import AskedColumns
from trainmark.clicklog.sources.column_spec import parse
from trainmark.clicklog.sources.csv_source import CsvSource
from trainmark.errors import InputError
from trainmark.files import read_json

COLUMNS = (
    "label=clicked numerical=age:plain,visits:log "
    "categorical=user:int64,city,score:float64,tag:hex timestamp=seen"
)
Row = dict[str, Any]


def random_rows(count: int, seed: int = 0) -> list[Row]:
    """Rows with missing fields, texts that need quotes, large ids, and ties."""
    rng = random.Random(seed)

    def maybe(value: Any) -> Any:
        return None if rng.random() < 0.1 else value

    start = datetime.datetime(2024, 2, 28, 22)
    return [
        {
            "clicked": rng.randrange(2),
            "unused": "anything",
            "age": maybe(rng.choice([0.0, 1.5, -7.25, 90.0])),
            "visits": maybe(rng.choice([0, 3, -3, 12_000_000])),
            "user": maybe(rng.choice([-(2**63), 2**63 - 1, 0, 7, rng.randrange(30) << 40])),
            "city": maybe(rng.choice(["Zürich", "São, Paulo", 'the "O"', "a", "b", "東京"])),
            "score": maybe(rng.choice([0.5, -0.5, 1e300, 0.0])),
            "tag": maybe(rng.choice(["ff", "00FF", "deadbeef", "0"])),
            "seen": maybe(start + datetime.timedelta(minutes=rng.randrange(5000))),
        }
        for _ in range(count)
    ]


def slow_ids(rows: list[Row], threshold: int = 0) -> list[tuple[int, ...]]:
    """Ids of every row: by falling count, then by rising value, the missing value last; 0 for
    rare."""

    def key(name: str) -> list[Any]:
        if name == "tag":
            return [None if r["tag"] is None else int(r["tag"], 16) for r in rows]
        if name in ("hour", "weekday"):
            return [
                None
                if r["seen"] is None
                else r["seen"].hour
                if name == "hour"
                else r["seen"].weekday()
                for r in rows
            ]
        return [r[name] for r in rows]

    columns = []
    for name in ("user", "city", "score", "tag", "hour", "weekday"):
        values = key(name)
        counts = Counter(value for value in values if value is not None)
        kept = [value for value, count in counts.items() if count >= threshold]
        order = (lambda v: v.encode()) if name == "city" else (lambda v: v)
        ranked = sorted((-counts[value], order(value), value) for value in kept)
        ids = {value: rank for rank, (*_, value) in enumerate(ranked, 1)}
        if values.count(None) >= max(threshold, 1):
            ids[None] = len(ids) + 1
        columns.append([ids.get(value, 0) for value in values])
    return list(zip(*columns, strict=True))


def slow_numbers(rows: list[Row]) -> np.ndarray:
    def log(x: Any) -> float:
        return float(np.log(x + 3)) if x is not None and x > -3 else 0.0

    return np.array([[r["age"] or 0.0, log(r["visits"])] for r in rows]).astype(np.float32)


def write_csv(path: Path, rows: list[Row], header: bool = True, delimiter: str = ",") -> None:
    def field(value: Any) -> str:
        text = "" if value is None else str(value)
        return '"' + text.replace('"', '""') + '"' if delimiter in text or '"' in text else text

    lines = [delimiter.join(rows[0])] if header else []
    lines += [delimiter.join(field(value) for value in row.values()) for row in rows]
    path.write_text("\n".join(lines) + "\n")


def write_parquet(path: Path, rows: list[Row]) -> None:
    pa.parquet.write_table(pa.Table.from_pylist(rows), path, row_group_size=17)


def assert_rows(output: Path, rows: list[Row], threshold: int = 0) -> None:
    """The last seventh is held out; its first half is the test split."""
    held_out = len(rows) // 7
    bounds = {
        "train": (0, len(rows) - held_out),
        "test": (len(rows) - held_out, len(rows) - held_out + held_out // 2),
        "validation": (len(rows) - held_out + held_out // 2, len(rows)),
    }
    ids, numbers = slow_ids(rows, threshold), slow_numbers(rows)
    for mapping, (start, stop) in bounds.items():
        found = read(output, mapping)
        got = [
            (bool(label), tuple(number), tuple(row))
            for label, number, row in zip(
                found["labels"],
                found["numerical"].tolist(),
                zip(*found["ids"], strict=True),
                strict=True,
            )
        ]
        want = [
            (bool(rows[i]["clicked"]), tuple(numbers[i].tolist()), ids[i])
            for i in range(start, stop)
        ]
        assert (sorted(got) == sorted(want)) if mapping == "train" else got == want


def prepare(tmp_path: Path, pattern: str, **options: Any) -> Path:
    all_rows = {"frequency_threshold": "0", "vocabulary_from": "all"}  # have ids, as `slow_ids` has
    options = {"columns": COLUMNS} | all_rows | options
    return prepare_log(tmp_path / pattern, tmp_path / "data", **options)


@pytest.mark.parametrize("threshold", [0, 5])
def test_csv(threshold: int, tmp_path: Path) -> None:
    rows = random_rows(280)
    write_csv(tmp_path / "log.csv", rows)
    output = prepare(tmp_path, "log.csv", frequency_threshold=str(threshold))
    assert_rows(output, rows, threshold)


@pytest.mark.parametrize("threshold", [0, 5])
def test_parquet(threshold: int, tmp_path: Path) -> None:
    rows = random_rows(280)
    write_parquet(tmp_path / "log.parquet", rows)
    columns = COLUMNS.replace("user:int64", "user").replace("score:float64", "score")
    output = prepare(tmp_path, "log.parquet", columns=columns, frequency_threshold=str(threshold))
    assert_rows(output, rows, threshold)


def test_rare_values_share_an_id_by_default(tmp_path: Path) -> None:
    rows = random_rows(280)
    write_csv(tmp_path / "log.csv", rows)
    output = prepare(tmp_path, "log.csv", frequency_threshold=None)
    assert_rows(output, rows, threshold=2)


def test_held_out_rows_give_no_value_an_id_by_default(tmp_path: Path) -> None:
    """Else they would be known better than a new day's: a is there twice in training rows, b once
    and in held-out ones, c only there."""
    users = ["a", "b", *"a" * 10, *"bccbcc"]
    (tmp_path / "log.csv").write_text("y,x,user\n" + "".join(f"1,2,{user}\n" for user in users))
    columns = "label=y numerical=x:plain categorical=user"
    options: dict[str, Any] = {"columns": columns, "holdout": "0.34"}
    output = prepare_log(tmp_path / "log.csv", tmp_path / "data", **options)
    known = pa.parquet.read_table(output / "vocabulary" / "cat_0.parquet").to_pylist()
    assert known == [{"value": "a", "id": 1, "count": 11}]
    for split in ("test", "validation"):
        assert read(output, split)["ids"][0].tolist() == [0, 0, 0]
    output = prepare_log(tmp_path / "log.csv", tmp_path / "b", vocabulary_from="all", **options)
    assert read(output, "test")["ids"][0].tolist() == [3, 2, 2]


def test_without_header_and_in_several_files(tmp_path: Path) -> None:
    """The last file is held out, like a last day; log_10 comes after log_2."""
    rows = random_rows(90)
    for name, part in (("log_1", rows[:40]), ("log_2", rows[40:70]), ("log_10", rows[70:])):
        write_csv(tmp_path / f"{name}.tsv", part, header=False, delimiter="\t")
    columns = "label=1 numerical=3:plain,4:log categorical=5:int64,6,7:float64,8:hex timestamp=9"
    output = prepare(tmp_path, "log_*.tsv", columns=columns, header=False, delimiter="tab")
    found = np.stack(read(output, "test")["ids"], 1).tolist()
    assert [tuple(row) for row in found] == slow_ids(rows)[70:80]


def test_timestamps_are_hour_and_weekday(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One instant in every form; 29 February 2024 was a Thursday; one day is warned of."""
    instant = datetime.datetime(2024, 2, 29, 23, 30, tzinfo=datetime.UTC)
    seconds = int(instant.timestamp())
    forms = {
        "plain": "2024-02-29 23:30:00",
        "zone": "2024-03-01T01:30:00+02:00",
        "slashes": "2024/02/29 23:30:00",
        "unix": str(seconds),
        "ms": str(seconds * 1000),
        "before": str(-3600),
    }
    text = "y," + ",".join(forms) + "\n" + ("1," + ",".join(forms.values()) + "\n") * 14
    (tmp_path / "t.csv").write_text(text)
    columns = "label=y timestamp=plain,zone,slashes,unix:unix,ms:unix_ms,before:unix"
    output = prepare(tmp_path, "t.csv", columns=columns)
    values = [
        pa.parquet.read_table(output / "vocabulary" / f"cat_{i}.parquet")["value"].to_pylist()
        for i in range(12)
    ]
    assert values == [[23], [3]] * 5 + [[23], [2]]  # an hour before 1970, a Thursday, began
    told = capsys.readouterr().out
    assert told.count("training rows have 1 of the 7 days of the week in ") == len(forms)
    facts = read_json(output / "prepare.json")
    for name in forms:
        facts["features"][f"{name}.weekday"]["kept"] = 7
    summary.show(output, facts)
    assert "days of the week" not in capsys.readouterr().out


def test_one_column_of_times_may_have_them_in_every_form(tmp_path: Path) -> None:
    """So that what becomes of one does not depend on those that are read with it."""
    good = [
        "2024-02-29 23:30:00",
        "2024/02/29 23:30",
        "2024-03-01T01:30:00+02:00",
        "",
        "2024-02-29",
    ]
    bad = ["29/02/2024 23:30", "2024/2/29", "02/29/2024", "2024-02-30"]
    rows = "".join(f"1,{time}\n" for time in [*good, *bad] * 4)
    (tmp_path / "t.csv").write_text("y,at\n" + rows)
    output = prepare(tmp_path, "t.csv", columns="label=y timestamp=at", bad_rows="skip")
    table = pa.parquet.read_table(output / "vocabulary" / "cat_0.parquet").to_pylist()
    assert {row["value"]: row["count"] for row in table} == {None: 4, 0: 4, 23: 12}
    assert len((output / "bad_rows.txt").read_text().splitlines()) == 4 * len(bad)


def test_blanks_around_names_and_values_are_no_part_of_them(tmp_path: Path) -> None:
    """Adult census income, among others, is written so."""
    lines = ["1, 2.5, Bern", "0, ?, Bern ", "1,, ?", "0, 7, New York"] * 20
    padded = "\n".join(["kept, price, city", *lines, ""])
    found = []
    for name, text in (("padded", padded), ("plain", re.sub(" ?, ?| (?=\n)", ",", padded))):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "log.csv").write_text(text.replace(",\n", "\n"))
        columns = "label=kept numerical=price categorical=city"
        output = prepare(folder, "log.csv", columns=columns, missing=("?",))
        found.append((output / "vocabulary" / "cat_0.parquet").read_bytes())
        found.append((output / "test" / "numerical.bin").read_bytes())
    assert found[:2] == found[2:]


def test_labels_by_comparison(tmp_path: Path) -> None:
    (tmp_path / "r.csv").write_text(
        "rating,item\n" + "".join(f"{i % 5 + 1},x\n" for i in range(70))
    )
    output = prepare(tmp_path, "r.csv", columns="label=rating>=4 categorical=item")
    summary = json.loads((output / "prepare.json").read_text())
    assert summary["click_rate"]["train"] == pytest.approx(0.4)


def test_labels_that_are_words(tmp_path: Path) -> None:
    (tmp_path / "r.csv").write_text(
        "Clicked?,item\n" + "".join(f"{'yes' if i % 4 == 0 else 'no'},x\n" for i in range(70))
    )
    with pytest.raises(InputError, match="is 'yes', expected 0, 1, true or false"):
        prepare(tmp_path, "r.csv", columns="label=Clicked? categorical=item")
    output = prepare(tmp_path, "r.csv", columns="label=Clicked?=yes categorical=item")
    assert json.loads((output / "prepare.json").read_text())["click_rate"]["train"] == 15 / 60


def test_splits_without_clicks_are_mentioned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "r.csv").write_text("y,item\n" + "".join(f"{int(i < 60)},x\n" for i in range(70)))
    prepare(tmp_path, "r.csv", columns="label=y categorical=item")
    told = capsys.readouterr().out
    assert "In train every row is a click, so AUC is undefined there." in told
    assert "In test no row is a click" in told


def test_signs_of_what_is_missing_and_thresholds_by_name(tmp_path: Path) -> None:
    lines = [f"{i % 2},{['a', 'NA', 'b'][i % 3]},{i % 2 if i % 5 else '-'}" for i in range(70)]
    (tmp_path / "log.csv").write_text("y,tag,x\n" + "\n".join(lines))
    columns = "label=y numerical=x categorical=tag"
    with pytest.raises(InputError, match="Unknown column of --frequency-threshold 'tga'"):
        prepare(tmp_path, "log.csv", columns=columns, frequency_threshold="0,tga=2")
    output = prepare(
        tmp_path,
        "log.csv",
        columns=columns,
        missing=("NA", "-"),
        frequency_threshold="0,tag=24",
    )
    feature = json.loads((output / "prepare.json").read_text())["features"]["tag"]
    assert (feature["distinct"], feature["kept"]) == (3, 1)  # 24 a's, 23 b's, 23 times nothing
    assert feature["missing_share"] == pytest.approx(23 / 70)


@pytest.mark.parametrize("kind", ["csv", "parquet", "category", "lists", "lists of a category"])
def test_values_of_another_encoding_stay_different(kind: str, tmp_path: Path) -> None:
    words = [b"caf\xe9", b"caf\xe8", "café".encode()]
    rows = [(i % 2, words[i % 3]) for i in range(70)]
    if kind == "csv":
        text = b"y,word\n" + b"".join(b"%d,%s\n" % row for row in rows)
        (tmp_path / "log.csv").write_bytes(text)
    else:
        found = pa.array([word for _, word in rows], pa.binary())
        texts = pa.Array.from_buffers(pa.string(), len(found), found.buffers())  # unchecked
        if "category" in kind:
            texts = texts.dictionary_encode()
        if "lists" in kind:
            texts = pa.ListArray.from_arrays(range(len(texts) + 1), texts)
        table = pa.table({"y": [label for label, _ in rows], "word": texts})
        pa.parquet.write_table(table, tmp_path / "log.parquet")
    name = "log.csv" if kind == "csv" else "log.parquet"
    output = prepare(tmp_path, name, columns="label=y categorical=word")
    values = pa.parquet.read_table(output / "vocabulary" / "cat_0.parquet")["value"].to_pylist()
    assert sorted(values) == ["cafè", "café"]


@pytest.mark.parametrize("kind", ["", ".gz"])
def test_an_empty_file_among_others_can_be_passed_over(kind: str, tmp_path: Path) -> None:
    rows = random_rows(60)
    for name, some in (("log_1.csv", rows[:30]), ("log_3.csv", rows[30:])):
        write_csv(tmp_path / name, some)
    for name in ("log_0.csv", "log_2.csv"):
        (tmp_path / f"{name}{kind}").write_bytes(gzip.compress(b"") if kind else b"")
    with pytest.raises(InputError, match=rf"log_0\.csv{kind} is empty"):
        prepare(tmp_path, "log_*.csv*")
    output = prepare(tmp_path, "log_*.csv*", bad_rows="skip")
    assert sum(path.stat().st_size for path in output.glob("*/label.bin")) == 60


def test_rows_of_plain_and_compressed_files_are_estimated(tmp_path: Path) -> None:
    """A compressed line takes a fraction of a plain one's bytes, whichever file comes first."""
    text = b"y,word\n" + b"1,abcdefghijkl\n" * 999
    (tmp_path / "log_0.csv").write_bytes(text)
    (tmp_path / "log_1.csv.gz").write_bytes(gzip.compress(text))
    files = [tmp_path / "log_0.csv", tmp_path / "log_1.csv.gz"]
    rows = sum(path.stat().st_size for path in files) / text_files.bytes_per_line(files)
    assert rows == pytest.approx(2000)


def test_a_long_header_is_read_whole(tmp_path: Path) -> None:
    names = [f"column_{i}" for i in range(10_000)]
    (tmp_path / "log.csv").write_text(f"y,{','.join(names)}\n" + ("1" + ",a" * 10_000 + "\n") * 20)
    output = prepare(tmp_path, "log.csv", columns="label=y categorical=column_9999")
    assert "column_9999" in json.loads((output / "prepare.json").read_text())["features"]


@pytest.mark.parametrize(
    ("use", "reason"),
    [
        ("categorical=user numerical=tags", "list.* cannot be read as numerical"),
        ("categorical=tags:string", "list.* cannot be read as categorical"),
        ("categorical=user:hex", "int64, which cannot be read as categorical .hex."),
        ("categorical=user numerical=seen", "timestamp.* cannot be read as numerical"),
    ],
)
def test_columns_of_other_types_are_refused_before_reading(
    use: str, reason: str, tmp_path: Path
) -> None:
    start = datetime.datetime(2024, 2, 28)
    table = {"clicked": [0, 1], "user": [1, 2], "tags": [[1], [2, 3]], "seen": [start, start]}
    pa.parquet.write_table(pa.table(table), tmp_path / "log.parquet")
    with pytest.raises(InputError, match=reason):
        prepare(tmp_path, "log.parquet", columns=f"label=clicked {use}")


@pytest.mark.parametrize("bad_rows", ["stop", "skip", "keep"])
def test_bad_rows(bad_rows: str, tmp_path: Path) -> None:
    rows = random_rows(70)
    write_csv(tmp_path / "log.csv", rows)
    lines = (tmp_path / "log.csv").read_text().splitlines()
    lines[10:10] = [
        "1,x,1,1,12x,a,0.5,ff,2024-01-01 00:00:00",
        "1,x,1,1",
        ",,,,,,,,",
        "maybe,x,1,1,1,a,0.5,ff,2024-01-01 00:00:00",
        "1,x,inf,1,1,a,0.5,ff,2024-01-01 00:00:00",
        "1,x,1,1,1,a,0.5,fg,yesterday",
    ]
    (tmp_path / "log.csv").write_text("\n".join(lines) + "\n")
    if bad_rows == "stop":
        with pytest.raises(
            InputError, match=r"log.csv:11: user is '12x', expected int64 or nothing"
        ):
            prepare(tmp_path, "log.csv")
        return
    output = prepare(tmp_path, "log.csv", bad_rows=bad_rows)
    report = (output / "bad_rows.txt").read_text().splitlines()
    label = "0, 1, true or false (--positive VALUE says which of two values is a click)"
    assert [line.split("log.csv:")[1] for line in report] == [
        "11: user is '12x', expected int64 or nothing",
        "12: 4 fields, expected 9",
        f"13: clicked is missing, expected {label}",
        f"14: clicked is 'maybe', expected {label}",
        "15: age is 'inf', expected a finite number",
        "16: tag is 'fg', expected hex or nothing",
    ]
    summary = json.loads((output / "prepare.json").read_text())
    assert summary["bad_rows"] == 6
    assert sum(summary["rows"].values()) == 70 + (3 if bad_rows == "keep" else 0)
    if bad_rows == "skip":
        assert_rows(output, rows)


def test_headers_that_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text('label,"name\n1,a\n')
    with pytest.raises(InputError, match=r"log.csv:1: a quoted field does not end on its line"):
        CsvSource([path], AskedColumns(text="label=label categorical=name"))
    path.write_bytes(b"label,name\r1,a\r0,b\r")
    with pytest.raises(InputError, match=r"log.csv:1: .* lines of the file end in CR alone, conv"):
        CsvSource([path], AskedColumns(text="label=label categorical=name"))
    write_parquet(path, random_rows(5))
    with pytest.raises(
        InputError, match=r"a Parquet file, which `trainmark prepare parquet` reads"
    ):
        CsvSource([path], AskedColumns(text="label=clicked categorical=user"))
    path.write_text("label,name,name\n1,a,b\n")
    with pytest.raises(InputError, match=r"than one column name\. Rename all but one\."):
        CsvSource([path], AskedColumns(text="label=label categorical=name"))
    path.write_bytes("label,städte\n1,Zürich\n".encode("latin-1"))
    source = CsvSource([path], AskedColumns(text="label=label categorical=st*"))
    assert source.schema.categorical[0].name.startswith("st")


@pytest.mark.parametrize("more", [{}, {"split_by": "seen", "holdout": "0.3"}])
def test_files_of_types_that_are_read_alike(more: dict[str, str], tmp_path: Path) -> None:
    """As of several versions of pandas, which writes floats where a whole number is missing."""
    start = datetime.datetime(2024, 2, 28)
    seen = pa.array([start + datetime.timedelta(hours=7 * i) for i in range(60)])
    words = pa.array([["a", "b", None, "c"][i % 4] for i in range(60)])
    one = {
        "y": pa.array([i % 2 for i in range(60)]),
        "n": pa.array([i % 9 for i in range(60)]),
        "user": pa.array([i % 5 for i in range(60)]),
        "word": words,
        "seen": seen.cast(pa.timestamp("ms")),
    }
    other = {
        "seen": seen.cast(pa.timestamp("ns")),
        "word": words.dictionary_encode(),
        "user": one["user"].cast(pa.int32()),
        "n": one["n"].cast(pa.float64()),
        "y": one["y"].cast(pa.int8()),
    }
    third = other | {"word": words.cast(pa.large_string()), "user": one["user"].cast(pa.uint16())}
    found = []
    for kinds in ([one, one, one], [one, other, third], [third, one, other]):
        for number, table in enumerate(kinds):
            pa.parquet.write_table(pa.table(table), tmp_path / f"log_{number}.parquet")
        columns = "label=y numerical=n:plain categorical=user,word timestamp=seen"
        output = prepare(tmp_path, "log_*.parquet", columns=columns, **more)
        parts = [read(output, mapping) for mapping in ("train", "test", "validation")]
        found.append([(p["labels"], p["numerical"], np.stack(p["ids"], 1)) for p in parts])
        shutil.rmtree(output)
    for again in found[1:]:
        for expected, got in zip(found[0], again, strict=True):
            for first, second in zip(expected, got, strict=True):
                np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("first", [0, 1, 2, 3])
def test_integers_that_no_single_file_has_a_type_for(first: int, tmp_path: Path) -> None:
    """Each file is written with the smallest type that holds its values, or with none."""
    values: list[list[Any]] = [[1, 2, 255], [-7, 1, 2**40], [3, 3, 1], [None] * 3]
    kinds = [pa.uint8(), pa.int64(), pa.uint32(), pa.null()]
    order = [(first + step) % 4 for step in range(4)]
    for place, number in enumerate(order):
        table = {
            "y": [0, 1, 1] * 20,
            "user": pa.array(values[number] * 20, kinds[number]),
            "tags": pa.array([[v] for v in values[number]] * 20, pa.list_(kinds[number])),
            "seen": pa.nulls(60) if number == 3
            else pa.array([values[number]] * 60, pa.list_(kinds[number])),
            "word": pa.array([None if v is None else str(v) for v in values[number]] * 20,
                             pa.null() if number == 3 else pa.string()),
            "n": pa.array(values[number] * 20, kinds[number]),
        }  # fmt: skip
        pa.parquet.write_table(pa.table(table), tmp_path / f"log_{place}.parquet")
    output = prepare(
        tmp_path,
        "log_*.parquet",
        columns="label=y numerical=n:plain categorical=user,tags,seen,word",
    )
    columns = json.loads((output / "vocabulary/vocabulary.json").read_text())["inputs"]["columns"]
    assert [use["reading"] for use in columns] == [
        "plain",
        "int64",
        "int64[1]",
        "int64[3]",
        "string",
    ]
    known = pa.parquet.read_table(output / "vocabulary/cat_0.parquet")["value"].to_pylist()
    assert [value for value in known if value is not None] == [-7, 1, 2, 3, 255, 2**40]


def test_integers_of_files_that_no_type_holds(tmp_path: Path) -> None:
    for number, kind in enumerate((pa.uint64(), pa.int8())):
        table = pa.table({"y": [0, 1] * 30, "user": pa.array([5, 7] * 30, kind)})
        pa.parquet.write_table(table, tmp_path / f"log_{number}.parquet")
    with pytest.raises(
        InputError, match=r"as int8, files from .*log_0.parquet on as uint64.*say user:int64 or"
    ):
        prepare(tmp_path, "log_*.parquet", columns="label=y categorical=user")
    prepare(tmp_path, "log_*.parquet", columns="label=y categorical=user:int64")


def test_an_earlier_output_of_the_same_name_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one process, as of a notebook: strings of another log, as many in each file."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})  # this one does all of the work
    logs = [(["a", "b"], ["c", "d"]), (["b", "c"], ["a", "d"]), (["a", "c"], ["b", "d", "e"])]
    for log in logs:
        shutil.rmtree(tmp_path / "data", ignore_errors=True)
        for number, words in enumerate(log):
            lines = [f"{i % 2},{i},{words[i % len(words)]}" for i in range(60)]
            (tmp_path / f"log_{number}.csv").write_text("\n".join(["y,n,word", *lines, ""]))
        columns = "label=y numerical=n categorical=word"
        output = prepare(tmp_path, "log_*.csv", columns=columns)
        vocabulary = pa.parquet.read_table(output / "vocabulary" / "cat_0.parquet").to_pylist()
        words_of = {entry["id"]: entry["value"] for entry in vocabulary}
        for mapping, words in (("train", log[0]), ("test", log[1])):
            found = {words_of.get(i) for i in read(output, mapping)["ids"][0].tolist()}
            assert found == set(words), log


def test_second_run_and_new_data_with_the_old_vocabulary(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = random_rows(140)
    write_csv(tmp_path / "log.csv", rows)
    output = prepare(tmp_path, "log.csv")
    prepare(tmp_path, "log.csv")
    told = capsys.readouterr().out
    assert "already holds this dataset" in told
    assert "newer" not in told
    os.utime(tmp_path / "log.csv", (time.time() + 60,) * 2)
    prepare(tmp_path, "log.csv")
    assert "log.csv is newer" in " ".join(capsys.readouterr().out.split())
    with pytest.raises(InputError, match="other settings"):
        prepare(tmp_path, "log.csv", seed=5)
    (tmp_path / "new").mkdir()
    write_csv(tmp_path / "new" / "log.csv", rows[70:])
    again = prepare(tmp_path / "new", "log.csv", vocabulary=output, holdout="0.5")
    found = np.stack(read(again, "test")["ids"], 1).tolist()
    assert [tuple(row) for row in found] == slow_ids(rows)[105:122]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected roles with their columns"),
        ("label=clicked", "names no numerical or categorical column"),
        ("label=clicked categorical=usr", "Unknown column of log.csv 'usr'. Did you mean 'user'"),
        ("categorical=user", "names 0 labels; exactly one"),
        ("label=clicked categorical=user,user", "names 'user' twice"),
        ("label=user>yes categorical=user", "compares with 'yes'; a number is expected"),
        ("label=clicked categorical=user:int32", "Unknown way to read the categorical column user"),
    ],
)
def test_bad_descriptions(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse(text, ["clicked", "user", "city:token"], "log.csv")


def test_descriptions() -> None:
    names = ["y", "a:b", "C1", "C2", "x y"]
    uses = parse("label=y categorical=C*,a:b:int64 numerical=x y", names, "log.csv")
    assert [(use.role, use.column, use.reading) for use in uses] == [
        ("label", "y", None),
        ("categorical", "C1", None),
        ("categorical", "C2", None),
        ("categorical", "a:b", "int64"),
        ("numerical", "x y", None),
    ]
    numbered = [str(i) for i in range(1, 6)]
    spans = parse("label=1 categorical=2-4:int64", numbered, "log.csv")
    assert [use.column for use in spans] == ["1", "2", "3", "4"]
    with pytest.raises(InputError, match=r"names 4-9; log\.csv has columns 1 to 5"):
        parse("label=1 categorical=4-9", numbered, "log.csv")


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["prepare", "csv", "--output", str(tmp_path / "x")]) == 2
    assert "Give --input with --columns, or --spec" in capsys.readouterr().err
    write_parquet(tmp_path / "log.parquet", random_rows(70))
    flags = ["--input", str(tmp_path / "log.parquet"), "--output", str(tmp_path / "data")]
    assert cli.main(["prepare", "parquet", *flags]) == 2
    told = capsys.readouterr().err
    assert "log.parquet has the columns clicked, unused, age, " in told
    assert "--columns" in told
    assert (
        cli.main(["prepare", "parquet", *flags, "--columns", "label=clicked categorical=city"]) == 0
    )
    assert "city" in capsys.readouterr().out


def test_nothing_is_loaded_that_is_not_needed(tmp_path: Path) -> None:
    """Arrow would load pandas, and numba scipy, where they are installed."""
    pytest.importorskip("pandas")
    write_csv(tmp_path / "log.csv", random_rows(60))
    script = (
        "import importlib.util, sys; from trainmark.cli import main; "
        "assert all(map(importlib.util.find_spec, ('pandas', 'scipy'))); "
        "words = ['prepare', 'csv', '--input', 'log.csv', '--output', 'data', '--columns']; "
        f"main([*words, {COLUMNS!r}]); "
        "loaded = {name.partition('.')[0] for name in sys.modules}; "
        "assert 'pyarrow' in loaded and 'pandas' not in loaded and 'trainmark' in loaded; "
        "assert not {'trainmark.workloads', 'scipy.linalg', 'torch'} & set(sys.modules); "
        "import pandas, pyarrow; pyarrow.table({'a': [1]}).to_pandas()"
    )
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=True)
