"""The reader: every row once an epoch, in a repeatable order, from any position, for any ranks."""

import dataclasses
import errno
import mmap
import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.small import config, write_dataset
from tests.waiting import wait_until
from trainmark import workloads
from trainmark.errors import InputError
from trainmark.training.background import in_background
from trainmark.workloads.dlrm.data import ClickBatch, ClickData, build_data, held_out_splits
from trainmark.workloads.dlrm.rows import Columns, SplitBinary, SyntheticRows, no_rows


class NumberedRows:
    """Rows whose only id is their number."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self.kind = no_rows(1, np.float16, [(np.int32, 1)] * 2)

    def read(self, start: int, stop: int, into: Columns) -> None:
        rows = np.arange(start, stop)
        into.numerical[:] = rows[:, None] % 1000
        into.labels[:] = rows % 2 == 1
        for ids in into.ids:
            ids[:] = rows


def read(source: Any, start: int, stop: int) -> Columns:
    columns = source.kind.room(stop - start)
    source.read(start, stop, columns)
    return columns


def data(
    num_rows: int, *, split: str = "train", rank: int = 0, ranks: int = 1, **changes: Any
) -> ClickData:
    cfg = dataclasses.replace(config(), **changes)
    return ClickData(NumberedRows(num_rows), cfg, split, rank, ranks)


def rows_of(batch: ClickBatch) -> list[int]:
    rows = batch.groups[0].ids[0].tolist()
    assert batch.samples == len(rows) == len(batch.labels) == len(batch.numerical)
    assert batch.labels.tolist() == [row % 2 == 1 for row in rows]
    assert batch.numerical[:, 0].tolist() == [row % 1000 for row in rows]
    return rows


def batches_of(source: ClickData) -> list[list[int]]:
    return [rows_of(batch) for batch in source]


SHAPES = st.fixed_dictionaries(
    {
        "num_rows": st.integers(1, 130),
        "global_batch": st.integers(1, 50),
        "shuffle": st.sampled_from(["none", "batches", "rows"]),
        "shuffle_window": st.integers(1, 140),
        "seed": st.integers(0, 5),
        "epochs": st.integers(1, 3),
    }
)


@settings(max_examples=150, deadline=None)
@given(SHAPES)
def test_every_row_once_an_epoch(shape: dict[str, Any]) -> None:
    source = data(**shape)
    batches = batches_of(source)
    rows = [row for batch in batches for row in batch]
    num_rows, epochs, size = shape["num_rows"], shape["epochs"], shape["global_batch"]
    assert len(batches) == epochs * source.steps_per_epoch
    for epoch in range(epochs):
        of_epoch = rows[epoch * num_rows : (epoch + 1) * num_rows]
        assert sorted(of_epoch) == list(range(num_rows))
        if shape["shuffle"] == "none":
            assert of_epoch == sorted(of_epoch)
    # Batches are full but for an epoch's last.
    partial = [batch.partial for batch in source]
    assert partial == [len(batch) < size for batch in batches]
    assert sum(partial) == (epochs if num_rows % size else 0)
    assert batches == batches_of(data(**shape))


@settings(max_examples=100, deadline=None)
@given(SHAPES, st.integers(0, 400))
def test_resuming_at_any_batch_gives_the_rest(shape: dict[str, Any], place: int) -> None:
    whole = list(data(**shape))
    place %= len(whole)
    done = whole[place].position - whole[place].samples
    source = data(**shape)
    source.restore({"samples": done})
    rest = list(source)
    assert [rows_of(batch) for batch in rest] == [rows_of(batch) for batch in whole[place:]]
    assert [batch.position for batch in rest] == [batch.position for batch in whole[place:]]


@settings(max_examples=60, deadline=None)
@given(SHAPES, st.integers(2, 5))
def test_ranks_share_every_global_batch(shape: dict[str, Any], ranks: int) -> None:
    alone = list(data(**shape))
    shares = [list(data(**shape, rank=rank, ranks=ranks)) for rank in range(ranks)]
    for batch, *parts in zip(alone, *shares, strict=True):
        assert [row for part in parts for row in rows_of(part)] == rows_of(batch)
        assert {part.position for part in parts} == {batch.position}
        assert {part.partial for part in parts} == {batch.partial}
        sizes = [part.samples for part in parts]
        assert max(sizes) - min(sizes) <= 1


def test_orders_differ_between_epochs_and_seeds_and_windows_stay_together() -> None:
    orders = {}
    for shuffle in ("batches", "rows"):
        source = data(100, global_batch=100, shuffle=shuffle, shuffle_window=10, epochs=2)
        first, second = batches_of(source)
        (other,) = batches_of(
            data(100, global_batch=100, shuffle=shuffle, shuffle_window=10, seed=9)
        )
        assert first != second
        assert first != other
        for start in range(0, 100, 10):
            window = first[start : start + 10]
            assert sorted(window) == list(range(min(window), min(window) + 10))
            assert (window == sorted(window)) == (shuffle == "batches")
        orders[shuffle] = first
    assert orders["batches"] != orders["rows"]


def test_dropping_the_last_batch() -> None:
    source = data(100, global_batch=30, last_batch="drop", epochs=2, shuffle="rows")
    batches = batches_of(source)
    assert [len(batch) for batch in batches] == [30] * 6
    assert source.steps_per_epoch == 3
    assert max(Counter(row for batch in batches[:3] for row in batch).values()) == 1
    with pytest.raises(InputError, match="fewer than one global batch"):
        data(29, global_batch=30, last_batch="drop")


def test_held_out_rows_come_once_as_stored_however_often_they_are_asked_for() -> None:
    source = data(70, split="test", eval_batch=32, shuffle="rows", epochs=3, last_batch="drop")
    for _ in range(2):
        rows = [rows_of(batch) for batch in source]
        assert [len(batch) for batch in rows] == [32, 32, 6]
        assert [row for batch in rows for row in batch] == list(range(70))


def test_no_rows() -> None:
    with pytest.raises(InputError, match="The train split has no rows"):
        data(0)


def test_which_rows_a_position_names() -> None:
    source = data(100, global_batch=30, shuffle="rows", shuffle_window=25, epochs=2)
    for batch in source:
        rows = rows_of(batch)
        text = source.describe(batch.position)
        assert text.startswith(f"{len(rows)} rows of train between global rows {min(rows)} and")
        assert f"in this order: {', '.join(map(str, rows[:8]))}" in text


# --- the threads


@pytest.mark.parametrize("shuffle", ["none", "rows"])
def test_many_threads_give_the_same_batches_as_one(shuffle: str) -> None:
    source = data(1000, global_batch=7, shuffle=shuffle, shuffle_window=50, epochs=3)
    many = in_background(source._read_batch, source._batches.after(0), threads=6, waiting=4)
    assert [rows_of(batch) for batch in many] == batches_of(source)


@pytest.mark.parametrize(
    ("rows", "ranks", "waiting"),
    # A row here is 11 bytes: a label, a float16 and two int32.
    [(1024, 1, 64), (2**20, 1, 46), (2**20, 2, 64), (2**30, 1, 4)],
)
def test_batches_that_wait_for_a_gpu_fill_a_bounded_part_of_memory(
    rows: int, ranks: int, waiting: int
) -> None:
    assert data(2**31, global_batch=rows, ranks=ranks)._waiting_for_gpu() == waiting


def test_results_are_made_ahead_of_their_use_but_not_all_of_them() -> None:
    began = []
    results = in_background(lambda key: began.append(key) or key, iter(range(100)), 1, waiting=5)
    assert next(results) == 0
    # One in the making, five that wait, and one for the one just taken.
    wait_until(lambda: len(began) >= 7)
    time.sleep(0.05)
    assert began == list(range(7))
    assert list(results) == list(range(1, 100))


def test_the_thread_ends_with_its_reader() -> None:
    import threading

    source = data(100, global_batch=7, shuffle="rows")
    reading = iter(source)
    next(reading)

    def is_read() -> bool:
        return any(thread.name.startswith("reader") for thread in threading.enumerate())

    assert is_read()
    reading.close()  # type: ignore[attr-defined]
    wait_until(lambda: not is_read())


def test_an_error_in_the_thread_is_raised_where_the_batch_is_asked_for() -> None:
    class Broken(NumberedRows):
        def read(self, start: int, stop: int, into: Columns) -> None:
            if start >= 30:
                raise InputError("row 30 is broken")
            super().read(start, stop, into)

    source = ClickData(Broken(100), config(global_batch=10), "train", 0, 1)
    reading = iter(source)
    assert [rows_of(next(reading))[0] for _ in range(3)] == [0, 10, 20]
    with pytest.raises(InputError, match="row 30 is broken"):
        next(reading)


# --- files


def on_disk(folder: Path, **changes: Any) -> ClickData:
    return build_data(config(data=str(folder), **changes), "train", 0, 1)


def test_rows_arrive_as_they_were_written(tmp_path: Path) -> None:
    folder = write_dataset(tmp_path / "d", train_rows=1000, cardinalities=(40_000, 7, 200))
    batches = list(on_disk(folder, global_batch=300))
    assert [batch.samples for batch in batches] == [300, 300, 300, 100]
    groups = [(group.features, group.ids.dtype) for group in batches[0].groups]
    assert groups == [([1], torch.int8), ([2], torch.int16), ([0], torch.int32)]
    ids = torch.cat([batch.groups[2].ids[0] for batch in batches])
    assert ids.tolist() == list(range(1000))
    numerical = torch.cat([batch.numerical for batch in batches])
    stored = np.fromfile(folder / "train/numerical.bin", np.float16).reshape(-1, 3)
    assert np.array_equal(numerical.numpy(), stored)
    labels = torch.cat([batch.labels for batch in batches])
    assert np.array_equal(labels.numpy(), np.fromfile(folder / "train/label.bin", bool))


def test_bytes_per_row(tmp_path: Path) -> None:
    """Rows travel in the types they are stored in."""
    folder = write_dataset(tmp_path / "d", cardinalities=(40_000, 7, 200))
    batch = next(iter(on_disk(folder)))
    tensors = [batch.numerical, batch.labels, *(group.ids for group in batch.groups)]
    assert sum(t.nbytes for t in tensors) / batch.samples == 3 * 2 + 1 + (4 + 1 + 2)


def test_without_numerical_features(tmp_path: Path) -> None:
    folder = write_dataset(tmp_path / "d", num_numerical=0)
    batch = next(iter(on_disk(folder)))
    assert batch.numerical.shape == (512, 0)


def test_splits(tmp_path: Path) -> None:
    folder = write_dataset(tmp_path / "with", validation_rows=50)
    cfg = config(data=str(folder))
    assert held_out_splits(cfg) == ("test", "validation")
    assert sum(batch.samples for batch in build_data(cfg, "validation", 0, 1)) == 50
    without = config(data=str(write_dataset(tmp_path / "without")))
    assert held_out_splits(without) == ("test",)


def test_numbers_of_32_bits_are_read_as_they_are_stored(tmp_path: Path) -> None:
    folder = write_dataset(tmp_path / "d", numerical_dtype="float32")
    stored = np.fromfile(folder / "test/numerical.bin", np.float32).reshape(-1, 3)
    stored[7] = (16_777_215, -3e38, 0.1)
    stored.tofile(folder / "test/numerical.bin")
    cfg = config(data=str(folder))
    batches = list(build_data(cfg, "test", 0, 1))
    assert {batch.numerical.dtype for batch in batches} == {torch.float32}
    np.testing.assert_array_equal(torch.cat([b.numerical for b in batches]).numpy(), stored)


@pytest.mark.parametrize("bad", [-1, 7, 100])
def test_an_id_outside_its_table_is_named(tmp_path: Path, bad: int) -> None:
    folder = write_dataset(tmp_path / "d")
    path = folder / "train/cat_1.bin"
    ids = np.fromfile(path, np.int8)
    ids[777] = bad
    ids.tofile(path)
    source = SplitBinary(folder, "train")
    read(source, 0, 777)
    with pytest.raises(InputError, match=rf"cat_1\.bin: row 777 has id {bad}; .* ids 0 to 6"):
        read(source, 700, 800)


def test_a_label_that_is_neither_0_nor_1_is_named(tmp_path: Path) -> None:
    folder = write_dataset(tmp_path / "d")
    path = folder / "train/label.bin"
    labels = np.fromfile(path, np.uint8)
    labels[5] = 2
    labels.tofile(path)
    with pytest.raises(InputError, match=r"label\.bin: row 5 has label 2; 0 or 1 is expected"):
        read(SplitBinary(folder, "train"), 0, 10)


# --- past the page cache


def aligned(columns: Columns) -> Columns:
    """Like `columns`, in memory that a disk can write to."""

    def like(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return np.frombuffer(mmap.mmap(-1, array.nbytes), array.dtype).reshape(array.shape)

    return Columns(like(columns.numerical), like(columns.labels), [like(c) for c in columns.ids])


@pytest.fixture
def bypassing(tmp_path: Path) -> SplitBinary:
    rows = 3 * 65536 + 7
    folder = write_dataset(tmp_path / "d", train_rows=rows, cardinalities=(400_000, 7, 200))
    return SplitBinary(folder, "train", "bypass")


def refuse_direct(source: SplitBinary, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count reads by file; those past the page cache fail."""
    preadv, refused = os.preadv, Counter[str]()
    names = {descriptor: Path(file).stem for file, descriptor in source._direct.items()}

    def refusing(descriptor: int, *args: Any) -> int:
        if descriptor in names:
            refused[names[descriptor]] += 1
            raise OSError(errno.EFAULT, "not to this memory")
        return preadv(descriptor, *args)

    monkeypatch.setattr(os, "preadv", refusing)
    return refused


