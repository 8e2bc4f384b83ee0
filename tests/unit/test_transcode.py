"""Data that a feature specification describes: NVIDIA's transcoding, without its faults."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import yaml

from trainmark.clickdata import feature_spec, spec_rules
from trainmark.clicklog import transcode
from trainmark.errors import InputError

CARDINALITIES = {"a": 10, "b": "auto", "c": 45000}
"""Declared for a and c; found for b."""


def columns(rows: int, seed: int) -> dict[str, list[Any]]:
    random = np.random.default_rng(seed)
    return {
        "clicked": random.integers(0, 2, rows).tolist(),
        "x": random.random(rows).round(3).tolist(),
        "y": (random.random(rows) * 100).round(2).tolist(),
        "a": random.integers(0, 10, rows).tolist(),
        "b": (random.permutation(rows) % 300).tolist(),
        "c": random.integers(0, 45000, rows).tolist(),
    }


# As in NVIDIA's own test, the chunks differ between the mappings; and one has several files.
CHUNKS = {
    "train": [(["a", "x", "clicked"], 2), (["y"], 1), (["c", "b"], 3)],
    "test": [(["clicked", "a", "b", "c", "y", "x"], 1)],
}
ROWS = {"train": 1000, "test": 400}


def describe(kind: str, **changes: Any) -> dict[str, Any]:
    features = {name: {"cardinality": c} for name, c in CARDINALITIES.items()}
    chunks = {
        mapping: [
            {
                "type": kind,
                "features": list(names),
                "files": [f"{mapping}_{number}_{part}.{kind}" for part in range(parts)],
            }
            for number, (names, parts) in enumerate(of_mapping)
        ]
        for mapping, of_mapping in CHUNKS.items()
    }
    spec = {
        "feature_spec": {"clicked": {}, "x": {}, "y": {}, **features},
        "source_spec": chunks,
        "channel_spec": {
            "label": ["clicked"],
            "numerical": ["x", "y"],
            "categorical": ["a", "b", "c"],
        },
    }
    return spec | changes


def write_file(path: Path, names: list[str], data: dict[str, list[Any]]) -> None:
    if path.suffix == ".parquet":
        pa.parquet.write_table(pa.table({name: data[name] for name in names}), path)
    else:
        # A file that holds a float column has all its numbers written as floats.
        form = (lambda v: str(float(v))) if {"x", "y"} & set(names) else str
        rows = zip(*(data[name] for name in names), strict=True)
        path.write_text("".join(",".join(map(form, row)) + "\n" for row in rows))


def write_input(base: Path, kind: str, spec: dict[str, Any] | None = None) -> Path:
    spec = spec or describe(kind)
    base.mkdir(exist_ok=True)
    for seed, mapping in enumerate(spec["source_spec"]):
        data = columns(ROWS[mapping], seed)
        for chunk in spec["source_spec"][mapping]:
            bounds = np.linspace(0, ROWS[mapping], len(chunk["files"]) + 1).astype(int)
            for file, start, stop in zip(chunk["files"], bounds[:-1], bounds[1:], strict=True):
                part = {name: values[start:stop] for name, values in data.items()}
                write_file(base / file, chunk["features"], part)
    (base / "feature_spec.yaml").write_text(yaml.dump(spec))
    return base


def run(base: Path, kind: str = "csv") -> Path:
    output = base.parent / "data"
    transcode.prepare(base, output, kind)
    return output


def test_numbers_are_float32_where_the_specification_has_that(tmp_path: Path) -> None:
    spec = describe("csv")
    for name in ("x", "y"):
        spec["feature_spec"][name]["dtype"] = "float32"
    base = write_input(tmp_path / "input", "csv", spec)
    path = base / "train_1_0.csv"
    path.write_text(path.read_text().replace(path.read_text().split("\n")[0], "16777215.0", 1))
    written = feature_spec.read(run(base))
    spec_rules.check(written)
    assert written.numerical_dtype == "float32"
    rows = np.fromfile(tmp_path / "data" / "train" / "numerical.bin", np.float32).reshape(-1, 2)
    expected = np.array(columns(ROWS["train"], 0)["y"], np.float32)
    expected[0] = 16777215
    np.testing.assert_array_equal(rows[:, 1], expected)


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_every_value_arrives(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transcode, "BATCH_ROWS", 64)
    output = run(write_input(tmp_path / "input", kind), kind)
    spec = feature_spec.read(output)
    spec_rules.check(spec)
    assert spec.cardinalities == (10, 300, 45000)
    assert [spec.feature_spec[name].dtype for name in spec.categorical] == [
        "int8",
        "int16",
        "int32",
    ]
    for seed, (mapping, rows) in enumerate(ROWS.items()):
        assert feature_spec.count_rows(spec, output, mapping) == rows
        data, files = columns(rows, seed), spec.files(mapping)
        labels = np.fromfile(output / files["label"], bool)
        np.testing.assert_array_equal(labels, np.array(data["clicked"], bool))
        numbers = np.fromfile(output / files["num_0"], np.float16).reshape(rows, 2)
        expected = np.array([data["x"], data["y"]]).T.astype(np.float16)
        np.testing.assert_array_equal(numbers, expected)
        for name, original in zip(spec.categorical, "abc", strict=True):
            ids = np.fromfile(output / files[name], spec.feature_spec[name].dtype)
            np.testing.assert_array_equal(ids, data[original])


def test_a_second_run_does_not_double_the_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = write_input(tmp_path / "input", "csv")
    output = run(base)
    before = {path: path.stat().st_mtime_ns for path in output.rglob("*")}
    run(base)
    assert "already holds this dataset" in capsys.readouterr().out
    assert before == {path: path.stat().st_mtime_ns for path in output.rglob("*")}
    assert json.loads((output / "prepare.json").read_text())["rows"] == ROWS


def test_chunks_of_unequal_length(tmp_path: Path) -> None:
    base = write_input(tmp_path / "input", "csv")
    with (base / "train_1_0.csv").open("a") as file:
        file.write("1.5\n")
    with pytest.raises(InputError, match=r"train differ in rows: .*1,000; train_1_0.csv: 1,001"):
        run(base)
    assert not (tmp_path / "data").exists()


def test_declared_cardinality_must_suffice(tmp_path: Path) -> None:
    spec = describe("csv")
    spec["feature_spec"]["a"]["cardinality"] = 9
    base = write_input(tmp_path / "input", "csv", spec)
    with pytest.raises(InputError, match="'a' has id 9, but its cardinality is 9"):
        run(base)


@pytest.mark.parametrize(
    ("file", "line", "message"),
    [
        ("train_0_0.csv", "-1.0,0.5,1.0", r"train_0_0.csv: row 7 has -1 for 'a'; an id"),
        ("train_0_0.csv", "1.5,0.5,1.0", r"train_0_0.csv: row 7 has 1.5 for 'a'; an id"),
        ("train_0_1.csv", "1.0,0.5,2.0", r"of train has label 2; 0 or 1 is expected"),
        ("train_0_0.csv", "1.0,1e9,0.0", r"of train has 1e\+09 for 'x'; a number within float16"),
        ("train_0_0.csv", "1.0,high,0.0", r"train_0_0.csv: .*invalid value 'high'"),
        ("train_0_0.csv", "1.0,0.5", r"train_0_0.csv: .*Expected 3 columns, got 2"),
    ],
)
def test_bad_values_are_named(file: str, line: str, message: str, tmp_path: Path) -> None:
    base = write_input(tmp_path / "input", "csv")
    lines = (base / file).read_text().splitlines()
    (base / file).write_text("\n".join([*lines[:6], line, *lines[7:]]) + "\n")
    with pytest.raises(InputError, match=message):
        run(base)


def test_bad_specifications_are_named(tmp_path: Path) -> None:
    """Among them the README's generic example, with channels of its own."""
    base = write_input(tmp_path / "input", "csv")
    spec = describe("csv")
    del spec["source_spec"]["test"][0]["features"][1]
    spec["feature_spec"]["c"] = {}
    spec["source_spec"]["train"][1]["type"] = "tfrecord"
    (base / "feature_spec.yaml").write_text(yaml.dump(spec))
    with pytest.raises(InputError) as error:
        run(base)
    for problem in (
        "source_spec test holds feature 'a' 0 times",
        "categorical feature 'c' needs a cardinality, or auto; it has none",
        "source_spec train, chunk 1 has type 'tfrecord'; 'trainmark prepare csv' reads csv",
    ):
        assert problem in str(error.value)
    spec = describe("csv", channel_spec={"numeric_inputs": ["x", "y"], "label_ch": ["clicked"]})
    (base / "feature_spec.yaml").write_text(yaml.dump(spec))
    with pytest.raises(InputError, match="should have exactly the channels categorical, numerical"):
        run(base)
    (base / "feature_spec.yaml").write_text(yaml.dump(describe("csv")))
    (base / "train_2_1.csv").unlink()
    with pytest.raises(InputError, match=r"train_2_1\.csv does not exist"):
        run(base)
