"""Raw files as a dataset for a model: every row, by the settings of what it learned from."""

import gzip
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.unit.criteo_oracle import random_lines, write_day
from tests.unit.logs import prepare_log
from tests.unit.test_prepare_engine import prepare as prepare_criteo
from tests.unit.test_prepare_npy import read
from tests.unit.test_prepare_vocabulary import NAMES, OLD, old, write
from trainmark.clickdata import feature_spec, identity
from trainmark.clicklog import raw_values
from trainmark.clicklog.encode import encode
from trainmark.errors import InputError

__all__ = ["old"]  # a fixture


def test_every_row_in_its_order_as_a_request_is_encoded(old: Path, tmp_path: Path) -> None:
    log = write(tmp_path / "new.csv", OLD[::-1])
    data = encode(log, old, tmp_path / "encoded")
    assert identity.of_dataset(data) == identity.of_dataset(old)
    assert not (data / "feature_spec_validation.yaml").exists()
    spec = feature_spec.read(data)
    assert feature_spec.count_rows(spec, data, "test") == len(OLD)
    with pytest.raises(InputError, match=r"train/label.bin is empty"):
        feature_spec.count_rows(spec, data, "train")
    found = read(data, "test")
    encoder = raw_values.open_dataset(old)
    assert encoder is not None
    numbers, ids = encoder.encode(
        [[age] for *_, age in OLD[::-1]], [[user, city] for _, user, city, _ in OLD[::-1]]
    )
    assert np.array_equal(found["numerical"], numbers)
    assert np.array_equal(np.stack(found["ids"], 1), ids)
    assert found["labels"].tolist() == [bool(row[0]) for row in OLD[::-1]]
    encode(log, old, tmp_path / "encoded")  # is there already


def test_formats_and_several_files(old: Path, tmp_path: Path) -> None:
    table = pa.table({name: list(v) for name, v in zip(NAMES, zip(*OLD, strict=True), strict=True)})
    pq.write_table(table, tmp_path / "new.parquet")
    whole = read(encode(str(tmp_path / "new.parquet"), old, tmp_path / "a"), "test")
    write(tmp_path / "part_1.csv", OLD[:5])
    write(tmp_path / "part_2.csv", OLD[5:])
    parts = read(encode((str(tmp_path / "part_{1,2}.csv"),), old, tmp_path / "b"), "test")
    for name in ("labels", "numerical", "ids"):
        assert np.array_equal(np.stack(whole[name]), np.stack(parts[name]))


def test_delimiter_header_and_missing_are_the_datasets(tmp_path: Path) -> None:
    lines = [f"{i % 2};NA;{i % 3}" for i in range(28)]
    (tmp_path / "log.csv").write_text("\n".join(lines) + "\n")
    options: dict[str, Any] = {"columns": "label=1 numerical=2 categorical=3", "header": False}
    options |= {"delimiter": ";", "missing": ("NA",)}
    data = prepare_log(tmp_path / "log.csv", tmp_path / "data", **options)
    encoded = encode(str(tmp_path / "log.csv"), data, tmp_path / "encoded")
    assert read(encoded, "test")["labels"].tolist() == [i % 2 == 1 for i in range(28)]


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
def test_a_header_says_what_divides_other_files(delimiter: str, tmp_path: Path) -> None:
    """evaluate and predict have no --delimiter."""
    log = tmp_path / "log.csv"
    lines = ["clicked;age;city"] + [f"{i % 2};{i};{i % 3}" for i in range(28)]
    log.write_text("\n".join(lines) + "\n")
    options: dict[str, Any] = {"columns": "label=clicked numerical=age categorical=city"}
    options |= {"delimiter": ";"}
    data = prepare_log(log, tmp_path / "data", **options)
    log.write_text(log.read_text().replace(";", delimiter))
    encoded = encode(str(log), data, tmp_path / "encoded")
    assert read(encoded, "test")["labels"].tolist() == [i % 2 == 1 for i in range(28)]
    (tmp_path / "empty.csv.gz").write_bytes(gzip.compress(b""))
    both = (str(tmp_path / "empty.csv.gz"), str(log))
    encoded = encode(both, data, tmp_path / "both", bad_rows="skip")
    assert len(read(encoded, "test")["labels"]) == 28


def test_criteo(tmp_path: Path) -> None:
    lines = random_lines(random.Random(5), 90)
    write_day(tmp_path / "day_0", lines)
    data = prepare_criteo(tmp_path / "day_0", tmp_path / "data", recipe="dlrm", max_rows="7")
    encoded = encode(str(tmp_path / "day_0"), data, tmp_path / "encoded")
    found, held_out = read(encoded, "test"), read(data, "validation")
    rows = len(held_out["labels"])
    for name in ("labels", "numerical"):
        assert np.array_equal(found[name][-rows:], held_out[name])
    assert np.array_equal(np.stack(found["ids"])[:, -rows:], np.stack(held_out["ids"]))


def test_what_cannot_be_encoded(old: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="No file matches"):
        encode(str(tmp_path / "none.csv"), old, tmp_path / "x")
    with pytest.raises(InputError, match=r"there is no vocabulary\.json"):
        encode(write(tmp_path / "new.csv", OLD), tmp_path, tmp_path / "x")


def test_files_without_rows(old: Path, tmp_path: Path) -> None:
    log = write(tmp_path / "new.csv", [])
    with pytest.raises(InputError, match="The files of --input have no rows"):
        encode((log,), old, tmp_path / "encoded")


def test_groups_are_written_where_the_files_have_them(tmp_path: Path) -> None:
    names = (*NAMES, "session")
    rows = [(*row, f"s{i % 5}") for i, row in enumerate(OLD)]
    log = write(tmp_path / "log.csv", rows, names)
    columns = "label=clicked numerical=age categorical=user:int64,city"
    data = tmp_path / "data"
    prepare_log(tmp_path / "log.csv", data, columns=columns, group="session:string")
    encoded = encode(log, data, tmp_path / "encoded")
    groups = np.fromfile(encoded / "test" / "group.bin", "<i4").tolist()
    assert len(set(zip(groups, (row[-1] for row in rows), strict=True))) == len(set(groups)) == 5
    without = encode(write(tmp_path / "new.csv", OLD), data, tmp_path / "without")
    assert not (without / "test" / "group.bin").exists()
