"""The board's content: which results are found, what is flagged, and what is left as text."""

import base64
import hashlib
import html
import json
import re
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.unit.results import make_result, write_run
from trainmark import metrics
from trainmark.cli import main
from trainmark.errors import InputError
from trainmark.report.board import Board, Reader, find
from trainmark.report.board_drawing import drawn
from trainmark.report.board_page import page
from trainmark.report.reports import report
from trainmark.run.result import Energy, Result
from trainmark.verbs import board as verb

ROOT = Path(__file__).parents[2]


def at(day: int, p_train: float | None = 20_000.0, auc: float | None = 0.79, **more: Any) -> Result:
    """A result of some day of January."""
    plain = make_result()
    return replace(
        plain,
        started=f"2026-01-{day:02d}T12:00:00+00:00",
        throughput=replace(plain.throughput, p_train=p_train),
        quality=replace(plain.quality, value=auc),
        **more,
    )


def board_of(folder: Path, results: list[Result]) -> Board:
    for number, result in enumerate(results):
        write_run(folder / f"run-{number:02d}", result, [0.6, 0.5, 0.4])
    return Reader([folder]).board()


def told(board: Board) -> dict[str, list[str]]:
    """Of each run with changes, their words."""
    return {e.label: [change.word for change in e.changes] for e in board.entries if e.changes}


# --- the rule


def plain_rule(values: np.ndarray, smallest: float) -> float | None:
    """The documented rule, with numpy."""
    shares = np.diff(values) / np.abs(values[:-1])
    usual = 4 * np.median(np.abs(shares[:-1])) if len(values) > 3 else 5 * smallest
    return float(shares[-1]) if abs(shares[-1]) > max(smallest, usual) else None


def test_the_rule_is_the_documented_one() -> None:
    random = np.random.default_rng(0)
    found = []
    for _ in range(2000):
        values = 100 * np.exp(
            random.choice([0.003, 0.02]) * random.standard_normal(random.integers(2, 12))
        )
        values[-1] *= random.choice([0.8, 0.95, 1.0, 1.1])
        expected = plain_rule(values, 0.02)
        assert metrics.clear_change(list(values), 0.02) == (expected and pytest.approx(expected))
        found.append(expected is not None)
    assert 0.2 < np.mean(found) < 0.8


def test_steady_noise_is_rarely_flagged_and_a_clear_slow_down_is() -> None:
    """As docs/board.md says: of runs that vary by 1 %, at most 3 of 100 are called slower."""
    random = np.random.default_rng(1)
    alarms, found = 0, 0
    for _ in range(2000):
        values = 100 * np.exp(0.01 * random.standard_normal(9))
        alarms += (metrics.clear_change(list(values), 0.02) or 0) < 0
        values[-1] *= 0.9
        found += (metrics.clear_change(list(values), 0.02) or 0) < 0
    assert alarms / 2000 < 0.03
    assert found / 2000 > 0.95


@pytest.mark.parametrize("values", [[], [1.0], [0.0, 5.0], [1.0, 1.0, 0.0, 2.0], [5.0, 5.0, 5.0]])
def test_no_change_from_nothing(values: list[float]) -> None:
    assert metrics.clear_change(values, 0.02) is None


# --- changes of runs


def test_a_slower_run_is_flagged_with_what_differs(tmp_path: Path) -> None:
    steady = [at(day, 20_000.0 + 50 * (day % 3)) for day in range(1, 7)]
    slow = at(7, 17_000.0, config={"global_batch": 500, "lr": 0.1})
    board = board_of(tmp_path, [*steady, slow])
    assert told(board) == {"run-06": ["slower"]}
    (change,) = board.entries[0].changes
    assert change.worse
    assert "p_train -15 % since run-05; global_batch 1000 → 500" in change.text


