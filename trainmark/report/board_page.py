"""The page of `trainmark board`: one file, with a script of ours and the data as JSON in it.

Its table and its list of changes are there without the script, which sorts, filters, groups and
draws. Content stays content: `tag` escapes it, the script makes text nodes of it, and the page's
policy lets a browser run no other script than ours.
"""

import base64
import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

from trainmark import metrics
from trainmark.formatting import GIB
from trainmark.report import tables
from trainmark.report.board import MEASURES, Board, Change, Entry, commit, finite
from trainmark.report.board_drawing import drawn
from trainmark.report.html import document, own_file, page_header
from trainmark.report.markup import Child, Markup, join, tag
from trainmark.report.sections import section

FILE_NAME = "board.html"
LISTED = 20
"""Changes that are listed; earlier ones are folded."""


def page(board: Board, home: Path | None = None, version: str | None = None) -> str:
    """The whole page.

    Args:
        home: the folder that it will lie in, for links to the runs' own pages; None for no links.
        version: of what a server shows; the page asks it for newer ones.
    """
    script = own_file("board.js")
    content = join(
        _header(board),
        _problems(board),
        _runs(board, home),
        _changes(board),
        _chart_section("history", "Over time", _history_controls()),
        _chart_section("overlay", "Selected runs", _SELECT_HELP),
        tag("script", as_json(drawn(board)), type="application/json", id="data"),
        tag("script", script, data_version=version, id="script"),
    )
    head = join(_policy(script), tag("style", own_file("board.css")))
    # A folder's name need not be text.
    return document("Board", content, head).encode(errors="replace").decode()


def as_json(data: Any) -> Markup:
    """JSON that can stand in a page: no `<` ends its element, and nothing in it is markup."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


def _policy(script: str) -> Markup:
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    rules = (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'"
    )
    return tag("meta", http_equiv="Content-Security-Policy", content=rules)


def _header(board: Board) -> Markup:
    series = len({entry.series for entry in board.entries})
    worse = sum(any(c.worse for c in entry.changes) for entry in board.entries)
    kinds = "run, case, precision, columns of the data"
    where = f"{len(board.entries)} runs in {series} series ({kinds}); {worse} flagged"
    return page_header(
        "board",
        "Runs",
        tag("p", where, class_="where"),
        tag("noscript", tag("p", "Sorting, filters and charts need JavaScript.", class_="help")),
    )


def _problems(board: Board) -> Markup | None:
    if not board.problems:
        return None
    items = [tag("li", tag("b", label), ": ", text) for label, text in board.problems]
    return tag("div", tag("b", "Not read"), tag("ul", *items), class_="notes warnings")


# --- the table


@dataclass(frozen=True)
class Column:
    """A header, the text of its cells, and the number that they are sorted by."""

    header: str
    cell: Callable[[Entry], Child]
    number: Callable[[Entry], float | None] | None = None
    optional: bool = False
    """Left out where no run has a number."""


COLUMNS = (
    Column("run", lambda e: e.result.run),
    Column("case", lambda e: e.result.case),
    Column("precision", lambda e: e.result.precision),
    Column("started", lambda e: _date(e), lambda e: e.at),
    Column(
        "changes",
        lambda e: join(*map(_badge, e.changes)),
        lambda e: sum(c.worse for c in e.changes),
    ),
    Column(
        "p_train",
        lambda e: tables.throughput(e.result.throughput.p_train),
        lambda e: finite(e.result.throughput.p_train),
    ),
    Column(
        "tokens/device/s",
        lambda e: tables.throughput(e.result.tokens_per_device_s),
        lambda e: finite(e.result.tokens_per_device_s),
        optional=True,
    ),
    Column("metric", lambda e: f"{e.result.quality.metric} {e.result.quality.split}"),
    Column(
        "quality",
        lambda e: tables.quality(e.result.quality.value, e.result.quality.target),
        lambda e: finite(e.result.quality.value),
    ),
    Column(
        "J/sample",
        lambda e: tables.joules(e.result.joules_per_sample),
        lambda e: finite(e.result.joules_per_sample),
        optional=True,
    ),
    Column(
        "e2e_time", lambda e: tables.seconds(e.result.time_s.e2e), lambda e: e.result.time_s.e2e
    ),
    Column(
        "mem",
        lambda e: tables.memory(e.result.memory.peak_bytes / GIB, None),
        lambda e: e.result.memory.peak_bytes,
    ),
    Column(
        "MFU",
        lambda e: tables.mfu_cell(e.result.mfu),
        lambda e: finite(e.result.mfu[0].value) if e.result.mfu else None,
        optional=True,
    ),
    Column("division", lambda e: e.result.division),
    Column("commit", lambda e: commit(e.result) or tables.NOT_APPLICABLE),
)


def _date(entry: Entry) -> str:
    if entry.at is None:
        return entry.result.started
    return f"{datetime.fromtimestamp(entry.at, UTC):%Y-%m-%d %H:%M}"


def _badge(change: Change) -> Markup:
    style = "flag bad" if change.worse else "flag good"
    return tag("span", change.word, title=change.text, class_=style)


def _runs(board: Board, home: Path | None) -> Markup:
    columns = [
        c
        for c in COLUMNS
        if not (c.optional and c.number) or any(c.number(e) is not None for e in board.entries)
    ]
    names = [tag("th", _button("folder"), scope="col", aria_sort="none", class_="name")]
    heads = [
        tag(
            "th",
            _button(c.header),
            scope="col",
            aria_sort="none",
            class_=_style(c),
            data_numeric=1 if c.number else None,
        )
        for c in columns
    ]
    pick = tag("th", tag("span", "selected", class_="hidden"), scope="col")
    rows = [_row(i, entry, columns, home) for i, entry in enumerate(board.entries)]
    table = tag("table", tag("thead", tag("tr", pick, *names, *heads)), tag("tbody", *rows))
    # A box that scrolls has to be reachable by keyboard, and so to have a name.
    box = tag("div", table, class_="scroll box", tabindex=0, role="region", aria_label="Runs")
    return tag("section", _filters(board), box, id="runs")


def _style(column: Column) -> str | None:
    return "num" if column.number and column.header not in ("started", "changes") else None


def _button(text: str) -> Markup:
    return tag("button", text, type="button")


def _row(index: int, entry: Entry, columns: Sequence[Column], home: Path | None) -> Markup:
    box = tag("input", type="checkbox", id=f"pick-{index}", aria_label=f"select {entry.label}")
    link = _page_of(entry, home)
    name = tag("a", entry.label, href=link) if link else entry.label
    cells = [
        tag("td", c.cell(entry), class_=_style(c), data_v=c.number(entry) if c.number else None)
        for c in columns
    ]
    return tag("tr", tag("td", box), tag("th", name, scope="row", class_="name"), *cells)


def _page_of(entry: Entry, home: Path | None) -> str | None:
    """A link to the run's own page, if there is one."""
    own = entry.path.parent / "report.html"
    if home is None or not own.is_file():
        return None
    return quote(os.path.relpath(own.resolve(), home.resolve()))  # also the colon of a scheme


