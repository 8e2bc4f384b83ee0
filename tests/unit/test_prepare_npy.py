"""`prepare npy`: what TorchRec writes becomes a dataset, and TorchRec reads what we write."""

import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.unit import criteo_oracle
from trainmark.clickdata import feature_spec, spec_rules
from trainmark.clicklog import criteo, npy, npy_files, synthetic
from trainmark.clicklog.engine.encode_phase import Encoder
from trainmark.errors import InputError


def write_day(folder: Path, day: int, *, dense: Any, sparse: Any, labels: Any) -> None:
    folder.mkdir(exist_ok=True)
    np.save(folder / f"day_{day}_dense.npy", dense)
    np.save(folder / f"day_{day}_sparse.npy", sparse)
    np.save(folder / f"day_{day}_labels.npy", labels)


def random_day(
    rows: int, seed: int, dtype: str = "int32", low: int = 0, high: int = 1000, columns: int = 26
) -> dict[str, NDArray[Any]]:
    generator = np.random.default_rng(seed)
    return {
        "dense": generator.random((rows, 13), np.float32) * 20,
        "sparse": generator.integers(low, high, (rows, columns)).astype(dtype),
        "labels": generator.integers(0, 2, (rows, 1)).astype(np.int32),
    }


def prepare(folder: Path, **options: Any) -> Path:
    output = folder.parent / f"{folder.name}_data"
    npy.prepare(npy.Options(input=folder, output=output, **options))
    return output


def read(output: Path, mapping: str) -> dict[str, Any]:
    """A split through its specification: labels, numerical and ids, as arrays."""
    spec = feature_spec.read(feature_spec.path_of(output, mapping))
    spec_rules.check(spec, ("validation",) if mapping == "validation" else ("train", "test"))
    rows = feature_spec.count_rows(spec, output, mapping)
    files = spec.files(mapping)
    ids = []
    for name in spec.categorical:
        feature = spec.feature_spec[name]
        column = np.fromfile(output / files[name], feature.dtype)
        ids.append(column if feature.hotness == 1 else column.reshape(rows, feature.hotness))
    return {
        "labels": np.fromfile(output / files["label"], bool),
        "numerical": np.fromfile(output / files["num_0"], spec.numerical_dtype).reshape(rows, -1),
        "ids": ids,
        "cardinalities": spec.cardinalities,
    }


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_splits_and_values(dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(npy_files, "BLOCK_ROWS", 7)  # so that blocks and splits do not align
    days = {number: random_day(rows, number, dtype) for number, rows in ((2, 30), (9, 25), (10, 9))}
    for number, day in days.items():
        write_day(tmp_path / "npy", number, **day)
    output = prepare(tmp_path / "npy")
    expected = {
        "train": {k: np.concatenate([days[2][k], days[9][k]]) for k in days[2]},
        # TorchRec: the first half, rounded up, is for validation.
        "validation": {k: v[:5] for k, v in days[10].items()},
        "test": {k: v[5:] for k, v in days[10].items()},
    }
    for mapping, arrays in expected.items():
        found = read(output, mapping)
        np.testing.assert_array_equal(found["labels"], arrays["labels"][:, 0].astype(bool))
        np.testing.assert_array_equal(found["numerical"], arrays["dense"].astype(np.float16))
        np.testing.assert_array_equal(np.stack(found["ids"], 1), arrays["sparse"])
    largest = np.max([day["sparse"].max(axis=0) for day in days.values()], axis=0)
    assert found["cardinalities"] == tuple(int(value) + 1 for value in largest)
    summary = json.loads((output / "prepare.json").read_text())
    assert summary["rows"] == {"train": 55, "test": 4, "validation": 5}


def test_the_other_half_and_a_second_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    days = [random_day(rows, rows) for rows in (8, 5)]
    for number, day in enumerate(days):
        write_day(tmp_path / "npy", number, **day)
    output = prepare(tmp_path / "npy", test_half="first")
    np.testing.assert_array_equal(np.stack(read(output, "test")["ids"], 1), days[1]["sparse"][:3])
    prepare(tmp_path / "npy", test_half="first")
    assert "already holds this dataset" in capsys.readouterr().out
    with pytest.raises(InputError, match="other settings"):
        prepare(tmp_path / "npy")


def test_the_number_of_processes_changes_no_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(npy_files, "BLOCK_ROWS", 7)
    for number in range(3):
        write_day(tmp_path / "npy", number, **random_day(25, number))
    written = []
    for cores in (1, 2, 5):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: set(range(cores)))
        output = prepare(tmp_path / "npy", max_rows="20")
        written.append({p: p.read_bytes() for p in output.rglob("*") if p.is_file()})
        shutil.rmtree(output)
    assert len(written[0]) > 30
    assert written[0] == written[1] == written[2]


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_folding_is_the_remainder_of_what_is_stored(dtype: str, tmp_path: Path) -> None:
    """Hashes of 2**31 and above are negative in int32 files, and stay so until they are folded."""
    hashes = np.array([[5], [2**31 - 1], [2**31], [2**32 - 1]], np.int64)
    stored = hashes.astype(dtype)  # wraps for int32
    days = random_day(4, 0) | {"sparse": stored}
    for number in (0, 1):
        write_day(tmp_path / "npy", number, **days)
    with pytest.raises(InputError, match=r"categorical column 1 has ids from .* hashes, not rows"):
        prepare(tmp_path / "npy")
    output = prepare(tmp_path / "npy", max_rows="1000")
    found = read(output, "train")
    assert found["ids"][0].tolist() == [int(value) % 1000 for value in stored[:, 0].tolist()]
    assert found["cardinalities"] == (1000,)


