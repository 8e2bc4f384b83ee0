"""`prepare synthetic`: the three formats hold the same rows, and a folder is written once."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.unit.test_prepare_npy import read
from trainmark.clickdata import feature_spec, spec_rules, terabyte
from trainmark.clickdata.numerical import MISSING, log_transform
from trainmark.clickdata.planted import BLOCK_ROWS, PlantedClicks
from trainmark.clicklog import synthetic, synthetic_blocks
from trainmark.clicklog.engine.splits import Split
from trainmark.clicklog.synthetic_files import Raw
from trainmark.errors import InputError

ROWS, DAYS = 5003, 5  # days of 1000 rows, the last of 1003


def prepare(output: Path, **options: Any) -> Path:
    options = {"rows": ROWS, "days": DAYS, "seed": 3} | options
    synthetic.prepare(synthetic.Options(output=output, **options))
    return output


@pytest.fixture(scope="module")
def log() -> PlantedClicks:
    return PlantedClicks(seed=3)


def test_raw_text_is_the_log(log: PlantedClicks, tmp_path: Path) -> None:
    output = prepare(tmp_path / "raw")
    names = sorted(path.name for path in output.iterdir())
    days = ["day_0", "day_1", "day_2", "day_3", "day_4"]
    assert names == ["checksums.json", *days, "synthetic.json"]
    texts = [(output / f"day_{day}").read_bytes().decode("ascii") for day in range(DAYS)]
    assert [text.count("\n") for text in texts] == [1000, 1000, 1000, 1000, 1003]
    assert all(text.endswith("\n") for text in texts)
    rows = log.rows(0, ROWS)
    values = [log.values(column, ids) for column, ids in enumerate(rows.categorical)]
    for i, line in enumerate("".join(texts).splitlines()):
        counts = ["" if x == MISSING else str(x) for x in rows.numerical[i]]
        categories = [f"{values[c][i]:08x}" if rows.categorical[c, i] else "" for c in range(26)]
        assert line.split("\t") == [str(int(rows.labels[i])), *counts, *categories]


def test_raw_text_has_what_is_hard_to_read(tmp_path: Path) -> None:
    text = (prepare(tmp_path / "raw") / "day_0").read_text()
    assert "\t\t" in text
    assert "\t-2\t" in text
    assert re.search(r"\t[0-9]+e[0-9]+\t", text), "a value that looks like a number in E notation"


def test_split_binary_is_the_log(log: PlantedClicks, tmp_path: Path) -> None:
    output = prepare(tmp_path / "data", format="split_binary")
    manifest = json.loads((output / "synthetic.json").read_text())
    bounds = {"train": (0, 4000), "test": (4000, 4501), "validation": (4501, 5003)}
    for mapping, (start, stop) in bounds.items():
        spec = feature_spec.read(feature_spec.path_of(output, mapping))
        assert spec.metadata == {"best_auc": manifest["best_auc"]}
        rows, stored = log.rows(start, stop), read(output, mapping)
        assert stored["cardinalities"] == log.cardinalities
        np.testing.assert_array_equal(stored["labels"], rows.labels)
        np.testing.assert_array_equal(stored["numerical"], log_transform(rows.numerical))
        np.testing.assert_array_equal(np.stack(stored["ids"]), rows.categorical)


def test_npy_is_the_log(log: PlantedClicks, tmp_path: Path) -> None:
    output = prepare(tmp_path / "npy", format="npy")
    for day, (start, stop) in enumerate([(0, 1000), (1000, 2000), (2000, 3000), (3000, 4000)]):
        rows = log.rows(start, stop)
        labels, dense, sparse = (
            np.load(output / f"day_{day}_{kind}.npy") for kind in ("labels", "dense", "sparse")
        )
        assert (labels.dtype, dense.dtype, sparse.dtype) == (np.int32, np.float32, np.int32)
        np.testing.assert_array_equal(labels, rows.labels[:, None])
        np.testing.assert_array_equal(sparse, rows.categorical.T)
        zero_for_missing = np.where(rows.numerical == MISSING, 0, rows.numerical)
        np.testing.assert_allclose(dense, np.log(zero_for_missing + 3.0), rtol=1e-6)
    assert np.load(output / "day_4_labels.npy").shape == (1003, 1)


def test_other_shapes_and_blocks(tmp_path: Path) -> None:
    rows = BLOCK_ROWS + 100
    output = prepare(
        tmp_path, format="split_binary", rows=rows, days=2, cardinalities=(7, 300), num_numerical=0
    )
    spec = feature_spec.read(output)
    spec_rules.check(spec)
    assert feature_spec.count_rows(spec, output, "train") == rows // 2
    assert spec.cardinalities == (7, 300)
    assert not (output / "train" / "numerical.bin").exists()


def test_manifest_and_table_show_the_best_auc(
    tmp_path: Path, log: PlantedClicks, capsys: pytest.CaptureFixture[str]
) -> None:
    output = prepare(tmp_path / "raw")
    manifest = json.loads((output / "synthetic.json").read_text())
    assert manifest["best_auc"] == log.best_auc(4000, 5003)
    assert manifest["best_auc_all_days"] == log.best_auc(0, 5003)
    assert manifest["click_rate"] == log.rows(0, 5003).labels.mean()
    assert manifest["settings"]["seed"] == 3
    assert f"{manifest['best_auc']:.4f}" in capsys.readouterr().out


def test_second_run_changes_nothing_and_other_settings_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = prepare(tmp_path / "raw")
    before = {path: path.stat().st_mtime_ns for path in output.iterdir()}
    prepare(output)
    assert "already holds this log" in capsys.readouterr().out
    with pytest.raises(InputError, match=r"other settings \(seed: 3 there, 4 now\)"):
        prepare(output, seed=4)
    assert before == {path: path.stat().st_mtime_ns for path in output.iterdir()}


def test_interrupted_run_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(synthetic.files, "write_json", interrupt)
    with pytest.raises(KeyboardInterrupt):
        prepare(tmp_path / "raw")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"days": 1}, "--days is 1; at least 2"),
        ({"rows": 9}, "--rows is 9; at least 2 per day"),
        ({"seed": -1}, "--seed is -1"),
        ({"num_numerical": -1, "format": "npy"}, "--num-numerical is -1"),
        ({"cardinalities": (5, 1), "format": "npy"}, "--cardinalities has 1; at least 2"),
        ({"cardinalities": (5,)}, "13 integer and 26 categorical columns, not 13 and 1"),
        ({"rows": 4, "days": 2}, "no AUC can be measured"),
        ({"days": 0, "seed": -1}, "(?s)2 problems:.*--days is 0.*--seed is -1"),
    ],
)
def test_bad_options(options: dict, message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        prepare(tmp_path / "raw", **options)
    assert list(tmp_path.iterdir()) == []


def test_output_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="is a file; expected a folder"):
        prepare(tmp_path / "file")
    with pytest.raises(InputError, match="cannot be written"):
        prepare(tmp_path / "file" / "raw")


def test_a_log_without_a_signal_sets_no_target(tmp_path: Path) -> None:
    output = prepare(tmp_path / "log", format="split_binary", ids="uniform", signal=False)
    assert "best_auc" not in feature_spec.read(output).metadata


# --- the planted Terabyte


def test_the_terabyte_is_written_with_its_last_day_from_the_held_out_rows(tmp_path: Path) -> None:
    sizes = tuple(min(v, 1000) for v in terabyte.VOCABULARY)
    output = prepare(
        tmp_path / "data", like="terabyte", seed=0, format="split_binary", cardinalities=sizes
    )
    held_out = terabyte.TRAIN_ROWS
    expected = {"train": terabyte.rows(0, 4000), "test": terabyte.rows(held_out, held_out + 501)}
    for mapping, rows in expected.items():
        stored = read(output, mapping)
        assert stored["cardinalities"] == sizes
        np.testing.assert_array_equal(stored["labels"], rows.labels)
        np.testing.assert_array_equal(stored["numerical"], terabyte.inputs(rows))
        known = np.where(rows.categorical < np.array(sizes)[:, None], rows.categorical, 0)
        np.testing.assert_array_equal(np.stack(stored["ids"]), known)
    manifest = json.loads((output / "synthetic.json").read_text())
    assert manifest["best_auc"] == terabyte.best_auc(held_out, held_out + 1003)


def test_raw_days_of_the_terabyte_have_a_text_for_every_value(tmp_path: Path) -> None:
    output = prepare(tmp_path / "raw", like="terabyte", seed=0)
    lines = (output / "day_0").read_text().splitlines()
    rows = terabyte.rows(0, 1000)
    for column in (0, 19):
        texts = [line.split("\t")[14 + column] for line in lines]
        ids = rows.categorical[column]
        assert [text == "" for text in texts] == [i == 0 for i in ids]
        assert len(set(texts)) == len(set(ids.tolist())) > 500


@pytest.mark.parametrize("form", ["raw", "split_binary", "npy"])
def test_processes_write_what_one_does(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(synthetic_blocks, "BLOCK_ROWS", 400)
    for workers in (1, 2):
        prepare(tmp_path / str(workers), like="terabyte", seed=0, format=form, workers=workers)
    one, two = (
        {p.relative_to(f): p.read_bytes() for p in f.rglob("*") if p.is_file()}
        for f in (tmp_path / "1", tmp_path / "2")
    )
    assert one == two
    assert len(one) > 5


class FailsLate(Raw):
    """Of the blocks of two processes, the second cannot be written."""

    def write(self, folder: Path, piece: Split, place: int, block: Any) -> None:
        if place > 0:
            raise OSError(28, "No space left on device")
        super().write(folder, piece, place, block)


def test_a_process_that_fails_ends_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(synthetic_blocks, "BLOCK_ROWS", 400)
    monkeypatch.setitem(synthetic.FORMATS, "raw", FailsLate)
    with pytest.raises(InputError, match="cannot be written: No space left on device"):
        prepare(tmp_path / "raw", like="terabyte", seed=0, workers=2)
    assert list(tmp_path.iterdir()) == []


def test_a_terabyte_that_there_is_not_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"178,274,637 for the last day. Received: --rows 9,000,000"
    ):
        prepare(tmp_path / "raw", like="terabyte", seed=0, rows=9_000_000_000, days=2)
    with pytest.raises(InputError, match=r"--seed is for --like demo.*26 categorical|26 categor"):
        prepare(tmp_path / "raw", like="terabyte", seed=3, cardinalities=(10, 20))
    with pytest.raises(InputError, match="--workers is 0; at least 1"):
        prepare(tmp_path / "raw", workers=0)
    assert list(tmp_path.iterdir()) == []