# --- controls


def _filters(board: Board) -> Markup:
    def values(of: Callable[[Entry], str]) -> list[str]:
        return sorted({of(entry) for entry in board.entries})

    return tag(
        "div",
        tag("label", "Filter", tag("input", type="search", id="text", placeholder="words")),
        _select("Run", "run", ["", *values(lambda e: e.result.run)]),
        _select("Case", "case", ["", *values(lambda e: e.result.case)]),
        _select("Precision", "precision", ["", *values(lambda e: e.result.precision)]),
        _select("Group by", "group", ["", "series", "run", "case", "precision"], "nothing"),
        tag("label", tag("input", type="checkbox", id="flagged"), " flagged only", class_="tick"),
        tag("button", "Clear selection", type="button", id="clear"),
        tag("span", f"{len(board.entries)} runs", role="status", id="count"),
        class_="filters",
    )


def _select(text: str, name: str, values: Sequence[str], empty: str = "all") -> Markup:
    options = [tag("option", value or empty, value=value) for value in values]
    return tag("label", text, tag("select", *options, id=name))


def _history_controls() -> Markup:
    """The script fills the list of series in."""
    published = [("devices", "of as many devices"), ("all", "all"), ("none", "none")]
    options = [tag("option", text, value=value) for value, text in published]
    return tag(
        "div",
        tag("label", "Series", tag("select", id="series")),
        tag("label", "Published rows", tag("select", *options, id="published")),
        class_="filters",
    )


_SELECT_HELP = tag("p", "Select runs in the table to lay their curves over each other.",
                   class_="help", id="select-help")  # fmt: skip


def _chart_section(name: str, title: str, *content: Child) -> Markup:
    return tag("section", tag("h2", title), *content, tag("div", class_="pair charts"), id=name)


# --- changes


def _changes(board: Board) -> Markup:
    items = [
        tag("li", _badge(change), tag("b", entry.label), ": ", change.text)
        for entry in board.entries
        for change in entry.changes
    ]
    rest = items[LISTED:]
    more = (
        tag("details", tag("summary", f"{len(rest)} earlier"), tag("ul", *rest)) if rest else None
    )
    return section(
        "Changes",
        tag("ul", *items[:LISTED], class_="changes")
        if items
        else tag("p", "None.", class_="empty"),
        more,
        tag("p", _rule(), class_="help"),
    )


def _rule() -> str:
    speed, quality = (
        next(m.smallest or 0.0 for m in MEASURES if m.key == key) for key in ("p_train", "quality")
    )
    limits = [
        f"{_percent(times * speed)} (quality: {_percent(times * quality)})"
        for times in (1, metrics.UNKNOWN_NOISE)
    ]
    return (
        "A run is compared with the one before it of the same series. A change is "
        f"told if it is more than {limits[0]} and {metrics.CLEAR_CHANGE} times the median change "
        f"between the earlier ones; with fewer than {metrics.KNOWN_NOISE + 1} of them, if "
        f"it is more than {limits[1]}. What differs beside it need not be the cause."
    )


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"
