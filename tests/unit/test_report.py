import math
import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console

from tests.unit.results import GIB, make_evaluations, make_result, write_run
from trainmark import report
from trainmark.errors import InputError
from trainmark.report import published
from trainmark.report.charts import nice_ticks, tick_texts
from trainmark.report.comparison import compare, not_comparable
from trainmark.report.curves import MAX_BUCKETS, read_loss, thin
from trainmark.report.numbers import duration, gib, human
from trainmark.report.sections import time_parts
from trainmark.report.tables import markdown_table, published_grid, result_grid, result_table
from trainmark.result import Aligned, Memory, Mfu, Quality, Throughput

SVG = "{http://www.w3.org/2000/svg}"


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


def test_markdown_has_one_line_a_result_and_keeps_its_columns() -> None:
    odd = make_result(run="a|b")
    lines = markdown_table([make_result(), odd]).splitlines()
    assert len(lines) == 4
    assert lines[2].startswith("| dlrm-demo | cpux1x1 | fp32 | / | 62.0 | 18182 |")
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in lines} == {11}


def test_a_narrow_terminal_gets_every_cell_whole() -> None:
    result = make_result()
    for width in (200, 80, 40):
        text = text_of(result_table([result]), width)
        assert all(cell in text for cell in row_of(result_grid([result])).values()), width
        assert max(map(len, text.splitlines())) <= width


# --- published rows


RUNS = {
    "dlrm-small": 6,
    "dlrm-large": 8,
    "dlrm-xlarge": 4,
    "dlrm-flagperf": 12,
    "dlrm-mlperf": 1,
    "dlrm-mlperfx2": 1,
    "dlrm-full": 1,
    "distilbert-sst2": 4,
    "llama3-8b": 12,
    "llama3-8b-fp8": 2,
    "dlrm-demo": 0,
}


@pytest.mark.parametrize(("run", "count"), RUNS.items())
def test_each_named_run_has_its_published_rows(run: str, count: int) -> None:
    rows = published.for_run(run)
    assert len(rows) == count
    assert all(row.system in published.systems() for row in rows)


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
    checked = 0
    for run in RUNS:
        for row in published.for_run(run):
            if row.p_core is not None:
                assert row.p_core > row.p_train > row.p_whole  # type: ignore[operator]
                checked += 1
    assert checked == 16
    torchrec = [published.for_run(run)[0] for run in ("dlrm-mlperf", "dlrm-mlperfx2", "dlrm-full")]
    for row in torchrec:
        assert row.p_train * row.e2e_time_s == pytest.approx(4195197692, rel=0.002)  # type: ignore[operator]


def test_published_cells_have_the_form_of_our_own() -> None:
    cells = row_of(published_grid(published.for_run("dlrm-flagperf")))
    assert (cells["e2e_time"], cells["p_whole"], cells["mem"]) == ("1152", "7292588", "20.5/40.0")
    fp8 = row_of(published_grid(published.for_run("llama3-8b-fp8")))
    assert fp8["MFU"] == "25.4–50.6%"


# --- curves


def test_a_long_curve_is_thinned_and_no_spike_is_lost() -> None:
    values = [1 / (1 + i / 1000) for i in range(100_000)]
    values[54_321] = 9.0
    curve = thin([(float(i), value) for i, value in enumerate(values)])
    assert len(curve.points) == MAX_BUCKETS
    assert max(point.high for point in curve.points) == 9.0
    assert max(point.y for point in curve.points) < 1.0
    assert curve.points[0].x < curve.points[-1].x < 100_000


def test_a_short_curve_is_left_alone() -> None:
    curve = thin([(1.0, 0.5), (2.0, 0.4)])
    assert [(point.x, point.y) for point in curve.points] == [(1.0, 0.5), (2.0, 0.4)]


def test_values_that_are_not_finite_break_the_line_and_are_counted() -> None:
    curve = thin([(1.0, 0.5), (2.0, math.nan), (3.0, math.inf), (4.0, 0.4), (5.0, 0.3)])
    assert [[point.x for point in piece] for piece in curve.pieces] == [[1.0], [4.0, 5.0]]
    assert curve.not_finite == 2


@pytest.mark.parametrize(
    "text", ["", "a,b\n1,2\n", "step,samples,loss\n1,2,x\n", "step,samples,loss\n1\n"]
)
def test_a_damaged_curve_is_one_clear_sentence(tmp_path: Path, text: str) -> None:
    (tmp_path / "loss.csv").write_text(text)
    with pytest.raises(InputError, match=r"loss\.csv"):
        read_loss(tmp_path / "loss.csv")


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1]),
        (0, 100, [0, 20, 40, 60, 80, 100]),
        (0.66, 0.81, [0.7, 0.75, 0.8]),
        (-1, 1, [-1, -0.5, 0, 0.5, 1]),
        (0, 4e9, [0, 1e9, 2e9, 3e9, 4e9]),
    ],
)
def test_ticks_are_round_numbers(low: float, high: float, ticks: list[float]) -> None:
    assert nice_ticks(low, high, 5) == pytest.approx(ticks)


