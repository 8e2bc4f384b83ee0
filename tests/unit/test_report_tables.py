"""Tables of results: in the published form, beside what was published, and side by side."""

import io
import re
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console, RenderableType

from tests.unit.results import GIB, make_result, write_run
from trainmark.formatting import duration, human, readable_size
from trainmark.progress import SafeConsole
from trainmark.report import published, reports
from trainmark.report.comparison import compare, not_comparable
from trainmark.report.fields import different_fields
from trainmark.report.tables import (
    Grid,
    grid_table,
    metrics_table,
    published_grid,
    quality,
    result_grid,
    units,
)
from trainmark.run.result import Aligned, Memory, Mfu, Quality, Throughput


def text_of(renderable: object, width: int = 200) -> str:
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(renderable)
    return capture.get()


def row_of(grid: object) -> dict[str, str]:
    return dict(zip(grid.headers, grid.rows[0], strict=True))  # type: ignore[attr-defined]


# --- the published form


def test_the_cells_of_a_closed_result() -> None:
    assert row_of(result_grid([make_result()])) == {
        "run": "dlrm-demo",
        "case": "cpux1x1",
        "precision": "fp32",
        "fix_hp": "/",
        "e2e_time": "62.0",
        "p_whole": "18182",
        "p_train": "20000",
        "p_core": "22500",
        "quality": "0.7912/0.787",
        "mem": "1.2/16.0",
    }


def test_a_target_has_no_more_decimals_than_the_value() -> None:
    assert quality(0.79837, 0.788507) == "0.7984/0.7885"
    assert quality(0.9, 0.91) == "0.9000/0.91"


def test_the_first_published_dlrm_row_comes_out_as_printed() -> None:
    result = make_result(
        case="a100-40gx1x1",
        time_s=replace(make_result().time_s, e2e=1152.3),
        throughput=Throughput(p_whole=7292588.2, p_train=7466400.0, p_core=8493415.9),
        quality=replace(make_result().quality, value=0.80259, target=0.802),
        memory=Memory(
            peak_bytes=int(20.5 * GIB),
            allocated_peak_bytes=1,
            total_bytes=40 * GIB,
            host_peak_bytes=1,
        ),
    )
    cells = row_of(result_grid([result]))
    assert [cells[c] for c in ("e2e_time", "p_whole", "p_train", "p_core", "quality", "mem")] == [
        "1152",
        "7292588",
        "7466400",
        "8493416",
        "0.8026/0.802",
        "20.5/40.0",
    ]


def test_an_open_result_shows_what_it_changed() -> None:
    result = make_result(division="open", changed=["global_batch", "model.dim", "gone"])
    assert row_of(result_grid([result]))["fix_hp"] == "global_batch=1000, model.dim=16, gone"


def test_of_two_datasets_only_what_differs_is_shown() -> None:
    """Not all of their columns; numbers of tables stay as they are, by their places."""
    same = [f"categorical int64 {n} same" for n in range(50)]
    one = make_result(config={"dataset": [*same, "one"], "rows": [1, 2, 3, 4]})
    other = make_result(config={"dataset": [*same, *"abcde"], "rows": [4, 3, 2, 1]})
    assert different_fields([one, other]) == [
        ["dataset", "one", "a, b, c, and 2 more"],
        ["rows", "[1, 2, 3, 4]", "[4, 3, 2, 1]"],
    ]
    for dataset, told in (
        ([*same, "more"], "only what the others have"),
        (same[::-1], "in another order"),
    ):
        results = [make_result(config={"dataset": found}) for found in (same, dataset)]
        assert different_fields(results)[0][1] == told


def test_units_stand_beside_a_table() -> None:
    quality = Quality(
        metric="auc", split="test", value=0.7, target=None, better="higher", reached=None
    )
    told = units(make_result(quality=quality))
    assert "throughputs in samples/s; quality is the auc on test." in told


def test_cells_that_do_not_apply_are_a_slash() -> None:
    result = make_result(
        throughput=Throughput(p_whole=5.0, p_train=None, p_core=None),
        quality=Quality(
            metric="auc", split="test", value=None, target=None, better="higher", reached=None
        ),
    )
    cells = row_of(result_grid([result]))
    assert (cells["p_train"], cells["p_core"], cells["quality"]) == ("/", "/", "/")


def test_a_language_model_has_its_own_columns() -> None:
    fp8 = Mfu(
        convention="6N",
        value=0.2543,
        low=0.2543,
        high=0.5089,
        peak_flops=1.979e15,
        peak_dtype="fp8",
        peak_source="datasheet",
    )
    result = make_result(
        parallel={"pp": 1, "dp": 4, "tp": 2},
        tokens_per_device_s=10486.0,
        mfu=[fp8],
        aligned=Aligned(reference="nvidia", error=0.01, passed=True),
    )
    cells = row_of(result_grid([result]))
    assert cells["parallel"] == "PP1DP4TP2"
    assert cells["tokens/device/s"] == "10486"
    assert cells["MFU"] == "25.4–50.9%"
    assert cells["aligned"] == "yes"
    assert "MFU" not in row_of(result_grid([make_result()]))


def test_a_narrow_terminal_gets_every_cell_whole() -> None:
    result = make_result()
    for width in (200, 80, 40):
        text = text_of(grid_table(result_grid([result])), width)
        assert all(cell in text for cell in row_of(result_grid([result])).values()), width
        assert max(map(len, text.splitlines())) <= width


