"""The planted Terabyte: the same bits wherever they are made, distributed as promised."""

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.metrics import log_loss, roc_auc_score

from tests.embedding_kernels import interpreted
from trainmark import workloads
from trainmark.clickdata import terabyte, terabyte_shape
from trainmark.clickdata.counters import random_bits
from trainmark.clickdata.numerical import log_transform
from trainmark.clickdata.terabyte import (
    LEVELS,
    ROWS,
    TEST_ROWS,
    THRESHOLD_0,
    THRESHOLD_3,
    THRESHOLD_15,
    TRAIN_ROWS,
    VOCABULARY,
    Rows,
)
from trainmark.errors import InputError
from trainmark.hardware.devices import Cluster
from trainmark.kernels.terabyte_rows import RowsOnDevice, make_rows
from trainmark.workloads.dlrm.data import ClickData, build_data
from trainmark.workloads.dlrm.resolve import check_data
from trainmark.workloads.dlrm.runs import DlrmRun
from trainmark.workloads.dlrm.terabyte import TerabyteRows, on_device

PLACES = (0, 12_345, 2**31 - 300, 2**32 - 17, TRAIN_ROWS - 50, ROWS - 500)
"""All over the log, and where numbers of rows outgrow their types."""


@pytest.fixture(scope="module")
def rows() -> Rows:
    return terabyte.rows(TRAIN_ROWS, TRAIN_ROWS + (1 << 17))


# --- any row from its number


def test_random_numbers_are_splitmix64() -> None:
    """Vigna's generator, from seed 1234567: the published first outputs."""
    golden = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    found = random_bits(np.arange(1, 4, dtype=np.uint64), np.uint64(1234567))
    assert found.tolist() == golden


@pytest.mark.parametrize("first", PLACES)
def test_rows_are_a_function_of_their_number(first: int) -> None:
    whole = terabyte.rows(first, first + 500)
    part = terabyte.rows(first + 137, first + 211)
    np.testing.assert_array_equal(whole.categorical[:, 137:211], part.categorical)
    np.testing.assert_array_equal(whole.numerical[137:211], part.numerical)
    np.testing.assert_array_equal(whole.labels[137:211], part.labels)


@interpreted
@pytest.mark.parametrize("first", PLACES)
def test_kernels_make_the_same_bits(first: int) -> None:
    check_kernel(first, "cpu")


def check_kernel(first: int, device: str) -> None:
    tables = on_device(THRESHOLD_15, torch.device(device))
    made = RowsOnDevice.empty(300, tables)
    make_rows(tables, first, made)
    expected = terabyte.rows(first, first + 300)
    seen = np.where(expected.categorical < np.array(THRESHOLD_15)[:, None], expected.categorical, 0)
    np.testing.assert_array_equal(made.ids.cpu(), seen)
    np.testing.assert_array_equal(made.labels.cpu(), expected.labels)
    np.testing.assert_array_equal(made.numerical.cpu(), terabyte.inputs(expected))
    assert made.levels is not None
    np.testing.assert_array_equal(made.levels.cpu(), expected.level)


def test_the_file_of_tables_is_what_makes_them() -> None:
    """But for a few buckets: logarithms are rounded in more than one way."""
    for name, array in terabyte_shape.made().items():
        with np.load(Path(terabyte.__file__).with_name(terabyte.TABLES_FILE)) as file:
            assert file[name].dtype == array.dtype
            assert (file[name] != array).sum() <= 4, name


def test_tables_fit_together() -> None:
    tables = terabyte.tables()
    ends = tables.starts + tables.widths
    assert (tables.starts[:, 0] <= 1).all()
    assert ends.max(axis=1).tolist() == list(VOCABULARY)
    for column, (starts, stops) in enumerate(zip(tables.starts, ends, strict=True)):
        used = np.delete(np.arange(2 * terabyte.BUCKETS), terabyte.BUCKETS - 1)
        gaps = starts[used][1:] - stops[used][:-1]
        assert gaps.max() <= 0, f"column {column}: an id that never occurs"


# --- like Criteo's log


def test_sizes() -> None:
    assert (TRAIN_ROWS, TEST_ROWS, ROWS - TRAIN_ROWS - TEST_ROWS) == (
        4_195_197_692, 89_137_319, 89_137_318,
    )  # fmt: skip
    assert all(
        v >= max(sizes) for v, *sizes in zip(VOCABULARY, THRESHOLD_0, THRESHOLD_3, strict=True)
    )


def test_clicks_and_their_best_auc(rows: Rows) -> None:
    assert rows.labels.mean() == pytest.approx(0.033, abs=0.002)
    counts = terabyte.counts(TRAIN_ROWS, TRAIN_ROWS + (1 << 17))
    chance = terabyte.tables().thresholds[rows.level] / 2.0**32
    assert counts.auc == pytest.approx(roc_auc_score(rows.labels, chance), abs=1e-12)
    assert terabyte.log_loss(counts) == pytest.approx(log_loss(rows.labels, chance), abs=1e-12)
    assert rows.level.min() > 0
    assert rows.level.max() < LEVELS - 1


def test_the_best_auc_of_whole_splits_is_known() -> None:
    for split, best in terabyte.BEST_AUC.items():
        part = terabyte.counts(split[0], split[0] + (1 << 17)).auc
        assert best == pytest.approx(part, abs=0.01)
        assert terabyte.best_auc(*split) == best
    assert terabyte.best_auc(0, TRAIN_ROWS) is None