def test_ticks_are_short() -> None:
    assert tick_texts([0, 250_000, 1_000_000]) == ["0", "250k", "1M"]
    assert tick_texts([0, 5000, 10_000]) == ["0", "5k", "10k"]
    assert tick_texts([0, 500, 1000]) == ["0", "500", "1,000"]
    assert tick_texts([0.7, 0.75]) == ["0.7", "0.75"]


# --- the page


def parse_page(path: Path) -> ElementTree.Element:
    """The page is well-formed XML, so that nothing can be left open or unescaped."""
    text = path.read_text()
    assert text.startswith("<!doctype html>")
    return ElementTree.fromstring(text.removeprefix("<!doctype html>"))


def shapes(page: ElementTree.Element, style: str) -> list[ElementTree.Element]:
    return [e for e in page.iter() if style in e.get("class", "").split() and e.tag.startswith(SVG)]


def words(page: ElementTree.Element) -> str:
    return " ".join("".join(page.itertext()).split())


def test_the_page_of_one_run(tmp_path: Path) -> None:
    losses = [0.6 - 0.002 * i for i in range(100)]
    folder = write_run(tmp_path / "run", make_result(), losses)
    path = report.report([folder])
    assert path == folder / "report.html"
    page = parse_page(path)
    text = words(page)
    for expected in (
        "target reached",
        "0.7912/0.787",
        "20.0 k",
        "best possible 0.8021",
        "no peak is known for the CPU 'Test CPU'",
        "model.dim",
        "2.13.0",
    ):
        assert expected in text, expected
    assert len(shapes(page, "line")) == 3  # loss, and the quality of two splits
    assert len(shapes(page, "dot")) == 20
    assert len(shapes(page, "target")) == len(shapes(page, "best")) == 1


def test_the_page_needs_no_network_and_no_script(tmp_path: Path) -> None:
    text = report.report([write_run(tmp_path, make_result(), [0.5, 0.4])]).read_text()
    links = set(re.findall(r"https?://[^\"' <]+", text)) - {"http://www.w3.org/2000/svg"}
    assert links == set()
    assert "<script" not in text
    assert "url(" not in text
    assert "prefers-color-scheme: dark" in text


def test_a_falling_loss_is_drawn_falling(tmp_path: Path) -> None:
    page = parse_page(report.report([write_run(tmp_path, make_result(), [0.8, 0.6, 0.4])]))
    path = shapes(page, "line")[0].get("d", "")
    points = [tuple(map(float, p.split(","))) for p in re.findall(r"[\d.]+,[\d.]+", path)]
    assert len(points) == 3
    # In SVG, down is larger.
    assert points[0][0] < points[1][0] < points[2][0]
    assert points[0][1] < points[1][1] < points[2][1]
    assert all(0 <= coordinate <= 100 for point in points for coordinate in point)


def test_what_a_run_says_cannot_become_markup(tmp_path: Path) -> None:
    result = make_result(
        run="<script>alert(1)</script>", notes=["a < b & c"], config={"<x>": "</dd>"}
    )
    path = report.report([write_run(tmp_path, result, [0.5])])
    assert "<script" not in path.read_text()
    text = words(parse_page(path))
    assert "<script>alert(1)</script>" in text
    assert "a < b & c" in text


@pytest.mark.parametrize(
    ("losses", "lines", "dots"),
    [
        (None, 0, 0),
        ([], 0, 0),
        ([0.5], 0, 1),
        ([math.nan, math.nan], 0, 0),
        ([0.5, math.nan, 0.4, 0.3], 1, 1),
        ([0.5, 0.5], 1, 0),
        ([0.0, 0.0], 1, 0),
        ([1e30, 1e-30], 1, 0),
    ],
)
def test_odd_loss_curves(tmp_path: Path, losses: list[float] | None, lines: int, dots: int) -> None:
    folder = write_run(tmp_path, make_result(evaluations=[]), losses)
    page = parse_page(report.report([folder]))
    assert (len(shapes(page, "line")), len(shapes(page, "dot"))) == (lines, dots)
    not_finite = sum(not math.isfinite(loss) for loss in losses or [])
    assert (f"{not_finite} loss values are not finite" in words(page)) == (not_finite > 0)


def test_a_hundred_thousand_rows_make_a_small_page(tmp_path: Path) -> None:
    folder = write_run(tmp_path, make_result(), [1 / (1 + i) for i in range(100_000)])
    path = report.report([folder])
    assert path.stat().st_size < 100_000
    assert len(shapes(parse_page(path), "band")) == 1