@pytest.mark.parametrize(
    ("start", "count"), [(0, 65536), (65536, 131072), (512, 66048), (100, 65536), (131072, 65543)]
)
@pytest.mark.parametrize("refused", [False, True])
def test_rows_past_the_page_cache_are_the_same(
    bypassing: SplitBinary, monkeypatch: pytest.MonkeyPatch, start: int, count: int, refused: bool
) -> None:
    folder = bypassing._folder
    expected = read(SplitBinary(folder, "train"), start, start + count)
    if refused:
        refuse_direct(bypassing, monkeypatch)
    columns = aligned(expected)
    bypassing.read(start, start + count, columns)
    for array, right in zip(columns.arrays(), expected.arrays(), strict=True):
        assert np.array_equal(array, right)


def test_which_reads_go_past_the_page_cache(
    bypassing: SplitBinary, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Whether this file system has such reads or not: they are only counted.
    bypassing._direct = {file: -1 - i for i, file in enumerate(bypassing._descriptors)}
    refused = refuse_direct(bypassing, monkeypatch)
    columns = aligned(bypassing.kind.room(65536))
    bypassing.read(65536, 131072, columns)
    assert set(refused) == {"label", "numerical", "cat_0", "cat_1", "cat_2"}
    refused.clear()
    bypassing.read(65537, 131073, columns)  # no block of the disk begins there
    assert not refused
    bypassing.read(65536, 65536 + 16384, columns.part(slice(16384)))
    assert set(refused) == {"numerical", "cat_0"}  # the others are small
    refused.clear()
    bypassing.read(65536, 131072 - 1, columns.part(slice(1, None)))
    assert not refused


def test_where_the_system_has_no_reads_past_the_page_cache(
    bypassing: SplitBinary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "O_DIRECT", raising=False)
    source = SplitBinary(bypassing._folder, "train", "bypass")
    assert not source._direct
    assert np.array_equal(read(source, 5, 9).ids[0], [5, 6, 7, 8])


def test_only_what_does_not_fit_memory_goes_past_the_page_cache_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_dataset(tmp_path / "d", train_rows=1000, cardinalities=(40_000, 7, 200))
    monkeypatch.setattr(SplitBinary, "_open_directly", lambda self: {"opened": -1})

    def bypasses(split: str, **changes: Any) -> bool:
        source = build_data(config(data=str(folder), **changes), split, 0, 1)._source
        assert isinstance(source, SplitBinary)
        return bool(source._direct)

    train_bytes = 1000 * (3 * 2 + 1 + (4 + 1 + 2))
    memory = "trainmark.workloads.dlrm.rows.host_memory_bytes"
    monkeypatch.setattr(memory, lambda: 2 * train_bytes)
    assert not bypasses("train")
    assert bypasses("train", page_cache="bypass")
    monkeypatch.setattr(memory, lambda: 2 * train_bytes - 2)
    assert bypasses("train")
    assert not bypasses("train", page_cache="use")
    assert not bypasses("test", page_cache="bypass")  # is read again and again


# --- made in memory


@pytest.mark.parametrize("ids", ["uniform", "planted"])
def test_synthetic_rows_are_a_function_of_the_seed_and_the_row(ids: str) -> None:
    cfg = config(synthetic_ids=ids, synthetic_rows=70_000)
    source = SyntheticRows(cfg, "train")
    whole = read(source, 65_000, 66_000)  # across the border of two blocks
    again = read(SyntheticRows(cfg, "train"), 65_500, 65_600)
    for a, b in zip([whole.numerical, whole.labels, *whole.ids],
                    [again.numerical, again.labels, *again.ids], strict=True):  # fmt: skip
        assert np.array_equal(a[500:600], b)
    assert all(c.max() < rows for c, rows in zip(whole.ids, (50, 7, 3), strict=True))
    other = SyntheticRows(config(synthetic_ids=ids, synthetic_rows=70_000, seed=1), "train")
    assert not np.array_equal(read(other, 0, 1000).ids[0], read(source, 0, 1000).ids[0])
    test = SyntheticRows(cfg, "test")
    assert test.num_rows == 70_000
    assert not np.array_equal(read(test, 0, 1000).ids[0], read(source, 0, 1000).ids[0])


def test_a_long_synthetic_split_repeats_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SyntheticRows, "DISTINCT_ROWS", 100)
    source = SyntheticRows(config(), "train")
    rows = read(source, 50, 350).ids[0]
    assert np.array_equal(rows[:100], rows[100:200])
    assert np.array_equal(rows[:100], rows[200:300])


@pytest.mark.parametrize("ids", ["uniform", "planted"])
def test_labels_of_repeated_rows_are_drawn_anew(ids: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same ones would be learned by heart, and end in a loss that is not finite."""
    monkeypatch.setattr(SyntheticRows, "DISTINCT_ROWS", 10_000)
    named = dataclasses.replace(workloads.named_run("dlrm-small"), data="synthetic")
    cfg = dataclasses.replace(named, synthetic_ids=ids, synthetic_rows=10**9)
    source = SyntheticRows(cfg, "train")
    first, second, again = (read(source, start, start + 10_000) for start in (0, 10_000, 10_000))
    assert np.array_equal(first.ids[0], second.ids[0])
    assert np.array_equal(second.labels, again.labels)
    for rows in (first, second):
        assert rows.labels.mean() == pytest.approx(0.033, abs=0.007)  # as many as Criteo's
    both = (first.labels & second.labels).sum()
    assert 0 < both < first.labels.sum() / 2
