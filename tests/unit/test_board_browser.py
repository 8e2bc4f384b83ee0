"""The board in Chromium, from a file: sorting, filters, selection; by keyboard and on a phone."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.browser import PHONE, Browser, started
from tests.unit.results import write_run
from tests.unit.test_board import at, serving
from trainmark.report import published
from trainmark.verbs import board as verb

HOSTILE = '</script><script>window.pwned=1</script>"><img src=x onerror=window.pwned=1>'
SPEEDS = [20_000.0 + step for step in random.Random(0).sample(range(500), 7)]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with started(tmp_path_factory.mktemp("profile")) as one:
        yield one


@pytest.fixture
def board(browser: Browser, tmp_path: Path) -> Iterator[Browser]:
    """The page of nine runs: seven of one series, the last of which is slow, and two others."""
    for day, speed in enumerate(SPEEDS, start=1):
        write_run(tmp_path / f"run-{day}", at(day, speed), [0.6, 0.5, 0.4])
    write_run(tmp_path / "run-8", at(8, 15_000.0), [0.6, 0.55, 0.5])
    write_run(tmp_path / "hostile", at(9, None, run=HOSTILE, precision="bf16"), [0.7])
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "result.json").write_text("{")
    browser.open(verb.write([tmp_path], tmp_path / "board.html").as_uri())
    yield browser
    assert browser.errors == []
    assert browser.value("window.pwned") is None


def rows(browser: Browser) -> list[str]:
    """What the table shows, from top to bottom: the names of runs and of groups."""
    found = browser.value(
        "[...document.querySelectorAll('#runs tbody th')].map(e => e.textContent)"
    )
    return list(found)


def count(browser: Browser, selector: str) -> int:
    return int(browser.value(f"document.querySelectorAll({selector!r}).length"))


def focus(browser: Browser, expression: str) -> None:
    browser.value(f"{expression}.focus()")


def header(name: str) -> str:
    found = "[...document.querySelectorAll('#runs thead button')]"
    return f"{found}.find(b => b.textContent == {name!r})"


def test_headers_sort_by_keyboard(board: Browser) -> None:
    by_speed = sorted(range(1, 8), key=lambda day: SPEEDS[day - 1])
    rising = ["run-8", *(f"run-{day}" for day in by_speed)]
    focus(board, header("changes"))
    board.press("Tab")  # to p_train, the next column
    board.press("Enter")
    assert rows(board) == [*rising, "hostile"]  # what was not measured is last, either way
    assert board.value(f"{header('p_train')}.parentElement.ariaSort") == "ascending"
    board.press("Enter")
    assert rows(board) == [*rising[::-1], "hostile"]
    focus(board, header("folder"))
    board.press("Enter")
    assert rows(board) == ["hostile", *(f"run-{day}" for day in range(1, 9))]


def test_words_filter_and_groups_have_names(board: Browser) -> None:
    focus(board, "document.getElementById('text')")
    board.press(*"pwned")
    assert rows(board) == ["hostile"]
    assert board.value("document.getElementById('count').textContent").startswith("1 of 9 runs")
    board.value("text = document.getElementById('text'); text.value = 'FP32 run-'")
    board.value("text.dispatchEvent(new Event('input'))")
    assert len(rows(board)) == 8
    focus(board, "document.getElementById('flagged')")
    board.press(" ")
    assert rows(board) == ["run-8"]
    board.press(" ")
    board.value("text.value = ''; group = document.getElementById('group'); group.value = 'run'")
    board.value("group.dispatchEvent(new Event('input'))")
    shown = rows(board)
    assert shown[:3] == [f"{HOSTILE} (1)", "hostile", "dlrm-demo (8)"]
    assert len(shown) == 11


def test_selected_runs_are_laid_over_each_other_and_a_reload_keeps_them(board: Browser) -> None:
    assert count(board, "#overlay svg") == 0
    boxes = "[...document.querySelectorAll('#runs tbody input')]"
    for place in (1, 2):  # run-8 and run-7
        focus(board, f"{boxes}[{place}]")
        board.press(" ")
    assert count(board, "#overlay svg") == 2  # loss and AUC
    assert count(board, "#overlay .line") == 4
    assert count(board, "#overlay line.target") == 1
    focus(board, header("p_train"))
    board.press("Enter")
    before = rows(board)
    address = board.value("location.href")
    assert address.endswith("#sort=p_train&select=run-8&select=run-7")
    board.open(address)
    assert rows(board) == before
    assert count(board, "#overlay .line") == 4
    assert count(board, "tr.picked") == 2
    focus(board, "document.getElementById('clear')")
    board.press("Enter")
    assert count(board, "tr.picked") == count(board, "#overlay svg") == 0


def test_a_series_over_time_marks_what_is_flagged(board: Browser) -> None:
    assert board.value("document.getElementById('series').value") == "dlrm-demo · cpux1x1 · fp32"
    assert count(board, "#history svg") == 2  # p_train and AUC; no energy was measured
    assert count(board, "#history .dot") == 16
    flagged = board.value("document.querySelector('#history .dot.flagged title').textContent")
    assert flagged == "run-8: 15000"
    # Its place is lower than all others: in SVG, down is larger.
    heights = board.value(
        "[...document.querySelectorAll('#history figure:first-child .dot')]"
        ".map(e => Number(e.getAttribute('d').split(/[, ]/)[1]))"
    )
    assert len(heights) == 8
    assert max(heights) == heights[-1] > heights[-2]


def test_published_rows_are_lines(browser: Browser, tmp_path: Path) -> None:
    write_run(tmp_path / "a", at(1, 4e6, run="dlrm-flagperf", case="h200x1x1"))
    browser.open(verb.write([tmp_path], tmp_path / "board.html").as_uri())
    rows_of_one = [row for row in published.rows_of("flagperf-dlrm") if row.case.endswith("x1x1")]
    expected = [f"{row.p_train:,.4g}" for row in rows_of_one if row.overcount == 1]
    titles = browser.value(
        "[...document.querySelectorAll('#history figure:first-child .level title')]"
        ".map(e => e.textContent)"
    )
    assert len(titles) == len(expected) > 0
    for title, text in zip(titles, expected, strict=True):
        assert title.startswith("FlagPerf, ")
        assert float(title.split()[-1].replace(",", "")) == float(text.replace(",", ""))
    browser.value("published = document.getElementById('published'); published.value = 'all'")
    browser.value("published.dispatchEvent(new Event('input'))")
    assert count(browser, "#history figure:first-child line.level") > len(expected)


def test_on_a_phone_the_table_scrolls_in_its_box(board: Browser) -> None:
    board.ask("Emulation.setDeviceMetricsOverride", **PHONE)
    try:
        assert board.value("document.documentElement.scrollWidth") == PHONE["width"]
        box = "document.querySelector('.box')"
        assert board.value(f"{box}.scrollWidth > {box}.clientWidth")
        board.value(f"{box}.scrollLeft = 300")
        name = "document.querySelector('#runs tbody th').getBoundingClientRect().left"
        assert board.value(f"{name} < {box}.getBoundingClientRect().left + 5")  # it stays in sight
    finally:
        board.ask("Emulation.clearDeviceMetricsOverride")


def test_a_served_board_shows_a_new_run_and_keeps_what_is_chosen(
    browser: Browser, tmp_path: Path
) -> None:
    write_run(tmp_path / "a", at(1), [0.5])
    with serving(tmp_path) as address:
        browser.open(f"{address}/#text=dlrm&sort=-p_train&select=a")
        assert rows(browser) == ["a"]
        write_run(tmp_path / "b", at(2, 30_000.0), [0.5])
        browser.wait("document.querySelectorAll('#runs tbody tr').length == 2")
        assert rows(browser) == ["b", "a"]
        assert browser.value("document.getElementById('text').value") == "dlrm"
        assert count(browser, "tr.picked") == 1
        browser.open("about:blank#left")  # so that it does not ask on
    assert browser.errors == []
