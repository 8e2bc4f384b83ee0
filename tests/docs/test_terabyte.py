"""docs/terabyte.md says what the package has and what was measured."""

import re
from typing import Any

from benchmarks.common import read_rows
from tests.docs.commands import ROOT, table
from tests.docs.test_performance import assert_rounded, only
from trainmark.clickdata import terabyte, terabyte_shape

PAGE = "docs/terabyte.md"


PRECISIONS = {"small-tf32", "small-bf16", "small-fp8", "small-tables-bf16", "small-tables-int8"}


def our_rows() -> list[dict[str, Any]]:
    return [row for row in read_rows("terabyte_h200") if row["system"] == "trainmark"]


def our_row(name: str) -> dict[str, Any]:
    return only(our_rows(), name=name)


def test_results() -> None:
    rows = [row for row in our_rows() if row["name"] not in PRECISIONS]
    lines = table(PAGE, "row | run")
    assert [line[0] for line in lines] == [row["name"] for row in rows]
    for row, (_, run, precision, reached, samples, whole, auc, log_loss) in zip(
        rows, lines, strict=True
    ):
        tables = row["tables_precision"]
        of_tables = "" if tables == "fp32" else f", {tables} tables"
        assert (run.strip("`"), precision) == (row["run"], row["precision"] + of_tables)
        if row["reached"]:
            assert_rounded(reached.removesuffix(" s"), row["time_to_target_s"])
        else:
            assert reached == "—"
        assert_rounded(samples.removesuffix(" B"), row["samples"] / 1e9)
        assert_rounded(whole.removesuffix(" s"), row["e2e_s"])
        assert_rounded(auc, row["auc"])
        assert_rounded(log_loss, row["log_loss"])
        assert row["command"].startswith(f"trainmark train {row['run']} ")


def test_precisions() -> None:
    rows = [row for row in our_rows() if row["name"] in PRECISIONS]
    lines = table(PAGE, "row | MLPs")
    assert [line[0] for line in lines] == [row["name"] for row in rows]
    for row, (_, mlps, tables, auc, *differences) in zip(rows, lines, strict=True):
        assert (mlps, tables) == (row["precision"], row["tables_precision"])
        assert_rounded(auc, row["auc"])
        found = row.get("differences", {})
        for shown, other in zip(differences, ("small-tf32", "small-bf16"), strict=True):
            if other in found:
                value, error = shown.split(" ± ")
                assert_rounded(value, found[other]["auc_difference"])
                assert_rounded(error, found[other]["standard_error"])
            else:
                assert shown == ""


def test_dlrm_small_reaches_its_target_in_the_last_quarter() -> None:
    small = our_row("small")
    assert small["samples"] == terabyte.TRAIN_ROWS
    assert 0.75 * terabyte.TRAIN_ROWS < small["at_sample"] <= terabyte.TRAIN_ROWS
    assert small["time_to_target_s"] < 240


def test_calibration() -> None:
    *_, line = table(PAGE, "strength | best possible")
    assert float(line[0]) == terabyte_shape.STRENGTH
    curve = our_row("small")["curve"]
    best, _ = terabyte.BEST_AUC.values()
    assert_rounded(line[1], best)
    for shown, place in zip(line[2:], (5, 10, 14, 15, 16, 20), strict=True):
        assert_rounded(shown, curve[place - 1][1])


def test_the_best_auc() -> None:
    test, validation = terabyte.BEST_AUC.values()
    page = (ROOT / PAGE).read_text()
    (shown,) = re.findall(r"best possible AUC \| ([0-9.]+) on test, ([0-9.]+) on validation", page)
    assert_rounded(shown[0], test)
    assert_rounded(shown[1], validation)
