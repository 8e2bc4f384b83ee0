"""`trainmark plan --check`: how far predictions were from what the same runs measured."""

import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.table import Table

from trainmark.errors import InputError
from trainmark.formatting import DASH
from trainmark.report import forecasts
from trainmark.report.board import find
from trainmark.run import result
from trainmark.run.result import Result
from trainmark.verbs.plan import empty_table, wide_console


def check(runs: Sequence[Path]) -> None:
    """Print the errors of all results below `runs`, of each workload and together."""
    if not runs:
        raise InputError("--check needs folders of runs: trainmark plan --check RUNS...")
    found: list[tuple[Path, Result]] = []
    unreadable: list[str] = []
    for file in find(runs):
        try:
            found.append((file, result.read(file)))
        except InputError as error:
            unreadable.append(str(error))
    known = [(file, one) for file, one in found if one.predicted]
    left_out = list(_left_out(len(found) - len(known), [one for _, one in known], unreadable))
    if not known:
        where = ", ".join(map(str, runs))
        raise InputError(f"No result in {where} has a prediction. {' '.join(left_out)}".strip())
    console = wide_console()
    console.print(_table(known))
    for line in left_out:
        console.say(line)


def _table(known: Sequence[tuple[Path, Result]]) -> Table:
    table = empty_table("predicted beside measured: relative errors (+: predicted too much)")
    table.add_column("workload")
    table.add_column("what")
    for header in ("results", "median", "median, unsigned", "worst"):
        table.add_column(header, justify="right")
    table.add_column("of", overflow="fold")
    names = sorted({one.workload for _, one in known})
    groups = [(name, [pair for pair in known if pair[1].workload == name]) for name in names]
    for name, group in [*groups, *([("all", list(known))] if len(groups) > 1 else [])]:
        for comparison in (forecasts.step_time, forecasts.memory):
            table.add_row(name, *_cells(group, comparison))
    return table


def _cells(group: Sequence[tuple[Path, Result]], comparison: forecasts.Comparison) -> list[str]:
    found = [(comparison(one), file.parent) for file, one in group]
    errors = [(one.off, folder) for one, folder in found if one.off is not None]
    what = found[0][0].what
    if not errors:
        return [what, "0", DASH, DASH, DASH, ""]
    worst, folder = max(errors, key=lambda error: abs(error[0]))
    return [
        what,
        str(len(errors)),
        forecasts.signed(statistics.median(off for off, _ in errors)),
        f"{100 * statistics.median(abs(off) for off, _ in errors):.1f} %",
        forecasts.signed(worst),
        str(folder),
    ]


def _left_out(older: int, known: Sequence[Result], unreadable: Sequence[str]) -> Iterator[str]:
    if older:
        yield f"Results without a prediction, which are older: {older:,}."
    reasons = Counter(one.predicted.reason for one in known if one.predicted)
    for reason, count in reasons.most_common():
        if reason:
            yield f"Without a predicted time: {count:,} of {len(known):,}, because {reason}."
    short = sum(forecasts.step_time(one).measured is None for one in known)
    if short:
        yield f"Too short to measure a time: {short:,} of {len(known):,}."
    if unreadable:
        yield f"Results that cannot be read: {len(unreadable):,}, such as {unreadable[0]}"
