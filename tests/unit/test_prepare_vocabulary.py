"""`prepare --vocabulary`: new rows by the columns, ids and rules of an earlier dataset."""

import json
import random
from datetime import date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.unit.criteo_oracle import random_lines, write_day
from tests.unit.test_prepare_engine import prepare as prepare_criteo
from tests.unit.test_prepare_npy import read
from trainmark.clickdata import identity
from trainmark.clicklog import csv_data, parquet_data
from trainmark.clicklog.engine.vocabulary import Vocabulary
from trainmark.clicklog.sources import column_spec
from trainmark.clicklog.sources.column_match import AskedColumns, OldColumns
from trainmark.errors import InputError

COLUMNS = "label=clicked numerical=age:log categorical=user:int64,city"
OLD = [(1, 5, "Bern", 30), (0, 5, "Bern", 40), (0, 7, "Chur", 20), (1, 9, "Genf", 10)] * 7
NAMES = ("clicked", "user", "city", "age")


def write(path: Path, rows: list[Any], names: tuple[str, ...] = NAMES, delimiter: str = ",") -> str:
    lines = [delimiter.join(map(str, row)) for row in [names, *rows]]
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def prepare(input: str, output: Path, **options: Any) -> Path:
    csv_data.prepare(csv_data.Options(input=input, output=output, **options))
    return output


@pytest.fixture
def old(tmp_path: Path) -> Path:
    log = write(tmp_path / "old.csv", OLD)
    settings = {"frequency_threshold": "0,city=8", "max_rows": "100,user=3"}
    return prepare(log, tmp_path / "old", columns=COLUMNS, **settings)


def all_rows(data: Path) -> list[tuple[Any, ...]]:
    rows: list[tuple[Any, ...]] = []
    for mapping in ("train", "test", "validation"):
        found = read(data, mapping)
        rows += zip(found["labels"], *found["ids"], found["numerical"][:, 0], strict=True)
    return sorted(tuple(map(float, row)) for row in rows)


def test_columns_are_found_by_name_and_settings_are_inherited(old: Path, tmp_path: Path) -> None:
    rows = [(city, age, "x", click, user) for click, user, city, age in OLD]
    log = write(tmp_path / "new.csv", rows, ("city", "age", "other", "clicked", "user"), ";")
    new = prepare(log, tmp_path / "new", vocabulary=old, delimiter=";")
    assert all_rows(new) == all_rows(old)
    assert identity.of_dataset(new) == identity.of_dataset(old)
    facts = [json.loads((data / "prepare.json").read_text()) for data in (old, new)]
    for name in ("frequency_threshold", "max_rows"):
        assert facts[0]["settings"][name] == facts[1]["settings"][name]
    # In whatever order --columns names them, and twice removed.
    named = "categorical=city,user label=clicked numerical=age"
    third = prepare(
        log, tmp_path / "third", vocabulary=new, columns=named, frequency_threshold="0,city=8"
    )
    assert all_rows(third) == all_rows(old)


def test_a_log_of_other_types_and_formats(old: Path, tmp_path: Path) -> None:
    columns = dict(zip(NAMES, zip(*OLD, strict=True), strict=True))
    table = pa.table({name: list(values) for name, values in columns.items()})
    pq.write_table(table, tmp_path / "new.parquet")
    options = parquet_data.Options(
        input=str(tmp_path / "new.parquet"), output=tmp_path / "new", vocabulary=old
    )
    parquet_data.prepare(options)
    assert all_rows(tmp_path / "new") == all_rows(old)
    table = table.set_column(2, "city", pa.array([1.0] * len(OLD)))
    pq.write_table(table, tmp_path / "new.parquet")
    with pytest.raises(InputError, match=r"has 'city' as double; .*old has it as string"):
        parquet_data.prepare(options)