def test_evaluations_without_the_metric_are_left_out(tmp_path: Path) -> None:
    evaluations = [replace(e, metrics={"auc": None}) for e in make_evaluations()]
    page = parse_page(
        report.report([write_run(tmp_path, make_result(evaluations=evaluations), [0.5, 0.4])])
    )
    assert len(shapes(page, "line")) == 1  # the loss alone
    assert "Nothing was recorded." in words(page)


def test_the_time_split_has_neither_gap_nor_overlap(tmp_path: Path) -> None:
    result = make_result()
    assert sum(time_parts(result).values()) == pytest.approx(result.time_s.e2e)
    page = parse_page(report.report([write_run(tmp_path, result)]))
    bars = list(page.iter(f"{SVG}rect"))
    assert sum(float(bar.get("width", "nan")) for bar in bars) == pytest.approx(100, abs=0.01)
    core = next(bar for bar in bars if bar.get("class") == "t-core")
    assert float(core.get("width", "nan")) == pytest.approx(100 * 40 / 62, abs=0.01)


def test_several_runs_share_their_charts(tmp_path: Path) -> None:
    first = write_run(tmp_path / "a", make_result(), [0.6, 0.5, 0.4])
    second = write_run(
        tmp_path / "b", make_result(config={"global_batch": 4000, "best_auc": 0.8021}), [0.6, 0.4]
    )
    third = write_run(tmp_path / "c", make_result(run="dlrm-small", case="h200x1x1"), [0.7, 0.4])
    path = report.report([first, second, third], tmp_path / "deep" / "all.html")
    page = parse_page(path)
    text = words(page)
    assert path == tmp_path / "deep" / "all.html"
    assert "dlrm-demo (a)" in text
    assert "dlrm-demo (b)" in text
    assert len(shapes(page, "line")) == 6
    assert "global_batch" in text
    assert "Beside the published results: dlrm-small" in text
    assert len([e for e in page.iter("tr") if e.get("class") == "ours"]) == 1


def test_runs_that_are_judged_by_different_metrics_do_not_share_an_axis(tmp_path: Path) -> None:
    other = replace(make_result().quality, metric="accuracy")
    evaluations = [replace(e, metrics={"accuracy": 0.9}) for e in make_evaluations()]
    folders = [
        write_run(tmp_path / "a", make_result(), [0.6, 0.4]),
        write_run(tmp_path / "b", make_result(run="x", quality=other, evaluations=evaluations)),
    ]
    page = parse_page(report.report(folders, tmp_path))
    titles = [e.text for e in page.iter("strong")]
    assert titles == ["training loss", "AUC", "Accuracy"]


def test_losses_of_different_workloads_do_not_share_an_axis(tmp_path: Path) -> None:
    folders = [
        write_run(tmp_path / "a", make_result(), [0.6, 0.4]),
        write_run(tmp_path / "b", make_result(), [0.7, 0.5]),
        write_run(tmp_path / "c", make_result(run="llama3-demo", workload="llama3"), [9.0, 4.0]),
    ]
    page = parse_page(report.report(folders, tmp_path))
    assert [e.text for e in page.iter("strong")] == ["training loss", "training loss", "AUC"]


def test_a_folder_of_repeats_stands_for_its_runs(tmp_path: Path) -> None:
    for repeat in range(11):
        write_run(tmp_path / "seeds" / str(repeat), make_result(), [0.5, 0.4])
    path = report.report([tmp_path / "seeds"], tmp_path)
    assert path == tmp_path / "report.html"
    assert "11 runs" in words(parse_page(path))


@pytest.mark.parametrize("content", [None, "", "[]", "{}", '{"schema": "trainmark.result/1"}'])
def test_a_bad_folder_is_one_clear_sentence(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "result.json").write_text(content)
    with pytest.raises(InputError, match=re.escape(str(tmp_path))):
        report.report([tmp_path])
    assert not (tmp_path / "report.html").exists()


def test_nothing_to_report_is_an_error() -> None:
    with pytest.raises(InputError, match="Nothing to report"):
        report.report([])


# --- comparison


def test_two_results_side_by_side(tmp_path: Path) -> None:
    faster = make_result(
        throughput=Throughput(p_whole=40_000.0, p_train=50_000.0, p_core=60_000.0),
        quality=replace(make_result().quality, value=0.7902),
        config={"global_batch": 4000, "best_auc": 0.8021, "model": {"dim": 16, "tables": [10, 20]}},
    )
    write_run(tmp_path / "a", make_result())
    write_run(tmp_path / "b", faster)
    text = text_of(report.compare(tmp_path / "a", tmp_path / "b"))
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
    assert [gib(v) for v in (None, 2**20, GIB, 141 * GIB)] == [
        "—",
        "1.0 MiB",
        "1.00 GiB",
        "141.00 GiB",
    ]