def test_runs_of_another_case_or_precision_are_not_compared(tmp_path: Path) -> None:
    runs = [at(1), at(2, 5_000.0, case="cpux1x2"), at(3, 5_000.0, precision="bf16"), at(4)]
    assert told(board_of(tmp_path, [*runs, at(5, run="dlrm-small", p_train=1.0)])) == {}


def test_runs_on_other_columns_are_not_compared(tmp_path: Path) -> None:
    """Rows and ids of a log may grow from week to week; another log has other columns."""
    weather = ["numerical log - - rain", "categorical int64 5 0f city"]
    grown = ["numerical log - - rain", "categorical int64 9 1e city"]
    results = [
        at(1, auc=0.9, config={"data": "weather/data", "dataset": weather}),
        at(2, auc=0.6, config={"data": "flights/data", "dataset": ["numerical log - - delay"]}),
        at(3, auc=0.5, config={"data": "weather/week2", "dataset": grown}),
    ]
    board = board_of(tmp_path, results)
    latest_first = [entry.data for entry in board.entries]
    assert latest_first == ["weather/data", "flights/data", "weather/data"]
    assert told(board) == {"run-02": ["worse"]}
    assert board.entries[0].changes[0].text.startswith("AUC -44.4 % since run-00;")
    assert {entry.data for entry in board_of(tmp_path / "one", results[:1]).entries} == {""}


def test_runs_are_ordered_by_their_start_and_not_by_their_names(tmp_path: Path) -> None:
    board = board_of(tmp_path, [at(9, 10_000.0), at(3), at(4), at(5)])
    assert [entry.label for entry in board.entries] == ["run-00", "run-03", "run-02", "run-01"]
    assert told(board) == {"run-00": ["slower"]}


def test_quality_is_compared_by_the_same_metric_in_its_own_direction(tmp_path: Path) -> None:
    loss = replace(make_result().quality, metric="loss", better="lower", target=None)
    runs = [
        at(1, auc=0.79),
        at(2, auc=0.78),
        at(3, auc=0.80),
        *(
            replace(at(4 + i), quality=replace(loss, value=v))
            for i, v in enumerate([3.0, 3.3, 3.0])
        ),
    ]
    found = told(board_of(tmp_path, runs))
    assert found == {
        "run-01": ["worse"],
        "run-02": ["better"],
        "run-04": ["worse"],
        "run-05": ["better"],
    }


def energy(joules: float) -> Energy:
    return Energy(
        source="nvml", joules=1e4, train_joules=9e3, joules_per_sample=joules,
        joules_per_token=None, samples_per_joule=1 / joules, mean_power_w=100.0,
        peak_power_w=120.0, reason=None,
    )  # fmt: skip


def test_more_energy_is_worse(tmp_path: Path) -> None:
    board = board_of(tmp_path, [at(1), at(2, energy=energy(0.01)), at(3, energy=energy(0.013))])
    assert told(board) == {"run-02": ["more energy"]}
    assert board.entries[0].changes[0].worse
    assert "J/sample" in page(board)
    assert "J/sample</button>" not in page(board_of(tmp_path / "without", [at(1)]))


def test_what_was_not_measured_is_passed_over(tmp_path: Path) -> None:
    runs = [at(1), at(2, None, None), at(3, float("nan"), float("nan")), at(4, 10_000.0)]
    board = board_of(tmp_path, runs)
    assert told(board) == {"run-03": ["slower"]}
    values = [run["values"]["p_train"] for run in drawn(board)["runs"]]
    assert values == [10_000.0, None, None, 20_000.0]


# --- finding results


