"""Raw values of a request are encoded as preparation encodes those of a file."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from tests.small import write_dataset
from tests.unit.criteo_oracle import random_lines, write_day
from tests.unit.logs import prepare_log
from tests.unit.test_prepare_engine import prepare as prepare_criteo
from tests.unit.test_prepare_npy import read
from tests.unit.test_prepare_tabular import COLUMNS, random_rows, write_csv, write_parquet
from trainmark.clicklog.arrays import primitives
from trainmark.clicklog.raw_values import RawValues, open_dataset
from trainmark.errors import InputError

HELD_OUT = ("test", "validation")  # in the order of the input


def opened(data: Path) -> RawValues:
    values = open_dataset(data)
    assert values is not None
    return values


def assert_as_prepared(data: Path, numerical: list[list[Any]], categorical: list[list[Any]]) -> int:
    """Encode the last rows of the input; returns how many these were."""
    splits = [read(data, split) for split in HELD_OUT]
    numbers = np.concatenate([split["numerical"] for split in splits])
    ids = np.concatenate([np.stack(split["ids"], axis=1) for split in splits])
    rows = len(ids)
    found_numbers, found_ids = opened(data).encode(numerical[-rows:], categorical[-rows:])
    np.testing.assert_array_equal(found_numbers, numbers)
    np.testing.assert_array_equal(found_ids, ids)
    return rows


# --- Criteo


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize(
    ("recipe", "threshold", "max_rows"),
    [
        ("nvidia", "2", None),
        ("nvidia", "0", "5"),
        ("torchrec", "2", None),
        ("torchrec", "3", "4"),
        ("dlrm", None, None),
        ("dlrm", None, "6"),
    ],
)
def test_criteo(
    recipe: Any,
    threshold: str | None,
    max_rows: str | None,
    fast: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if fast:
        pytest.importorskip("numba")
    monkeypatch.setattr(primitives, "FAST", fast)
    lines = random_lines(random.Random(3), 400)
    for line in lines[::7]:
        line[14:17] = ["0", "", "00000000"]
    for day in range(2):
        write_day(tmp_path / f"day_{day}", lines[day * 200 : day * 200 + 200])
    data = tmp_path / "data"
    prepare_criteo(
        tmp_path / "day_*",
        data,
        recipe=recipe,
        frequency_threshold=threshold,
        max_rows=max_rows,
        test_half="first",
        vocabulary_from="train",  # so that some values are not known
    )
    # As text, in which missing fields are empty; and as JSON would rather have it.
    numerical, categorical = [line[1:14] for line in lines], [line[14:] for line in lines]
    assert assert_as_prepared(data, numerical, categorical) == 200
    numbers = [[int(field) if field else None for field in row] for row in numerical]
    texts = [[field or None for field in row] for row in categorical]
    assert assert_as_prepared(data, numbers, texts) == 200


@pytest.fixture(scope="module")
def criteo_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("criteo")
    write_day(folder / "day_0", random_lines(random.Random(0), 70))
    return prepare_criteo(folder / "day_0", folder / "data", frequency_threshold="0")


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("I3", 1.5, "1.5"),
        ("I3", "1.5", "'1.5'"),
        ("I13", 2**63, str(2**63)),
        ("I1", True, "True"),
        ("I1", 1e999, "inf"),
        ("I1", [1], "[1]"),
        ("C1", "xyz", "'xyz'"),
        ("C26", "123456789", "'123456789'"),
        ("C2", 12, "12"),
        ("C2", {}, "{}"),
    ],
)
def test_criteo_refusals(criteo_data: Path, name: str, value: Any, shown: str) -> None:
    values = opened(criteo_data)
    assert refusal(values, name, value) == (
        f"Row 1: {name} is {shown}, expected {values.expects[name]}."
    )


def refusal(values: RawValues, name: str, value: Any) -> str:
    """Of a bad value in a row behind a good one."""
    numerical, categorical = values.example()
    row = dict(zip(values.numerical, numerical, strict=True))
    row |= dict(zip(values.categorical, categorical, strict=True)) | {name: value}
    with pytest.raises(InputError) as error:
        values.encode(
            [numerical, [row[n] for n in values.numerical]],
            [categorical, [row[n] for n in values.categorical]],
        )
    return str(error.value)


def test_the_example_is_known(criteo_data: Path) -> None:
    values = opened(criteo_data)
    numerical, categorical = values.example()
    numbers, ids = values.encode([numerical], [categorical])
    assert (ids == 1).all()  # the most frequent value of each column
    assert numbers == pytest.approx(np.log(4.0), abs=1e-3)


# --- one's own data


def columns_of(rows: list[dict[str, Any]], names: tuple[str, ...]) -> list[list[Any]]:
    return [[row[name] for name in names] for row in rows]


@pytest.mark.parametrize("kind", ["csv", "parquet"])
@pytest.mark.parametrize("threshold", ["0", "9"])
def test_own_data(kind: str, threshold: str, tmp_path: Path) -> None:
    rows = random_rows(500)
    path, data = tmp_path / f"log.{kind}", tmp_path / "data"
    (write_csv if kind == "csv" else write_parquet)(path, rows)
    prepare_log(path, data, columns=COLUMNS, frequency_threshold=threshold)
    for row in rows:  # JSON has no times
        row["seen"] = None if row["seen"] is None else str(row["seen"])
    values = opened(data)
    assert values.numerical == ("age", "visits")
    assert values.categorical == ("user", "city", "score", "tag", "seen")
    assert values.tables[-2:] == ("seen.hour", "seen.weekday")
    numerical = columns_of(rows, values.numerical)
    categorical = columns_of(rows, values.categorical)
    through_json = json.loads(json.dumps([numerical, categorical]))
    assert assert_as_prepared(data, *through_json) == 71
    # Numbers may be texts, as they were in the log; all of them, or some.
    for step in (1, 3):
        for line in numerical[::step]:
            line[:] = [None if value is None else str(value) for value in line]
        for line in categorical[::step]:
            line[0] = None if line[0] is None else str(line[0])
        assert_as_prepared(data, numerical, categorical)


def test_types_of_parquet(tmp_path: Path) -> None:
    """Kinds that only Parquet knows; there, an empty text is a value, in CSV it is missing."""
    count = 140
    table = {
        "clicked": pa.array([i % 2 == 0 for i in range(count)]),
        "age": pa.array([i % 9 for i in range(count)], pa.int8()),
        "big": pa.array([2**64 - 1 - i % 5 for i in range(count)], pa.uint64()),
        "new": pa.array([None if i % 7 == 0 else i % 3 == 0 for i in range(count)]),
        "city": pa.array(["", "Oslo", None, "Rome"] * (count // 4)),
        "at": pa.array([i * 1_700_000 for i in range(count)], pa.timestamp("ms", tz="UTC")),
    }
    pa.parquet.write_table(pa.table(table), tmp_path / "log.parquet")
    columns = "label=clicked numerical=age categorical=big,new,city timestamp=at"
    data = prepare_log(tmp_path / "log.parquet", tmp_path / "data", columns=columns)
    lists = {name: column.to_pylist() for name, column in table.items()}
    lists["at"] = [time.isoformat() for time in lists["at"]]
    names = opened(data).categorical
    values = [list(row) for row in zip(*(lists[name] for name in names), strict=True)]
    assert assert_as_prepared(data, [[age] for age in lists["age"]], values) == 20
    # Clients that have texts alone write what is missing as an empty one.
    texts = [[*row[:1], "" if row[1] is None else str(int(row[1])), *row[2:]] for row in values]
    assert_as_prepared(data, [[age] for age in lists["age"]], texts)

    rows = [{name: lists[name][i] for name in ("clicked", "age", "city")} for i in range(count)]
    write_csv(tmp_path / "log.csv", rows)
    columns = "label=clicked numerical=age categorical=city"
    log, text = tmp_path / "log.csv", tmp_path / "text"
    prepare_log(log, text, columns=columns, missing=("Oslo",))
    numerical, categorical = columns_of(rows, ("age",)), columns_of(rows, ("city",))
    assert assert_as_prepared(text, numerical, categorical) == 20
    cities = [[""], ["Oslo"], ["Rome"]]
    assert opened(text).encode([[1]] * 3, cities)[1][:, 0].tolist() == [2, 2, 1]
    assert opened(data).encode([[1]], [[None, None, "", None]])[1].tolist()[0][2] != 0


@pytest.mark.parametrize(
    ("name", "value", "parts"),
    [
        ("age", "old", ["age is 'old'", "a finite number"]),
        ("visits", 1e999, ["visits is inf", "a finite number"]),
        ("user", 1.5, ["user is 1.5", "int64"]),
        ("user", 2**64, [f"user is '{2**64}'", "int64"]),
        ("city", True, ["city is True", "string"]),
        ("city", 1.5, ["city is 1.5", "string"]),
        ("tag", 255, ["tag is 255", "hex"]),
        ("tag", "xyz", ["tag is 'xyz'"]),
        ("seen", "noon", ["seen is 'noon'", "a time such as 2024-05-01"]),
        ("seen", 12, ["seen is 12", "a time such as 2024-05-01"]),
        ("score", [0.5], ["score is [0.5]", "float64"]),
    ],
)
def test_own_refusals(name: str, value: Any, parts: list[str], own_data: Path) -> None:
    values = opened(own_data)
    numerical, categorical = values.example()
    encoded = values.encode([numerical], [categorical])[1]
    assert (encoded[:, :4] == 1).all()
    said = refusal(values, name, value)
    assert said.startswith("Row 1: ")
    assert all(part in said for part in parts)


@pytest.fixture(scope="module")
def own_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("own")
    write_csv(folder / "log.csv", random_rows(100))
    return prepare_log(folder / "log.csv", folder / "data", columns=COLUMNS)


def test_whole_numbers_name_themselves(tmp_path: Path) -> None:
    """A code that was text in the log may come as a JSON number."""
    rows = [{"clicked": i % 2, "zip": str(100 + i % 3)} for i in range(30)]
    write_csv(tmp_path / "log.csv", rows)
    columns = "label=clicked categorical=zip"
    data = prepare_log(tmp_path / "log.csv", tmp_path / "data", columns=columns)
    assert opened(data).encode([[]] * 3, [[102], ["102"], [7]])[1].tolist() == [[3], [3], [0]]


# --- other datasets


def test_data_without_vocabularies(tmp_path: Path) -> None:
    assert open_dataset(write_dataset(tmp_path / "data")) is None
    assert open_dataset(tmp_path / "nothing") is None


@pytest.fixture(scope="module")
def users(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ids that floats cannot tell apart, and a column that is boolean in its file."""
    folder = tmp_path_factory.mktemp("users")
    ids = [7, 2**53, 2**53 + 1, 2**53 + 2] * 20
    table = {
        "clicked": [i % 2 for i in range(80)],
        "price": [float(i) for i in range(80)],
        "user": pa.array(ids, pa.int64()),
        "mobile": [i % 3 == 0 for i in range(80)],
        "city": ["7" if i % 2 else "a" for i in range(80)],
    }
    pa.parquet.write_table(pa.table(table), folder / "log.parquet")
    columns = "label=clicked numerical=price categorical=user,mobile,city"
    log, data = folder / "log.parquet", folder / "data"
    return prepare_log(log, data, columns=columns, frequency_threshold="0")