def test_folding_per_column(tmp_path: Path) -> None:
    for number in (0, 1):
        write_day(tmp_path / "npy", number, **random_day(200, number, columns=3))
    found = read(prepare(tmp_path / "npy", max_rows="5000,C2=10"), "train")
    stored = np.load(tmp_path / "npy" / "day_0_sparse.npy")
    assert found["cardinalities"][1] == 10
    assert found["cardinalities"][0] <= 1000  # all ids fit: nothing is folded, no row is wasted
    np.testing.assert_array_equal(found["ids"][0], stored[:, 0])
    np.testing.assert_array_equal(found["ids"][1], stored[:, 1] % 10)


def test_several_ids_per_feature(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(npy_files, "BLOCK_ROWS", 7)
    generator = np.random.default_rng(0)
    hotness = (3, 1, 12)
    stored = []
    for number, rows in enumerate((40, 11)):
        day = random_day(rows, number)
        write_day(tmp_path / "npy", number, **day)
        (tmp_path / "npy" / f"day_{number}_sparse.npy").unlink()
        ids: Any = {
            str(i): generator.integers(0, 500, (rows, h), np.int32) for i, h in enumerate(hotness)
        }
        np.savez(tmp_path / "npy" / f"day_{number}_sparse_multi_hot.npz", **ids)
        stored.append(ids)
    output = prepare(tmp_path / "npy", max_rows="C3=100")
    spec = feature_spec.read(output)
    assert tuple(spec.feature_spec[name].hotness for name in spec.categorical) == hotness
    assert (output / "train" / "cat_0.bin").stat().st_size == 40 * 3 * 2
    train, test = read(output, "train"), read(output, "test")
    np.testing.assert_array_equal(train["ids"][0], stored[0]["0"])
    np.testing.assert_array_equal(train["ids"][1], stored[0]["1"][:, 0])
    np.testing.assert_array_equal(train["ids"][2], stored[0]["2"] % 100)
    np.testing.assert_array_equal(test["ids"][0], stored[1]["0"][6:])


def test_numbers_that_are_not_finite_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    day = random_day(6, 0)
    day["dense"][0, :3] = [np.nan, -np.inf, np.inf]
    for number in (0, 1):
        write_day(tmp_path / "npy", number, **day)
    output = prepare(tmp_path / "npy")
    assert read(output, "train")["numerical"][0, :3].tolist() == [0, 0, 0]
    assert "6 numbers were not finite" in capsys.readouterr().out


def test_written_days_come_back(tmp_path: Path) -> None:
    """The ids are compared as integers: float32 would round those above 2**24."""
    folder = tmp_path / "npy"
    folder.mkdir()
    ids = np.array([[2**24 + 1, 2**31 - 3, 7], [2**24 + 3, 3, 2**25 + 1]], np.int32)
    dense = np.array([[0.5], [1.5]], np.float32)
    for day in (0, 1):
        writer = npy_files.DayWriter(folder, day, 2, 1, 3)
        for row in range(2):
            writer.append(np.array([row]), dense[row : row + 1], ids[row : row + 1].T)
        del writer
    np.testing.assert_array_equal(np.load(folder / "day_1_sparse.npy"), ids)
    header = (folder / "day_0_sparse.npy").read_bytes()[:8]
    assert header[:8] == b"\x93NUMPY\x01\x00"
    found = read(prepare(folder), "train")
    np.testing.assert_array_equal(np.stack(found["ids"], 1), ids)


def test_days_have_their_place_on_the_disk_before_they_are_written(tmp_path: Path) -> None:
    """To fill a sparse file through memory, on a full disk, is the end of a process: SIGBUS."""
    npy_files.DayWriter(tmp_path, 0, 100_000, 1, 3)
    for path in tmp_path.iterdir():
        assert 512 * path.stat().st_blocks >= path.stat().st_size > 100_000


def test_generated_days_are_the_generated_dataset(tmp_path: Path) -> None:
    """Through npy or directly: the same ids and labels."""
    for form in ("npy", "split_binary"):
        options = synthetic.Options(output=tmp_path / form, format=form, rows=3000, days=3)
        synthetic.prepare(options)
    output = prepare(tmp_path / "npy", test_half="first")
    for mapping in ("train", "test", "validation"):
        through, direct = read(output, mapping), read(tmp_path / "split_binary", mapping)
        np.testing.assert_array_equal(through["labels"], direct["labels"])
        np.testing.assert_array_equal(np.stack(through["ids"]), np.stack(direct["ids"]))


@pytest.mark.parametrize("recipe", ["nvidia", "torchrec"])
def test_prepared_days_come_back(
    recipe: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Raw text to a dataset and to day files; and these to the same dataset."""
    synthetic.prepare(synthetic.Options(output=tmp_path / "raw", rows=3001, days=3))
    options = criteo.Options(
        input=str(tmp_path / "raw" / "day_*"),
        output=tmp_path / "data",
        recipe=recipe,
        to="npy",
    )
    criteo.prepare(options)
    days = tmp_path / "data" / "npy"
    assert len(list(days.glob("day_*.npy"))) == 9
    before = {path: path.stat().st_mtime_ns for path in days.iterdir()}
    criteo.prepare(options)
    assert before == {path: path.stat().st_mtime_ns for path in days.iterdir()}
    again = prepare(days)
    for mapping in ("train", "test", "validation"):
        direct, through = read(tmp_path / "data", mapping), read(again, mapping)
        for name in ("labels", "numerical"):
            np.testing.assert_array_equal(direct[name], through[name])
        np.testing.assert_array_equal(np.stack(direct["ids"]), np.stack(through["ids"]))


def test_a_day_that_torchrec_would_cut_otherwise_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recipe dlrm tests on the larger half of an odd day, TorchRec's loader on the smaller."""
    for day in range(2):
        lines = criteo_oracle.random_lines(random.Random(day), 31)
        criteo_oracle.write_day(tmp_path / f"day_{day}", lines)
    flags: dict[str, Any] = {"input": str(tmp_path / "day_*"), "recipe": "dlrm", "to": "npy"}
    with monkeypatch.context() as patch:
        patch.setattr(Encoder, "run", lambda encoder: pytest.fail("columns are written"))
        with pytest.raises(InputError, match=r"15 rows to validate and 16 to test.*--test-half"):
            criteo.prepare(criteo.Options(output=tmp_path / "data", **flags))
    named: dict[str, Any] = {"train": str(tmp_path / "day_0"), "test": str(tmp_path / "day_1")}
    with pytest.raises(InputError, match="needs a validation split: give --validation"):
        criteo.prepare(criteo.Options(output=tmp_path / "data", to="npy", **named))
    criteo.prepare(criteo.Options(output=tmp_path / "data", test_half="second", **flags))
    assert (tmp_path / "data" / "npy" / "day_1_dense.npy").exists()


# --- TorchRec itself


@pytest.fixture(scope="module")
def torchrec_pipe() -> Any:
    reason = "torchrec is not installed (`make test` installs it without its dependencies)"
    return pytest.importorskip("torchrec.datasets.criteo", reason=reason, exc_type=ImportError)


def torchrec_rows(module: Any, folder: Path, days: list[int], stage: str, **options: Any) -> Any:
    """Labels, dense and sparse [rows, 26] as TorchRec's own loader delivers them."""
    paths = {
        kind: [str(folder / f"day_{day}_{kind}.npy") for day in days]
        for kind in ("dense", "sparse", "labels")
    }
    pipe = module.InMemoryBinaryCriteoIterDataPipe(
        stage,
        paths["dense"],
        paths["sparse"],
        paths["labels"],
        batch_size=64,
        rank=0,
        world_size=1,
        **options,
    )
    batches = list(pipe)
    return (
        np.concatenate([batch.labels.numpy() for batch in batches]),
        np.concatenate([batch.dense_features.numpy() for batch in batches]),
        np.concatenate(
            [batch.sparse_features.values().numpy().reshape(26, -1).T for batch in batches]
        ),
    )


@pytest.mark.parametrize("mmap_mode", [False, True])
def test_torchrec_reads_what_we_write(torchrec_pipe: Any, mmap_mode: bool, tmp_path: Path) -> None:
    synthetic.prepare(synthetic.Options(output=tmp_path / "npy", format="npy", rows=999, days=3))
    output = prepare(tmp_path / "npy")
    for stage, mapping, days in (
        ("train", "train", [0, 1]),
        ("val", "validation", [2]),
        ("test", "test", [2]),
    ):
        labels, dense, sparse = torchrec_rows(
            torchrec_pipe, tmp_path / "npy", days, stage, mmap_mode=mmap_mode
        )
        found = read(output, mapping)
        np.testing.assert_array_equal(labels.astype(bool), found["labels"])
        np.testing.assert_array_equal(dense.astype(np.float16), found["numerical"])
        np.testing.assert_array_equal(sparse, np.stack(found["ids"], 1))


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_folding_agrees_with_torchrec(torchrec_pipe: Any, dtype: str, tmp_path: Path) -> None:
    low, high = (-(2**31), 2**31) if dtype == "int32" else (0, 2**32)
    for number in (0, 1):
        write_day(tmp_path / "npy", number, **random_day(100, number, dtype, low, high))
    output = prepare(tmp_path / "npy", max_rows="1000,C5=7")
    caps = [1000] * 26
    caps[4] = 7
    _, _, sparse = torchrec_rows(torchrec_pipe, tmp_path / "npy", [0], "train", hashes=caps)
    np.testing.assert_array_equal(sparse, np.stack(read(output, "train")["ids"], 1))


# --- bad input


def test_bad_input_is_named(tmp_path: Path) -> None:
    def fails(message: str, **options: Any) -> None:
        with pytest.raises(InputError, match=message):
            prepare(tmp_path / "npy", **options)
        assert not (tmp_path / "npy_data").exists()

    fails("is not a folder")
    (tmp_path / "npy").mkdir()
    fails("holds no day_N_dense.npy")
    good = random_day(6, 0)
    write_day(tmp_path / "npy", 0, **good)
    fails("0 rows to train on and 6 in its last day")
    write_day(tmp_path / "npy", 1, **good | {"labels": good["labels"][:5]})
    fails("day 1 differ in rows: day_1_dense.npy 6, day_1_labels.npy 5, day_1_sparse.npy 6")
    write_day(tmp_path / "npy", 1, **good | {"labels": good["labels"] - 1})
    fails("has label -1; 0 or 1 is expected")
    write_day(tmp_path / "npy", 1, **good | {"sparse": good["sparse"].astype(np.float32)})
    fails("a matrix of integers is expected")
    write_day(tmp_path / "npy", 1, **good | {"sparse": good["sparse"][:, :20]})
    fails("day 1 has 13 numerical and 20 categorical columns, but day 0 has 13")
    write_day(tmp_path / "npy", 1, **good | {"dense": good["dense"] * 1e6})
    fails("too large for float16")
    write_day(tmp_path / "npy", 1, **good)
    fails("--max-rows names C27; the columns are C1 to C26", max_rows="C27=3")
    fails("--max-rows is 'ten'; expected a number", max_rows="ten")
    fails("0 is less than 1", max_rows="0")
    (tmp_path / "npy" / "day_1_dense.npy").write_bytes(b"not numpy")
    fails("day_1_dense.npy is not readable as a numpy file")
    (tmp_path / "npy" / "day_1_dense.npy").unlink()
    fails("day_1_dense.npy is missing")


def test_bad_archives_are_named(tmp_path: Path) -> None:
    def with_archive(**arrays: Any) -> None:
        np.savez(tmp_path / "npy" / "day_0_sparse_multi_hot.npz", **arrays)

    write_day(tmp_path / "npy", 0, **random_day(6, 0))
    with_archive(**{"0": np.ones((6, 2), np.int32)})
    with pytest.raises(InputError, match="day 0 has both"):
        prepare(tmp_path / "npy")
    (tmp_path / "npy" / "day_0_sparse.npy").unlink()
    for arrays, message in (
        ({"a": np.ones((6, 2), np.int32)}, r"its keys are \['a'\]"),
        ({"0": np.ones((6, 2))}, r"0.npy is float64 \[6, 2\]; integers \[rows, hotness\]"),
        ({"0": np.ones((6, 2), int), "1": np.ones((5, 2), int)}, r"differ in rows: \[5, 6\]"),
    ):
        with_archive(**arrays)
        with pytest.raises(InputError, match=message):
            prepare(tmp_path / "npy")
    (tmp_path / "npy" / "day_0_sparse_multi_hot.npz").write_bytes(b"PK not a zip")
    with pytest.raises(InputError, match="not readable as a numpy archive"):
        prepare(tmp_path / "npy")