@pytest.mark.parametrize("column", range(26))
def test_frequent_values_are_as_frequent_as_their_power_law_says(column: int, rows: Rows) -> None:
    ranks, expected = terabyte_shape.frequencies(column)
    assert ranks[0] == 1
    assert ranks[-1] == VOCABULARY[column]
    missing = (rows.categorical[column] == 0).mean()
    assert missing == pytest.approx(terabyte_shape.MISSING_SHARES[column % 4], abs=0.003)
    share = expected[0] / ROWS
    assert (rows.categorical[column] == 1).mean() == pytest.approx(share, abs=0.005)
    assert np.all(np.diff(expected[: min(len(expected) - 1, 4096)]) <= 0)
    assert rows.categorical[column].max() < VOCABULARY[column]


def test_rare_values_are_as_many_as_criteos_thresholds_say() -> None:
    """The ids from a threshold's vocabulary on are expected that often at most in the whole log."""
    for column, (kept, every) in enumerate(zip(THRESHOLD_15, VOCABULARY, strict=True)):
        if every < 1_000_000:
            continue
        ranks, expected = terabyte_shape.frequencies(column)
        per_value = expected / np.diff(ranks)
        at = {k: float(per_value[np.searchsorted(ranks, k) - 1]) for k in (kept, every)}
        assert at[kept] == pytest.approx(15, rel=0.1)
        assert at[every] == pytest.approx(1, rel=0.1)


def test_integers_are_distributed_by_their_quartiles(rows: Rows) -> None:
    for column, (low, middle, high) in enumerate(terabyte_shape.QUARTILES):
        counts = rows.numerical[:, column]
        present = counts[counts > -10]
        share = 1 - len(present) / len(counts)
        assert share == pytest.approx(terabyte_shape.MISSING_COUNTS[column] / 100, abs=0.01)
        assert low < middle or middle <= high
        assert math.log(np.median(present) + 3) == pytest.approx(math.log(middle + 3), abs=0.3)
    np.testing.assert_array_equal(terabyte.inputs(rows), log_transform(rows.numerical))


# --- as a run's data


def config(**changes: object) -> DlrmRun:
    run = workloads.named_run("dlrm-demo")
    given = {"data": "terabyte", "synthetic_rows": 3000, "global_batch": 1024, "device": "cpu"}
    run = dataclasses.replace(run, **(given | changes))
    return workloads.resolve(run, Cluster.parse("cpux1x1"))


def read_all(data: ClickData) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    for batch in data:
        (group,) = batch.groups
        yield batch.numerical.numpy(), batch.labels.numpy(), group.ids.numpy()


def test_batches_are_the_rows_that_the_tables_know() -> None:
    cfg = config()
    numerical, labels, ids = zip(*read_all(build_data(cfg, "train", 0, 1)), strict=True)
    expected = terabyte.rows(0, 3000)
    assert [len(part) for part in labels] == [1024, 1024, 952]
    np.testing.assert_array_equal(np.concatenate(labels), expected.labels)
    np.testing.assert_array_equal(np.concatenate(numerical), terabyte.inputs(expected))
    sizes = np.array(cfg.model.table_rows)[:, None]
    assert (expected.categorical >= sizes).any()
    seen = np.where(expected.categorical < sizes, expected.categorical, 0)
    np.testing.assert_array_equal(np.concatenate(ids, axis=1), seen)


def test_ranks_make_disjoint_rows_together_those_of_one_and_continue() -> None:
    cfg = config()
    whole = [labels for _, labels, _ in read_all(build_data(cfg, "train", 0, 1))]
    ranks = [
        [labels for _, labels, _ in read_all(build_data(cfg, "train", rank, 4))]
        for rank in range(4)
    ]
    for step, labels in enumerate(whole):
        np.testing.assert_array_equal(np.concatenate([r[step] for r in ranks]), labels)
    continued = build_data(cfg, "train", 0, 1)
    continued.restore({"samples": 1024})
    np.testing.assert_array_equal(next(iter(read_all(continued)))[1], whole[1])


def test_held_out_rows_are_none_of_the_training_rows() -> None:
    test = TerabyteRows(config(), "test")
    validation = TerabyteRows(config(), "validation")
    assert (test._first, test.num_rows) == (TRAIN_ROWS, 3000)
    assert (validation._first, validation.num_rows) == (TRAIN_ROWS + TEST_ROWS, 3000)
    whole = config(synthetic_rows=None)
    assert whole.synthetic_rows == TRAIN_ROWS
    assert TerabyteRows(whole, "test").num_rows == TEST_ROWS
    assert whole.best_auc == terabyte.BEST_AUC[TRAIN_ROWS, TRAIN_ROWS + TEST_ROWS]


def test_what_the_log_does_not_have_is_refused() -> None:
    with pytest.raises(
        InputError, match=r"4,195,197,692 training rows\. Received: --synthetic-rows"
    ):
        config(synthetic_rows=TRAIN_ROWS + 1)
    model = dataclasses.replace(config().model, table_rows=(10, 20))
    with pytest.raises(InputError, match=r"13 numerical and 26 categorical.*Received: 13 and 2"):
        config(model=model)
    with pytest.raises(InputError, match=r"Received: --shuffle rows\. Give --shuffle none"):
        config(shuffle="rows")


def test_a_model_of_other_values_is_not_evaluated_on_it() -> None:
    cfg = config()
    check_data(cfg, "terabyte")
    other = [line.replace(" planted ", " 8f3c21aa90b1c4de ") for line in cfg.dataset]
    with pytest.raises(InputError, match=r"not what the model was trained on.*another vocabulary"):
        check_data(dataclasses.replace(cfg, dataset=tuple(other)), "terabyte")