def test_ids_as_json_has_them(users: Path) -> None:
    """Each value has the id of what it stands for, alone or beside others of another type."""
    values = opened(users)
    row: list[Any] = [7, True, "a"]
    others: list[list[Any]] = [[7.0, 1, "a"], ["7", "1", "a"], [7, 1.0, "a"], [2**53 + 1, False, 7]]
    alone = [values.encode([[1]], [given])[1][0].tolist() for given in (row, *others)]
    together = values.encode([[1]] * 5, [row, *others])[1].tolist()
    assert alone == together
    assert alone[0] == alone[1] == alone[2] == alone[3]
    by_text = values.encode([[1]], [[str(2**53 + 1), "0", "7"]])[1][0].tolist()
    assert alone[4] == by_text
    known = {values.encode([[1]], [[n, True, "a"]])[1][0, 0] for n in (7, 2**53, 2**53 + 1)}
    assert len(known) == 3


@pytest.mark.parametrize(
    ("price", "given", "part"),
    [
        (1, [7.5, True, "a"], "user is 7.5, expected int64"),
        (1, [float(2**53 + 1), True, "a"], "may be another number than was meant"),
        (1, [float("inf"), True, "a"], "user is inf"),
        (1, [[], True, "a"], r"user is \[\]"),
        (1, [7, "true", "a"], "mobile is 'true'"),
        (1, [7, True, False], "city is False"),
        (1, [7, True, 7.5], "city is 7.5"),
        ([], [7, True, "a"], r"price is \[\]"),
        (float("inf"), [7, True, "a"], "price is inf"),
    ],
)
def test_values_that_stand_for_nothing(
    users: Path, price: Any, given: list[Any], part: str
) -> None:
    values = opened(users)
    with pytest.raises(InputError, match=rf"^Row 0: .*{part}"):
        values.encode([[price]], [given])
    with pytest.raises(InputError, match=rf"^Row 1: .*{part}"):
        values.encode([[1], [price]], [[2**53 + 1, 1, "a"], given])