def test_results_are_found_once_wherever_they_lie(tmp_path: Path) -> None:
    a = write_run(tmp_path / "runs" / "a", at(1))
    write_run(tmp_path / "runs" / "sweep" / "lr=0.1" / "0", at(2))
    other = write_run(tmp_path / "other", at(3))
    (tmp_path / "runs" / "latest").symlink_to(a)
    (tmp_path / "runs" / "loop").symlink_to(tmp_path / "runs")
    (other / "result.json").rename(tmp_path / "old.json")
    roots = [tmp_path / "runs", a, a / "result.json", tmp_path / "old.json"]
    assert len(find(roots)) == 3
    labels = [entry.label for entry in Reader(roots).board().entries]
    assert labels == ["old.json", "runs/sweep/lr=0.1/0", "runs/a"]
    assert [entry.label for entry in Reader([a]).board().entries] == ["a"]


def test_a_path_that_is_not_there_is_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="Nothing to show: expected results"):
        find([])
    with pytest.raises(InputError, match="nowhere is not there"):
        find([tmp_path / "nowhere"])


def test_a_broken_result_is_named_and_stops_nothing(tmp_path: Path) -> None:
    write_run(tmp_path / "good", at(1))
    for name, text in {"cut": "{", "other": '{"schema": "x/1"}', "bytes": "\x00"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "result.json").write_text(text)
    bad_curve = write_run(tmp_path / "curve", at(2))
    (bad_curve / "loss.csv").write_text("nonsense\n")
    (tmp_path / "latin").mkdir()
    (tmp_path / "latin" / "result.json").write_bytes(b'{"schema": "\xff"}')
    board = Reader([tmp_path]).board()
    assert [entry.label for entry in board.entries] == ["good"]
    assert sorted(label for label, _ in board.problems) == [
        "bytes",
        "curve",
        "cut",
        "latin",
        "other",
    ]
    text = page(board)
    assert "Not read" in text
    assert str(tmp_path) not in text


def test_results_of_earlier_versions_are_shown(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "old", at(1))
    stored = json.loads((folder / "result.json").read_text())
    newer = (
        *("checksum", "energy", "assessments", "best", "ended", "warnings", "aligned", "notes"),
        *("predicted", "mfu_reason", "tokens_per_device_s_spread"),
    )
    old = {key: value for key, value in stored.items() if key not in newer}
    (folder / "result.json").write_text(json.dumps(old))
    board = Reader([tmp_path]).board()
    assert board.problems == []
    assert drawn(board)["runs"][0]["values"]["p_train"] == 20_000.0
    text = report([folder]).read_text()
    for title in ("Warnings", "Predictions", "Predicted and measured"):
        assert title not in text


# --- the page


def embedded(text: str) -> Any:
    """The page's data, as a browser takes it out: up to the first end of a script."""
    return json.loads(text.split('id="data">', 1)[1].split("</script", 1)[0])


