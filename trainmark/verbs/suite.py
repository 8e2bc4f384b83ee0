"""`trainmark suite`: a list of cases from a file, one table and one page of their results.

Each case is a `train` in a process of its own, with the folder OUTPUT/NAME. Only the results in
those folders tell what is finished: a suite that was stopped goes on, and a result that another
machine or `trainmark launch` has put there is a row of the table, too.
"""

import dataclasses
import json
import shlex
from collections.abc import Sequence
from pathlib import Path

from trainmark.config import SYNTHETIC
from trainmark.hardware import devices
from trainmark.progress import SafeConsole
from trainmark.report import reports
from trainmark.run import result
from trainmark.verbs.attempt import DONE, FAILED, arguments, attempt
from trainmark.verbs.attempt_tables import Attempt, PlannedRun, attempts_table, plans_table
from trainmark.verbs.suite_cases import Case, read_cases

SKIPPED = "skipped"


def suite(path: Path, output: Path, *, dry_run: bool) -> int:
    """Run every case that has no result yet; the exit code is 1 where one failed."""
    cases = read_cases(path, output)
    if dry_run:
        title = "GiB per device, activations estimated"
        plans = plans_table(["name", "run", "case", "here"], [*map(_plan, cases)], title, parts=())
        SafeConsole().print(plans, soft_wrap=True)
        return 0
    rows: list[Attempt] = []
    for number, case in enumerate(cases, start=1):
        rows += _attempt(case, f"case {number} of {len(cases)}, {case.name}")
    return _print_summary(cases, rows, output, path.name)


def _attempt(case: Case, title: str) -> list[Attempt]:
    """The rows of a case, after it was run."""
    if case.is_done:
        return _results(case)
    if case.skipped:
        return [_without_result(case, SKIPPED, case.skipped)]
    SafeConsole(stderr=True).print(title, highlight=False)
    log = case.output.with_name(f"{case.name}.log")
    ended = attempt(case.words, case.cluster.devices, log)
    return (
        _results(case) if ended.kind == DONE else [_without_result(case, ended.kind, ended.reason)]
    )


def _without_result(case: Case, outcome: str, reason: str) -> Attempt:
    known = {"run": case.cfg.name, "case": str(case.cluster), "precision": case.cfg.precision}
    reason = f"case {case.name}: {reason}"
    return Attempt(label=case.name, outcome=outcome, known=known, reason=reason)


def _results(case: Case) -> list[Attempt]:
    return [
        Attempt(
            label=str(folder.relative_to(case.output.parent)),
            outcome=DONE,
            result=result.read(folder),
        )
        for folder in case.folders
    ]


def _print_summary(cases: Sequence[Case], rows: Sequence[Attempt], output: Path, title: str) -> int:
    """Print the table and one line for programs, and write the page; returns the exit code."""
    SafeConsole().print(attempts_table("name", rows, title), soft_wrap=True)
    done = [case for case in cases if case.is_done]
    skipped = [row for row in rows if row.outcome == SKIPPED]
    failed = len(cases) - len(done) - len(skipped)
    page = (
        reports.report([case.output for case in done], output / reports.FILE_NAME) if done else None
    )
    counts = {DONE: len(done), SKIPPED: len(skipped), FAILED: failed}
    print(json.dumps({"report": str(page) if page else None, **counts}))
    return 1 if failed else 0


def _plan(case: Case) -> PlannedRun:
    """What would be run, and the bytes that it would need."""
    cluster, run = case.cluster, case.cfg
    state = "done" if case.is_done else "skip" if case.skipped else "run"
    words = ["trainmark", *arguments(case.words, cluster.devices)]
    remarks = {"skip": [case.skipped or ""], "run": [shlex.join(words)], "done": []}[state]
    if state != "run" and run.data not in (None, SYNTHETIC) and not Path(run.data).exists():
        remarks.append(f"mem is of the run's own sizes, because {run.data} is not here.")
        run = dataclasses.replace(run, data=None)
    shared = cluster.hardware == "cpu" and cluster.nodes == 1
    return PlannedRun(
        name=f"case {case.name}",
        cells=[case.name, run.name, str(cluster), state],
        run=run,
        cluster=cluster,
        device_bytes=devices.host_memory_bytes() // cluster.devices if shared else None,
        remark="\n".join(remarks) or None,
    )