def test_every_type_of_parquet_is_read_again_by_its_own_vocabulary(tmp_path: Path) -> None:
    day, price = date(2026, 3, 1), Decimal("1.50")
    texts = ["True", "False"] * 14
    table = pa.table(
        {
            "clicked": pa.array([True, False] * 14),
            "born": pa.array([day + timedelta(i % 3) for i in range(28)]),
            "price": pa.array([price * (i % 4) for i in range(28)], pa.decimal128(8, 2)),
            "raw": pa.array([b"ab"[i % 2 :] for i in range(28)]),
            "seen": pa.array([datetime(2026, 3, 1 + i % 5) for i in range(28)]),
            "view": pa.array(texts, pa.string_view()),
            "views": pa.array([[text] for text in texts], pa.list_(pa.string_view())),
            "large": pa.array([[text] for text in texts], pa.large_list(pa.string_view())),
            "fixed": pa.array([[text] for text in texts], pa.list_(pa.string_view(), 1)),
            "number": pa.array([str(i) for i in range(28)], pa.string_view()),
        }
    )

    def rows_of(table: pa.Table, output: Path, **settings: Any) -> list[tuple[Any, ...]]:
        pq.write_table(table, tmp_path / "log.parquet")
        log = str(tmp_path / "log.parquet")
        parquet_data.prepare(parquet_data.Options(input=log, output=output, **settings))
        return all_rows(output)

    lists = "views,large,fixed"
    columns = f"label=clicked categorical=born,price,raw,seen,view,{lists} numerical=number"
    old = rows_of(table, tmp_path / "a", columns=columns)
    assert rows_of(table, tmp_path / "b", vocabulary=tmp_path / "a") == old
    # Views are read as the texts that they are: as labels, too.
    is_click, views = table["view"].cast("string"), table["views"].cast(pa.list_(pa.string()))
    others = {"view": is_click, "number": table["number"].cast("string")}
    others |= dict.fromkeys(lists.split(","), views)
    plain = pa.table(dict(zip(table.column_names, table.columns, strict=True)) | others)
    assert rows_of(plain, tmp_path / "c", columns=columns) == old
    of_view = columns.replace("clicked", "view").replace("view,views", "views")
    assert rows_of(table, tmp_path / "d", columns=of_view) == rows_of(
        plain, tmp_path / "e", columns=of_view
    )