def test_the_page_stands_alone_and_runs_its_own_script_only(tmp_path: Path) -> None:
    text = page(board_of(tmp_path, [at(1), at(2)]))
    assert set(re.findall(r"https?://[^\"' <]+", text)) <= {"http://www.w3.org/2000/svg"}
    assert not re.findall(r"<(?:link|img|iframe)|url\(|@import|src=", text)
    assert "prefers-color-scheme: dark" in text
    script = re.findall(r'<script id="script">(.*?)</script>', text, re.S)
    assert len(script) == 1
    digest = base64.b64encode(hashlib.sha256(script[0].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}';" in html.unescape(text)


def test_what_a_run_says_stays_data(tmp_path: Path) -> None:
    name = '</script><script>pwned()</script>"><img src=x onerror=pwned()> & \u2028 \ud800'
    board = board_of(tmp_path, [at(1, run=name, case=name)])
    text = page(board)
    assert text.count("<script") == 2
    assert "<img" not in text
    assert embedded(text)["runs"][0]["run"] == name
    text.encode()


def test_the_data_are_those_of_the_results(tmp_path: Path) -> None:
    board = board_of(tmp_path, [at(2)])
    (run,) = embedded(page(board))["runs"]
    assert run["at"] == 1767355200  # 2026-01-02 12:00 in UTC
    assert run["loss"] == [[1000.0, 2000.0, 3000.0], [0.6, 0.5, 0.4]]
    made = [e for e in make_result().evaluations if e.split == "test"]
    assert run["evaluations"][0] == [e.at_sample for e in made]
    assert run["evaluations"][1] == pytest.approx([e.metrics["auc"] for e in made], rel=1e-4)


def test_a_curve_is_thinned_and_breaks_at_what_is_not_finite(tmp_path: Path) -> None:
    write_run(tmp_path / "a", at(1), [0.5] * 300 + [float("nan")] * 30 + [0.4] * 300)
    xs, ys = drawn(Reader([tmp_path]).board())["runs"][0]["loss"]
    assert len(xs) == len(ys) <= 101
    assert ys.count(None) == 1
    assert list(dict.fromkeys(ys)) == [0.5, None, 0.4]


def test_published_rows_are_lines_with_the_true_counts(tmp_path: Path) -> None:
    board = board_of(tmp_path, [at(1, run="dlrm-flagperf", case="a100-40gx1x8")])
    rows = drawn(board)["published"]["dlrm-flagperf"]
    printed = json.loads((ROOT / "trainmark/report/published_results.json").read_text())["rows"]
    own = [row for row in printed if row["run"] == "dlrm-flagperf"]
    assert [row["values"]["p_train"] for row in rows] == [
        row["p_train"] / row["overcount"] for row in own
    ]
    assert next(row["devices"] for row in rows if "1x8" in row["label"]) == 8
    assert drawn(board)["runs"][0]["devices"] == 8


def test_a_run_with_a_page_of_its_own_is_linked(tmp_path: Path) -> None:
    odd = write_run(tmp_path / "runs" / "javascript:a b#c", at(1))
    (odd / "report.html").write_text("x")
    write_run(tmp_path / "runs" / "plain", at(2))
    target = verb.write([tmp_path / "runs"], tmp_path / "pages" / "board.html")
    assert re.findall(r'href="([^"]*)"', target.read_text()) == [
        "../runs/javascript%3Aa%20b%23c/report.html"
    ]


# --- the verb


def test_the_verb_writes_a_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "runs" / "a", at(1))
    assert main(["board", "runs"]) == 0
    assert capsys.readouterr().out == "board.html\n"
    (tmp_path / "empty").mkdir()
    assert main(["board", "runs", "--output", "empty"]) == 0
    assert (tmp_path / "empty" / "board.html").read_text() == Path("board.html").read_text()
    assert main(["board", "empty"]) == 2
    assert "No result.json in empty" in capsys.readouterr().err
    assert main(["board", "runs", "--serve", "--port", "99999"]) == 2
    assert "cannot listen there" in capsys.readouterr().err


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    with verb.make_server([folder], "127.0.0.1", 0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def fetch(address: str) -> str:
    with urllib.request.urlopen(address) as answer:
        return str(answer.read().decode())


def test_a_server_shows_new_results(tmp_path: Path) -> None:
    with serving(tmp_path) as address:
        assert embedded(fetch(f"{address}/"))["runs"] == []
        before = fetch(f"{address}/version")
        assert fetch(f"{address}/version") == before
        write_run(tmp_path / "new", at(1))
        after = fetch(f"{address}/version")
        assert after != before
        text = fetch(f"{address}/")
        assert [run["label"] for run in embedded(text)["runs"]] == ["new"]
        assert f'data-version="{after}"' in text
        for wrong in ("/../etc/passwd", "/new/result.json", "/version/"):
            with pytest.raises(urllib.error.HTTPError, match="404"):
                fetch(f"{address}{wrong}")


def test_a_result_is_read_again_only_if_it_changed(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", at(1))
    reader = Reader([tmp_path])
    first = reader.board().entries[0].result
    assert reader.board().entries[0].result is first
    write_run(folder, at(1, 1234.5))
    assert reader.board().entries[0].result.throughput.p_train == 1234.5
    (folder / "result.json").unlink()
    assert reader.board().entries == []