# --- published rows


def test_flagperfs_dlrm_rows_come_as_printed_and_with_the_true_count() -> None:
    rows = {(row.case, row.fix_hp, row.note): row for row in published.for_run("dlrm-flagperf")}
    assert rows["a100-40gx1x8", None, "as printed"].p_whole == 19331640
    corrected = [
        rows[case, None, note].p_whole
        for case, note in (
            ("a100-40gx1x1", "corrected, ÷ 2"),
            ("a100-40gx1x8", "corrected, ÷ 16"),
            ("a100-40gx2x8", "corrected, ÷ 32"),
        )
    ]
    # 3.65 M, 1.21 M and 0.88 M samples/s: eight devices were slower than one.
    assert corrected == pytest.approx([3_646_294, 1_208_227.5, 880_435.5])


def test_published_throughputs_are_ordered_and_consistent() -> None:
    rows = [row for system in published.systems() for row in published.rows_of(system)]
    complete = [row for row in rows if row.p_core is not None]
    assert len(complete) == 16
    for row in complete:
        assert row.p_core > row.p_train > row.p_whole  # type: ignore[operator]
    torchrec = [published.for_run(run)[0] for run in ("dlrm-mlperf", "dlrm-mlperfx2", "dlrm-full")]
    for row in torchrec:
        assert row.p_train * row.e2e_time_s == pytest.approx(4195197692, rel=0.002)  # type: ignore[operator]


def test_published_cells_have_the_form_of_our_own() -> None:
    cells = row_of(published_grid(published.for_run("dlrm-flagperf")))
    assert (cells["e2e_time"], cells["p_whole"], cells["mem"]) == ("1152", "7292588", "20.5/40.0")
    fp8 = row_of(published_grid(published.for_run("llama3-8b-fp8")))
    assert fp8["MFU"] == "25.4–50.6%"


# --- comparison


def test_two_results_side_by_side(tmp_path: Path) -> None:
    faster = make_result(
        throughput=Throughput(p_whole=40_000.0, p_train=50_000.0, p_core=60_000.0),
        quality=replace(make_result().quality, value=0.7902),
        config={"global_batch": 4000, "best_auc": 0.8021, "model": {"dim": 16, "tables": [10, 20]}},
    )
    write_run(tmp_path / "a", make_result())
    write_run(tmp_path / "b", faster)
    text = text_of(reports.compare(tmp_path / "a", tmp_path / "b"))
    assert "not comparable" not in text
    assert re.search(r"p_train\s+│\s+20000\s+│\s+50000\s+│\s+2\.500", text)
    assert re.search(r"quality \(auc\)\s+│.*│\s+-0\.0010", text)
    assert re.search(r"global_batch\s+│\s+1000\s+│\s+4000", text)
    assert "model.dim" not in text


def test_the_same_configuration_is_said_to_be_the_same() -> None:
    assert "The configurations are the same." in text_of(compare(make_result(), make_result()))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"workload": "llama3"}, r"workloads \(dlrm and llama3\)"),
        ({"division": "open"}, r"divisions \(closed and open\)"),
        (
            {"throughput": Throughput(p_whole=1.0, p_train=1.0, p_core=1.0, unit="tokens/s")},
            r"units \(samples/s and tokens/s\)",
        ),
    ],
)
def test_what_cannot_be_compared_is_said(changes: dict[str, object], reason: str) -> None:
    other = make_result(**changes)
    sentence = not_comparable(make_result(), other)
    assert sentence is not None
    assert re.search(reason, sentence)
    assert sentence in text_of(compare(make_result(), other))


# --- numbers for people


def test_numbers_for_people() -> None:
    assert [human(v) for v in (None, 0.5, 917.0, 1764.4, 20_000.0, 4.47e6, 120e6)] == [
        "—",
        "0.500",
        "917",
        "1,764",
        "20.0 k",
        "4.47 M",
        "120 M",
    ]
    assert [duration(v) for v in (3.14159, 62.0, 125.4, 3600.0, 9123.0)] == [
        "3.14 s",
        "62.0 s",
        "2 min 05 s",
        "1 h 00 min",
        "2 h 32 min",
    ]
    assert [readable_size(v) for v in (None, 2**20, GIB, 141 * GIB)] == [
        "—",
        "1.0 MiB",
        "1.0 GiB",
        "141.0 GiB",
    ]


@pytest.mark.parametrize("table", [grid_table, metrics_table])
def test_names_of_columns_are_neither_markup_nor_commands(
    table: Callable[[Grid], RenderableType], capsys: pytest.CaptureFixture[str]
) -> None:
    SafeConsole(width=80).print(table(Grid(["[bold]a"], [["[red]b\x1b[31m"]], [False])))
    printed = capsys.readouterr().out
    assert "[bold]a" in printed
    assert r"[red]b\x1b[31m" in printed


@pytest.mark.parametrize("stream", ["stderr", "stdout"])
def test_progress_that_nobody_can_read_ends_no_work_and_results_do(
    stream: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, stream, _Full())
    console = SafeConsole(stderr=stream == "stderr")
    for _ in range(2):
        with nullcontext() if console.stderr else pytest.raises(OSError, match="full"):
            console.say("step 10")


class _Full(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError("full")
