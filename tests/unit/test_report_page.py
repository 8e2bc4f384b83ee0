"""The HTML page of a report: its curves and charts, and that it is whole, whatever a run says."""

import math
import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.unit.results import make_evaluations, make_result, write_run
from trainmark.errors import InputError
from trainmark.report import reports
from trainmark.report.charts import nice_ticks, tick_texts
from trainmark.report.sections import time_parts
from trainmark.run import outcome
from trainmark.run.curves import MAX_BUCKETS, read_loss, thin

SVG = "{http://www.w3.org/2000/svg}"


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
    assert nice_ticks(low, high) == pytest.approx(ticks)


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
    path = reports.report([folder])
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
    assert "energy" not in text  # what is not known has no line
    assert len(shapes(page, "line")) == 3  # loss, and the quality of two splits
    assert len(shapes(page, "dot")) == 20
    assert len(shapes(page, "target")) == len(shapes(page, "best")) == 1


def test_the_page_needs_no_network_and_no_script(tmp_path: Path) -> None:
    text = reports.report([write_run(tmp_path, make_result(), [0.5, 0.4])]).read_text()
    links = set(re.findall(r"https?://[^\"' <]+", text)) - {"http://www.w3.org/2000/svg"}
    assert links == set()
    assert "<script" not in text
    assert "url(" not in text
    assert "prefers-color-scheme: dark" in text


def test_a_falling_loss_is_drawn_falling(tmp_path: Path) -> None:
    page = parse_page(reports.report([write_run(tmp_path, make_result(), [0.8, 0.6, 0.4])]))
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
    path = reports.report([write_run(tmp_path, result, [0.5])])
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
    page = parse_page(reports.report([folder]))
    assert (len(shapes(page, "line")), len(shapes(page, "dot"))) == (lines, dots)
    not_finite = sum(not math.isfinite(loss) for loss in losses or [])
    told = f"{not_finite} values of the training loss are not finite" in words(page)
    assert told == (not_finite > 0)


def test_a_hundred_thousand_rows_make_a_small_page(tmp_path: Path) -> None:
    folder = write_run(tmp_path, make_result(), [1 / (1 + i) for i in range(100_000)])
    path = reports.report([folder])
    assert path.stat().st_size < 100_000
    assert len(shapes(parse_page(path), "band")) == 1


def test_evaluations_without_the_metric_are_left_out(tmp_path: Path) -> None:
    evaluations = [replace(e, metrics={"auc": None}) for e in make_evaluations()]
    page = parse_page(
        reports.report([write_run(tmp_path, make_result(evaluations=evaluations), [0.5, 0.4])])
    )
    assert len(shapes(page, "line")) == 1  # the loss alone
    assert "No AUC was recorded." in words(page)


def test_the_time_split_has_neither_gap_nor_overlap(tmp_path: Path) -> None:
    result = make_result()
    assert sum(time_parts(result).values()) == pytest.approx(result.time_s.e2e)
    page = parse_page(reports.report([write_run(tmp_path, result)]))
    bars = list(page.iter(f"{SVG}rect"))
    assert sum(float(bar.get("width", "nan")) for bar in bars) == pytest.approx(100, abs=0.01)
    core = next(bar for bar in bars if bar.get("class") == "t-core")
    assert float(core.get("width", "nan")) == pytest.approx(100 * 40 / 62, abs=0.01)


# --- several runs


def test_several_runs_share_their_charts(tmp_path: Path) -> None:
    first = write_run(tmp_path / "a", make_result(), [0.6, 0.5, 0.4])
    second = write_run(
        tmp_path / "b", make_result(config={"global_batch": 4000, "best_auc": 0.8021}), [0.6, 0.4]
    )
    third = write_run(tmp_path / "c", make_result(run="dlrm-small", case="h200x1x1"), [0.7, 0.4])
    path = reports.report([first, second, third], tmp_path / "deep" / "all.html")
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
    page = parse_page(reports.report(folders, tmp_path))
    titles = [e.text for e in page.iter("strong")]
    assert titles == ["training loss", "AUC", "Accuracy"]


def test_losses_of_different_workloads_do_not_share_an_axis(tmp_path: Path) -> None:
    folders = [
        write_run(tmp_path / "a", make_result(), [0.6, 0.4]),
        write_run(tmp_path / "b", make_result(), [0.7, 0.5]),
        write_run(tmp_path / "c", make_result(run="llama3-demo", workload="llama3"), [9.0, 4.0]),
    ]
    page = parse_page(reports.report(folders, tmp_path))
    assert [e.text for e in page.iter("strong")] == ["training loss", "training loss", "AUC"]


def test_a_folder_of_repeats_stands_for_its_runs(tmp_path: Path) -> None:
    for repeat in range(11):
        write_run(tmp_path / "seeds" / str(repeat), make_result(), [0.5, 0.4])
    path = reports.report([tmp_path / "seeds"], tmp_path)
    assert path == tmp_path / "report.html"
    assert "11 runs" in words(parse_page(path))


def test_the_spread_of_repeats_is_told_in_plain_numbers() -> None:
    throughput = make_result().throughput
    rates = [replace(throughput, p_train=p_train) for p_train in (1e4, 3e4)]
    told = outcome.spread([make_result(throughput=rate) for rate in rates])
    assert told.endswith("p_train 20000 +- 14000")


# --- nothing to show


@pytest.mark.parametrize("content", [None, "", "[]", "{}", '{"schema": "trainmark.result/1"}'])
def test_a_bad_folder_is_one_clear_sentence(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "result.json").write_text(content)
    with pytest.raises(InputError, match=re.escape(str(tmp_path))):
        reports.report([tmp_path])
    assert not (tmp_path / "report.html").exists()


def test_of_several_those_without_a_result_are_left_out_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a sweep's `*` brings them; what is not there, or damaged, is still a mistake."""
    run = write_run(tmp_path / "run", make_result(), [0.6, 0.4])
    write_run(tmp_path / "repeats" / "0", make_result(), [0.6, 0.4])
    (tmp_path / "failed").mkdir()
    (tmp_path / "sweep.json").write_text('{"schema": "trainmark.sweep/1"}')
    page = reports.report(sorted(tmp_path.iterdir()), tmp_path / "all.html")
    said = capsys.readouterr().err
    assert said == f"Left out, without a result: {tmp_path}/failed, {tmp_path}/sweep.json.\n"
    assert len(shapes(parse_page(page), "line")) == 4  # two runs, their losses and qualities

    with pytest.raises(InputError, match="nowhere has no"):
        reports.report([run, tmp_path / "nowhere"])
    with pytest.raises(InputError, match="Nothing to report"):
        reports.report([tmp_path / "failed", tmp_path / "sweep.json"])
    with pytest.raises(InputError, match="failed has no"):
        reports.report([tmp_path / "failed"])
    (run / "result.json").write_text("{")
    with pytest.raises(InputError, match="not readable as JSON"):
        reports.report([run, tmp_path / "repeats"])


def test_nothing_to_report_is_an_error() -> None:
    with pytest.raises(InputError, match="Nothing to report"):
        reports.report([])
