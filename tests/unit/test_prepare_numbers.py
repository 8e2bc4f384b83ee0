"""Numerical columns of `prepare csv|parquet`, from the file to the dataset and to served rows."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from numpy.typing import NDArray
from sklearn.preprocessing import StandardScaler

from tests.unit.logs import prepare_log
from tests.unit.test_prepare_engine import files
from tests.unit.test_prepare_npy import read
from trainmark import cli
from trainmark.clickdata import feature_spec, identity
from trainmark.clicklog import raw_values
from trainmark.clicklog.arrays import primitives, shuffle
from trainmark.clicklog.encode import encode
from trainmark.clicklog.engine import columns, numbers
from trainmark.clicklog.engine.limits import Limits
from trainmark.errors import InputError

ROWS, TRAIN = 700, 600
HELD_OUT = ("test", "validation")


def skewed(seed: int = 0, missing: float = 0.2) -> list[float | None]:
    random = np.random.default_rng(seed)
    values = random.lognormal(2, 3, ROWS) - 5
    return [None if random.random() < missing else float(value) for value in values]


def write_csv(path: Path, **columns: Any) -> None:
    count = len(next(iter(columns.values())))
    columns = {"y": [i % 2 for i in range(count)], "c": ["a", "b"] * (count // 2), **columns}
    lines = [",".join("" if v is None else repr(v).strip("'") for v in row)
             for row in zip(*columns.values(), strict=True)]  # fmt: skip
    path.write_text("\n".join([",".join(columns), *lines]) + "\n")


def prepare(folder: Path, numerical: str, /, **options: Any) -> Path:
    columns = f"label=y numerical={numerical} categorical=c"
    given: dict[str, Any] = {"columns": columns, "holdout": str(100 / ROWS), "memory": "4G"}
    return prepare_log(folder / "log.csv", folder / "data", **given | options)


def facts_of(data: Path) -> dict[str, Any]:
    return dict(json.loads((data / "prepare.json").read_text())["numerical"])


def held_out(data: Path) -> NDArray[Any]:
    """Numbers of the rows that lie in the order of the input."""
    return np.concatenate([read(data, split)["numerical"] for split in HELD_OUT])


def filled(values: list[float | None], missing: float = math.nan) -> NDArray[np.float64]:
    return np.array([missing if value is None else value for value in values])


def test_standard_is_fitted_to_training_rows_alone(tmp_path: Path) -> None:
    values = skewed()
    values[TRAIN:] = [None if value is None else value / 2 - 1 for value in values[TRAIN:]]
    write_csv(tmp_path / "log.csv", x=values)
    data = prepare(tmp_path, "x:standard+missing")
    x = filled(values)
    scaler = StandardScaler().fit(x[:TRAIN][~np.isnan(x[:TRAIN])][:, None])
    expected = np.nan_to_num(scaler.transform(x[:, None])[:, 0], nan=0.0)
    found = held_out(data)
    np.testing.assert_allclose(found[:, 0], expected[TRAIN:], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(found[:, 1], np.isnan(x[TRAIN:]))
    trained = read(data, "train")["numerical"]
    np.testing.assert_allclose(np.sort(trained[:, 0]), np.sort(expected[:TRAIN]), atol=1e-5)
    assert feature_spec.read(data).numerical_dtype == "float32"


@pytest.mark.parametrize(
    "options",
    [
        {"holdout": "random:0.3"},
        {"holdout": "random:0.3", "group": "c"},
        {"split_by": "at:number", "holdout": "0.4"},
        {"negative_rate": 0.3},
    ],
)
def test_the_rows_that_are_trained_on_have_mean_0_and_deviation_1(
    options: dict[str, Any], tmp_path: Path
) -> None:
    values = [None if value is None else math.log(value + 6) for value in skewed()]
    write_csv(
        tmp_path / "log.csv",
        x=[None if x is None else x * (1 + 5 * (i % 2)) for i, x in enumerate(values)],
        at=[-i for i in range(ROWS)],
        c=[i // 50 for i in range(ROWS)],
    )
    trained = read(prepare(tmp_path, "x:standard+missing", **options), "train")["numerical"]
    assert 200 < len(trained) < 650
    present = trained[trained[:, 1] == 0, 0].astype(np.float64)
    assert present.mean() == pytest.approx(0, abs=1e-6)
    assert present.std() == pytest.approx(1, abs=1e-6)


def test_facts_of_each_column_are_recorded_and_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = [float(i) for i in range(ROWS)]
    write_csv(
        tmp_path / "log.csv",
        x=[-1e300, 1e39, None, 16_777_217, -4, 1e-60, *values[6:]],
        low=[-5.0, -3.0, -2.5, *values[3:]],
        score=values,
        empty=[None] * ROWS,
    )
    columns = "x:plain,low:log,score:quantile,empty:plain"
    flags = ["--input", str(tmp_path / "log.csv"), "--output", str(tmp_path / "data")]
    described = f"label=y numerical={columns} categorical=c"
    assert cli.main(["prepare", "csv", *flags, "--columns", described, "--holdout", "0.1"]) == 0
    shown = capsys.readouterr().out
    for word in (
        "read as",
        "missing",
        "minimum",
        "median",
        "maximum",
        "x: 2 cut off",
        "low: 2 became 0",
    ):
        assert word in shown
    facts = facts_of(tmp_path / "data")
    trained = np.sort(np.array([-1e300, 1e39, 16_777_217, -4, 1e-60, *values[6:630]]))
    assert facts["x"] == {
        "reading": "plain",
        "missing": 1,
        "minimum": -1e300,
        "median": float(np.quantile(trained, 0.5, method="lower")),
        "maximum": 1e39,
        "cut_off": 2,
        "became_zero": 1,
        "lost_digits": 1,
    }
    assert facts["low"]["became_zero"] == 2
    assert facts["score"]["cut_off"] == 70  # what is held out lies beyond all training rows
    assert facts["empty"]["missing"] == ROWS
    assert facts["empty"]["median"] is None
    found = held_out(tmp_path / "data")
    np.testing.assert_array_equal(found[:, 0], np.arange(630, 700))


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        ([0, 1, 2048, -7], "float16"),
        ([0.5, 65504, None, 1], "float16"),
        ([0, 1, 2049, 3], "float32"),
        ([0.1, 1, 2, 3], "float32"),
        ([70_000, 1, 2, 3], "float32"),
    ],
)
def test_numbers_are_float16_where_that_keeps_them(
    values: list[Any], dtype: str, tmp_path: Path
) -> None:
    write_csv(tmp_path / "log.csv", x=values * (ROWS // 4))
    data = prepare(tmp_path, "x:plain+missing")
    spec = feature_spec.read(data)
    assert spec.numerical_dtype == dtype
    rows = read(data, "test")["numerical"]
    expected = filled(values, missing=0).astype(np.float32)
    np.testing.assert_array_equal(np.unique(rows[:, 0]), np.unique(expected))


def test_bins_are_a_categorical_feature(tmp_path: Path) -> None:
    values = skewed()
    write_csv(tmp_path / "log.csv", x=values, few=[i % 5 for i in range(ROWS)])
    data = prepare(tmp_path, "x:bins,few:quantile+bins")
    spec = feature_spec.read(data)
    assert len(spec.numerical) == 1  # x is no number
    ends = pq.read_table(data / "vocabulary" / "cat_1.parquet")["value"].to_numpy()
    assert spec.cardinalities[1] == len(ends) + 1 == 65
    x = filled(values)
    expected = np.where(np.isnan(x), 0, np.maximum(np.digitize(x, ends), 1))
    ids = np.concatenate([np.stack(read(data, split)["ids"], 1) for split in HELD_OUT])
    np.testing.assert_array_equal(ids[:, 1], expected[TRAIN:])
    np.testing.assert_array_equal(ids[:, 2], np.arange(TRAIN, ROWS) % 5 + 1)
    facts = json.loads((data / "prepare.json").read_text())["features"]
    assert list(facts) == ["c", "x.bin", "few.bin"]
    assert facts["x.bin"]["missing_share"] == pytest.approx(np.isnan(x).mean())


@pytest.mark.parametrize("numerical", ["x,few,one", "x:auto,few:auto,one:auto"])
def test_auto_takes_every_finite_number_and_says_what_it_chose(
    numerical: str, tmp_path: Path
) -> None:
    values = skewed()
    values[:3] = [1e308, -1e308, 5e-324]
    columns = {"x": values, "few": [i % 5 for i in range(ROWS)], "one": [7e9] * ROWS}
    write_csv(tmp_path / "log.csv", **columns)
    data = prepare(tmp_path, numerical)
    facts = facts_of(data)
    assert facts["x"]["reading"].endswith("missing")
    assert "missing" not in facts["few"]["reading"]
    for split in ("train", *HELD_OUT):
        assert np.abs(read(data, split)["numerical"].astype(np.float64)).max() < 30
    recorded = json.loads((data / "vocabulary" / "vocabulary.json").read_text())["inputs"]
    found = {use["column"]: use["reading"] for use in recorded["columns"]}
    assert {name: found[name] for name in facts} == {n: f["reading"] for n, f in facts.items()}


@pytest.mark.parametrize("reading", ["plain", "auto", "log", "quantile+bins"])
def test_integers_of_any_size_are_taken(reading: str, tmp_path: Path) -> None:
    """Of Parquet, which has 64 bits of them: more than float64 holds exactly."""
    values = [2**63 - 1 - 3 * i for i in range(70)]
    table = {
        "y": [i % 2 for i in range(70)],
        "x": values,
        "big": [2**64 - 1] * 70,
        "new": [True] * 70,
    }
    kinds = [pa.int8(), pa.int64(), pa.uint64(), pa.bool_()]
    schema = pa.schema(list(zip(table, kinds, strict=True)))
    pq.write_table(pa.table(table, schema=schema), tmp_path / "log.parquet")
    columns = ",".join(f"{name}:{reading}" for name in ("x", "big", "new"))
    described = f"label=y numerical={columns}"
    log, data = tmp_path / "log.parquet", tmp_path / "data"
    facts = facts_of(prepare_log(log, data, columns=described))
    assert facts["x"]["maximum"] == pytest.approx(2.0**63)
    assert facts["big"]["minimum"] == 2.0**64
    assert facts["new"]["maximum"] == 1


def test_a_default_for_all_numbers(tmp_path: Path) -> None:
    write_csv(tmp_path / "log.csv", x=list(range(ROWS)), z=list(range(ROWS)))
    data = prepare(tmp_path, "x,z:plain", numerical="log")
    assert {name: fact["reading"] for name, fact in facts_of(data).items()} == {
        "x": "log",
        "z": "plain",
    }
    np.testing.assert_allclose(held_out(data)[:, 0], np.log(np.arange(TRAIN, ROWS) + 3), rtol=1e-6)
    with pytest.raises(InputError, match="--numerical is 'cube'; expected auto, plain, log"):
        prepare(tmp_path, "x", numerical="cube")
    with pytest.raises(InputError, match="Unknown way to read the numerical column x"):
        prepare(tmp_path, "x:log+plain")


def test_numbers_alone_are_enough(tmp_path: Path) -> None:
    """Also where they have no bins: then there is no table."""
    write_csv(tmp_path / "log.csv", x=skewed(), z=[i % 7 for i in range(ROWS)])
    for number, (asked, tables) in enumerate({"x,z": 1, "x": 0, "x:bins,z:bins": 2}.items()):
        data = prepare(tmp_path, "", columns=f"label=y numerical={asked}")
        assert len(feature_spec.read(data).categorical) == tables
        values = raw_values.open_dataset(data)
        assert values is not None
        row = [1.5] * len(values.numerical)
        encoded = values.encode([row, row], [[], []])
        assert [part.shape[1] for part in encoded] == [
            len(feature_spec.read(data).numerical),
            tables,
        ]
        again = encode(str(tmp_path / "log.csv"), data, tmp_path / f"again {number}")
        assert identity.of_dataset(again) == identity.of_dataset(data)
        data.rename(tmp_path / f"first {number}")


def test_a_column_that_is_called_as_bins_are(tmp_path: Path) -> None:
    columns = {"x": skewed(), "x.bin": ["a", "b"] * (ROWS // 2)}
    write_csv(tmp_path / "log.csv", **columns)
    with pytest.raises(InputError, match=r"both 'x\.bin'.*numerical=x:standard"):
        prepare(tmp_path, "x:standard+bins categorical=x.bin")


@pytest.mark.parametrize("fast", [True, False])
def test_the_bytes_do_not_depend_on_memory_threads_or_numba(
    fast: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if fast:
        pytest.importorskip("numba")
    monkeypatch.setattr(numbers, "SAMPLE_ROWS", 400)  # so that it is a sample
    monkeypatch.setattr(shuffle, "BUCKET_ROWS", 64)
    write_csv(tmp_path / "log.csv", x=skewed(), z=skewed(1, missing=0))
    first = prepare(tmp_path, "x,z:standard+bins")
    first.rename(tmp_path / "first")
    monkeypatch.setattr(primitives, "FAST", fast)
    small = Limits(memory=1 << 20, workers=3, piece_bytes=1 << 10)
    monkeypatch.setattr(Limits, "of", lambda memory: small)
    again = prepare(tmp_path, "x,z:standard+bins")
    assert files(again) == files(tmp_path / "first")


def test_a_killed_run_goes_on_with_what_was_fitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_csv(tmp_path / "log.csv", x=skewed())
    prepare(tmp_path, "x").rename(tmp_path / "first")
    with monkeypatch.context() as patch:
        patch.setattr(columns, "NumbersField", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            prepare(tmp_path, "x")
    fitted: list[int] = []
    monkeypatch.setattr(numbers, "fit", lambda *args: fitted.append(1))
    assert files(prepare(tmp_path, "x")) == files(tmp_path / "first")
    assert not fitted


READINGS = "a:auto,b:plain,c1:log,d:signed_log+missing,e:standard,f:quantile+bins+missing,g:bins"


def test_a_served_row_is_the_prepared_row(tmp_path: Path) -> None:
    names = [column.split(":")[0] for column in READINGS.split(",")]
    columns = {name: skewed(seed, missing=0.3) for seed, name in enumerate(names)}
    columns["b"][-1] = 16_777_217.0
    write_csv(tmp_path / "log.csv", **columns)
    data = prepare(tmp_path, READINGS)
    values = raw_values.open_dataset(data)
    assert values is not None
    assert values.numerical == tuple(names)
    rows = [[columns[name][row] for name in names] for row in range(TRAIN, ROWS)]
    texts = [["ab"[row % 2]] for row in range(TRAIN, ROWS)]
    found_numbers, found_ids = values.encode(rows, texts)
    np.testing.assert_array_equal(found_numbers, held_out(data))
    ids = np.concatenate([np.stack(read(data, split)["ids"], 1) for split in HELD_OUT])
    np.testing.assert_array_equal(found_ids, ids)
    assert len(values.tables) == ids.shape[1]
    encoded = values.encode(([None] * len(names),), [["a"]])
    assert encoded[0].sum() == 3  # the three indicators
    assert (encoded[1][0][1:] == 0).all()


def test_what_was_fitted_is_part_of_the_identity(tmp_path: Path) -> None:
    folders = []
    for number, scale in enumerate((1.0, 1.0, 2.0)):
        folder = tmp_path / str(number)
        folder.mkdir()
        values = [None if value is None else value * scale for value in skewed()]
        write_csv(folder / "log.csv", x=values)
        folders.append(prepare(folder, "x:quantile+bins+missing"))
    first, same, other = (identity.of_dataset(folder) for folder in folders)
    assert [line.split()[:2] + line.split()[-1:] for line in first] == [
        ["numerical", "quantile", "x"],
        ["numerical", "missing", "x.missing"],
        ["categorical", "string", "c"],
        ["categorical", "bins", "x.bin"],
    ]
    assert first == same
    assert (
        identity.difference(first, other) == "its numerical column 'x' was fitted to other numbers"
    )


def test_other_days_are_read_with_what_was_fitted(tmp_path: Path) -> None:
    names = [column.split(":")[0] for column in READINGS.split(",")]
    columns = {name: skewed(seed, missing=0.3) for seed, name in enumerate(names)}
    write_csv(tmp_path / "log.csv", **columns)
    first = prepare(tmp_path, READINGS)
    later = tmp_path / "later"
    later.mkdir()
    last = {name: column[TRAIN:] for name, column in columns.items()}
    write_csv(later / "log.csv", **dict(reversed(last.items())))
    again = prepare(later, "", columns=None, vocabulary=first, holdout="0.5")
    whole = encode(str(later / "log.csv"), first, tmp_path / "whole")
    np.testing.assert_array_equal(read(whole, "test")["numerical"], held_out(first))
    np.testing.assert_array_equal(held_out(again), held_out(first)[50:])
    for data in (again, whole):
        assert identity.of_dataset(data) == identity.of_dataset(first)
    with pytest.raises(InputError, match=r"--numerical is log, but numbers are read as in"):
        prepare(later, "", columns=None, vocabulary=first, numerical="log")
    with pytest.raises(InputError, match=r"reads 'f' as log; .* has it as quantile"):
        prepare(later, READINGS.replace("f:quantile+bins+missing", "f:log"), vocabulary=first)