def test_rows_with_the_rare_id_are_counted(
    old: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    feature = json.loads((old / "prepare.json").read_text())["features"]["city"]
    assert (feature["rare_rows"], feature["rare_share"]) == (14, 0.5)
    log = write(tmp_path / "new.csv", [(i % 2, 5 + i % 2, "Bern", 1) for i in range(28)])
    capsys.readouterr()
    new = prepare(log, tmp_path / "new", vocabulary=old)
    told = " ".join(capsys.readouterr().out.split())
    features = json.loads((new / "prepare.json").read_text())["features"]
    assert (features["city"]["rare_rows"], features["user"]["rare_rows"]) == (0, 14)
    assert "14 (50.0%)" in told
    assert "Warning: The id of rare values has more than 10% of the rows in 1 column: user" in told
    assert "those of held-out rows alone do not" in told
    assert "numbers the rows" not in told


def test_a_column_of_numbered_rows_is_best_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = write(tmp_path / "log.csv", [(i % 2, i, "Bern", 1) for i in range(28)])
    prepare(log, tmp_path / "data", columns=COLUMNS)
    told = " ".join(capsys.readouterr().out.split())
    assert "1 column: user (100%)." in told
    assert "Leave out a column that only numbers the rows." in told


@pytest.mark.parametrize(
    ("names", "options", "message"),
    [
        (("clicked", "user", "town", "age"), {}, r"new.csv has no column 'city', which .*old has"),
        (
            NAMES,
            {"columns": "label=clicked numerical=age categorical=user:string,city"},
            r"reads 'user' as string; .*old has it as int64",
        ),
        (
            NAMES,
            {"columns": "label=clicked categorical=user,city,age"},
            r"has 'age' as categorical; in .*old it is numerical",
        ),
        (NAMES, {"columns": "label=clicked categorical=user,city"}, "leaves out 'age'"),
        (
            (*NAMES[:3], "age", "site"),
            {"columns": "label=clicked numerical=age categorical=user,city,site"},
            "names 'site', which .*old does not have",
        ),
        (NAMES, {"frequency_threshold": "5"}, "--frequency-threshold is 5 for user, .*made with 0"),
        (NAMES, {"max_rows": "40"}, "--max-rows is 40 for user, .*made with 3"),
        (NAMES, {"missing": ("NA",)}, "--missing is NA, but .*old was prepared with none"),
    ],
)
def test_what_contradicts_is_refused(
    names: tuple[str, ...], options: dict[str, Any], message: str, old: Path, tmp_path: Path
) -> None:
    rows = [(*row, "x")[: len(names)] for row in OLD]
    log = write(tmp_path / "new.csv", rows, names)
    with pytest.raises(InputError, match=message):
        prepare(log, tmp_path / "new", vocabulary=old, **options)
    assert not (tmp_path / "new").exists()


def test_only_a_column_that_is_new_may_be_an_old_one_by_another_name() -> None:
    label, price = column_spec.parse("label=clicked numerical=price", ["clicked", "price"], "log")
    asked = AskedColumns(old=OldColumns("old", label, (price,)))
    with pytest.raises(InputError, match=r"has as label \(did it become 'click'\?\)\.$"):
        asked.uses(["price", "click"], "new")
    with pytest.raises(InputError, match=r"has as label\.$"):
        asked.uses(["price"], "new")


def test_vocabularies_of_other_formats_are_refused(old: Path, tmp_path: Path) -> None:
    write_day(tmp_path / "day_0", random_lines(random.Random(3), 90))
    with pytest.raises(InputError, match="has the columns user, city, which are not those of Cri"):
        prepare_criteo(tmp_path / "day_0", tmp_path / "out", vocabulary=old)
    criteo = prepare_criteo(tmp_path / "day_0", tmp_path / "criteo", frequency_threshold="2")
    with pytest.raises(InputError, match="is of Criteo's format"):
        prepare(write(tmp_path / "new.csv", OLD), tmp_path / "out", vocabulary=criteo)
    (old / "vocabulary" / "cat_1.parquet").unlink()
    with pytest.raises(InputError, match="the vocabulary of its column city is gone"):
        prepare(write(tmp_path / "new.csv", OLD), tmp_path / "out", vocabulary=old)


def test_criteo_inherits_recipe_thresholds_and_caps(tmp_path: Path) -> None:
    write_day(tmp_path / "day_0", random_lines(random.Random(3), 90))
    rules: Any = {"recipe": "torchrec", "frequency_threshold": "2,C3=4", "max_rows": "9,C4=5"}
    first = prepare_criteo(tmp_path / "day_0", tmp_path / "first", **rules)
    second = prepare_criteo(tmp_path / "day_0", tmp_path / "second", vocabulary=first)
    for path in first.glob("t*/*.bin"):
        assert path.read_bytes() == (second / path.relative_to(first)).read_bytes()
    assert identity.of_dataset(first) == identity.of_dataset(second)


def test_tables_of_a_run_that_was_killed_are_not_looked_up(tmp_path: Path) -> None:
    """Its vocabulary had other ids, in more tables."""
    reader: Any = SimpleNamespace(dtype=np.dtype("u4"), from_arrow=lambda v: v.to_numpy())

    def shared(values: int, first_id: int) -> Vocabulary:
        ids = np.arange(first_id, first_id + values, dtype=np.int32)
        table = pa.table({"value": np.arange(1, values + 1, dtype=np.uint32), "id": ids})
        pq.write_table(table, tmp_path / "city.parquet")
        vocabulary = Vocabulary(tmp_path / "city.parquet", reader, 0, tmp_path / "city")
        vocabulary.share()
        return vocabulary

    assert len(list(shared(40, 1).lookups())) == 3
    (lookup,) = shared(10, 101).lookups()
    found = np.full(40, -1, np.int32)
    lookup(np.arange(1, 41, dtype=np.uint32), found, missing=0)
    assert found.tolist() == [*range(101, 111), *[-1] * 30]
