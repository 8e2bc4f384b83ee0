"""What `trainmark board` shows: the results that were found, what changed, and the published rows.

`board_page.py` makes the page, `board_drawing.py` what its script draws. A result that cannot be
read is listed as a problem, and stops nothing.
"""

import dataclasses
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from trainmark import metrics
from trainmark.errors import InputError
from trainmark.report import published
from trainmark.report.fields import different_fields
from trainmark.report.sections import metric_name
from trainmark.run import result as results
from trainmark.run.curves import Curve, read_loss
from trainmark.run.result import Result

POINTS = 100
"""Points of a loss curve; a page with 500 such curves is still small."""
NAMED_FIELDS = 3
"""How many changed fields of the configuration are named beside a change."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """A measure in which a run is clearly better or worse than the one before it."""

    measure: str
    """Key of the measure."""
    word: str
    worse: bool
    text: str


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A run on the board."""

    path: Path
    """The file of its result."""
    label: str
    """The run's folder, without the part that all runs have in common."""
    result: Result
    loss: Curve
    data: str = ""
    """The folder of the data, where runs like it have learned from other columns."""
    changes: tuple[Change, ...] = ()

    @property
    def series(self) -> tuple[str, str, str, str]:
        """Runs with the same series are measurements of the same thing."""
        return self.result.run, self.result.case, self.result.precision, self.data

    @property
    def at(self) -> float | None:
        """When it started, in seconds since 1970; None if the time cannot be read."""
        try:
            when = datetime.fromisoformat(self.result.started)
        except ValueError:
            return None
        return (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()


@dataclass(frozen=True, kw_only=True)
class Board:
    entries: list[Entry]
    """The latest first."""
    problems: list[tuple[str, str]]
    """Label and sentence of each result that could not be read."""


# --- what is measured


@dataclass(frozen=True, kw_only=True)
class Measure:
    """A number of a result that is followed over time."""

    key: str
    label: str
    of: Callable[[Result], float | None]
    in_row: Callable[[published.Row], float | None] = lambda row: None
    """The same number in a published row."""
    smallest: float | None = None
    """The smallest change worth reporting, as a share; None if its changes are not reported."""
    words: tuple[str, str] | None = None
    """Words for a change down and a change up; by default "worse" or "better"."""
    better: str | None = None
    """`higher` or `lower`; None: the result says which, for its quality."""


MEASURES = (
    Measure(
        key="p_train",
        label="p_train, samples/s",
        of=lambda r: r.throughput.p_train,
        in_row=lambda row: row.p_train,
        smallest=0.02,
        words=("slower", "faster"),
        better="higher",
    ),
    Measure(
        key="tokens_per_device_s",
        label="tokens/device/s",
        of=lambda r: r.tokens_per_device_s,
        in_row=lambda row: row.tokens_per_device_s,
    ),  # its changes are those of p_train
    Measure(
        key="quality",
        label="quality",
        of=lambda r: r.quality.value,
        in_row=lambda row: row.quality,
        smallest=0.001,
    ),
    Measure(
        key="joules_per_sample",
        label="J/sample",
        of=lambda r: r.joules_per_sample,
        smallest=0.02,
        words=("less energy", "more energy"),
        better="lower",
    ),
)


def finite(value: float | None) -> float | None:
    """The number, if it is one."""
    return value if value is not None and math.isfinite(value) else None


# --- finding and reading


def find(paths: Sequence[Path]) -> list[Path]:
    """Every result that was named or lies below a folder that was named, once."""
    if not paths:
        raise InputError("Nothing to show: expected results, or folders to search.")
    for path in paths:
        if not path.exists():
            raise InputError(f"{path} is not there: expected results, or folders to search.")
    found = [file for path in paths for file in ([path] if path.is_file() else _below(path))]
    return list({file.resolve(): file for file in found})


def _below(folder: Path) -> Iterator[Path]:
    for place, folders, files in os.walk(folder):
        folders.sort()
        if results.FILE_NAME in files:
            yield Path(place, results.FILE_NAME)


@dataclass
class Reader:
    """Reads results; one that has not changed since is not read again."""

    roots: Sequence[Path]
    _known: dict[Path, tuple[object, Entry | str]] = field(default_factory=dict)

    def version(self) -> str:
        """A text that changes as soon as any result is new, gone or different."""
        stamps = sorted(f"{file}:{_stamp(file)}" for file in find(self.roots))
        return f"{hash(tuple(stamps)) & 0xFFFFFFFFFFFF:x}"

    def board(self) -> Board:
        read = {file: self._read(file) for file in find(self.roots)}
        entries = [entry for entry in read.values() if isinstance(entry, Entry)]
        return Board(
            entries=_with_changes(entries),
            problems=[(self._label(f), text) for f, text in read.items() if isinstance(text, str)],
        )

    def _read(self, file: Path) -> Entry | str:
        stamp = _stamp(file)
        if self._known.get(file, (None,))[0] != stamp:
            self._known[file] = (stamp, self._fresh(file))
        return self._known[file][1]

    def _fresh(self, file: Path) -> Entry | str:
        try:
            found = results.read(file)
            loss = read_loss(file.parent / found.loss.curve, POINTS)
        except (InputError, OSError, UnicodeDecodeError) as error:
            return str(error).replace(f"{file.parent}{os.sep}", "")
        return Entry(path=file, label=self._label(file), result=found, loss=loss)

    def _label(self, file: Path) -> str:
        """A run is called as its folder is."""
        common = os.path.commonpath([root.resolve() for root in self.roots])
        named = file.resolve()
        if named.name == results.FILE_NAME:
            named = named.parent
        inside = os.path.relpath(named, common)
        return named.name if inside.startswith(".") else inside


def _stamp(file: Path) -> tuple[int, ...]:
    try:
        found = file.stat()
    except OSError:  # gone since it was found
        return ()
    return found.st_mtime_ns, found.st_size


# --- changes


def _with_changes(entries: Sequence[Entry]) -> list[Entry]:
    """The entries with their changes since the run before in the same series, the latest first."""
    ordered = _by_data(sorted(entries, key=lambda entry: (entry.at or 0.0, entry.label)))
    series: dict[tuple[str, str, str, str], list[Entry]] = {}
    judged = []
    for entry in ordered:
        earlier = series.setdefault(entry.series, [])
        earlier.append(entry)
        found = tuple(change for m in MEASURES if (change := _change(m, earlier)))
        judged.append(dataclasses.replace(entry, changes=found))
    return judged[::-1]


def _by_data(entries: Sequence[Entry]) -> list[Entry]:
    """With the data's folder, where runs of one name, case and precision differ in columns: an AUC
    on flights says nothing of one on weather."""
    folders: dict[tuple[str, ...], dict[tuple[str, ...], str]] = {}
    for entry in entries:
        known = folders.setdefault(entry.series, {})
        name = "/".join(Path(str(entry.result.config.get("data"))).parts[-2:])
        taken = name in known.values()
        known.setdefault(_columns(entry.result), f"{name} ({len(known) + 1})" if taken else name)
    return [
        dataclasses.replace(entry, data=known[_columns(entry.result)])
        if len(known := folders[entry.series]) > 1
        else entry
        for entry in entries
    ]


def _columns(result: Result) -> tuple[str, ...]:
    """Names of the columns that it learned from, if the dataset has some; ids may have grown."""
    lines = result.config.get("dataset")
    return tuple(str(line).split(" ", 4)[-1] for line in lines) if isinstance(lines, list) else ()


def _change(measure: Measure, series: Sequence[Entry]) -> Change | None:
    """The change of the last entry of a series, if it is clear."""
    last = series[-1]
    if measure.smallest is None or finite(measure.of(last.result)) is None:
        return None
    comparable = [
        (entry, value)
        for entry in series
        if (value := finite(measure.of(entry.result))) is not None
        and (measure.better or _judged_by(entry.result) == _judged_by(last.result))
    ]
    share = metrics.clear_change([value for _, value in comparable], measure.smallest)
    if share is None:
        return None
    better = measure.better or last.result.quality.better
    worse = (share < 0) == (better == "higher")
    words = measure.words or (("worse", "worse") if worse else ("better", "better"))
    before = comparable[-2][0]
    percent = f"{100 * share:+.3g}" if abs(share) < 1 else f"{100 * share:+,.0f}"
    text = f"{_name(measure, last.result)} {percent} % since {before.label}"
    return Change(
        measure=measure.key,
        word=words[share > 0],
        worse=worse,
        text=f"{text}; {_difference(before.result, last.result)}.",
    )


def _judged_by(result: Result) -> tuple[str, str]:
    return result.quality.metric, result.quality.split


def _name(measure: Measure, result: Result) -> str:
    return metric_name(result) if measure.key == "quality" else measure.label.partition(",")[0]


def _difference(before: Result, after: Result) -> str:
    """What differs between two results; it need not be the cause of a change."""
    rows = different_fields([before, after])
    pairs = [("commit", *(commit(one) or "unknown" for one in (before, after)))]
    pairs += [(name, a, b) for name, a, b in rows]
    told = [f"{name} {a:.24} → {b:.24}" for name, a, b in pairs if a != b]
    more = len(told) - NAMED_FIELDS
    shown = ", ".join(told[:NAMED_FIELDS]) or "same configuration and commit"
    return f"{shown}, and {more} more" if more > 0 else shown


def commit(result: Result) -> str | None:
    """Twelve digits of it, and whether there were changes."""
    full = result.software.get("commit")
    if not full:
        return None
    digits, _, dirty = str(full).partition("-")
    return digits[:12] + (f"-{dirty}" if dirty else "")
