"""What the documentation tests share: the real flags of every verb, and a parse without a run."""

import contextlib
import io
import re
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from itertools import takewhile
from pathlib import Path
from types import SimpleNamespace

import pytest

from trainmark import cli, workloads

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", "CONTRIBUTING.md", *sorted(f"docs/{p.name}" for p in ROOT.glob("docs/*.md"))]

RUN = {name: next(iter(known.runs)) for name, known in workloads.DEFINITIONS.items()}
"""A run of each workload: their flags differ."""


def table(page: str, heading: str) -> list[list[str]]:
    """The cells of the one table of a page whose heading begins so, row by row."""
    lines = (ROOT / page).read_text().splitlines()
    (start,) = (i for i, line in enumerate(lines) if line.startswith(f"| {heading}"))
    rows = takewhile(lambda line: line.startswith("|"), lines[start + 2 :])
    return [[cell.strip(" *") for cell in row.strip("|").split("|")] for row in rows]


def _help() -> dict[str, list[list[str]]]:
    """What to type before `--help` to see all flags of a verb (of all workloads, all kinds)."""
    words = {verb: [[verb]] for verb in cli.VERBS if verb != "prepare"}
    words |= {
        verb: [[verb, run] for run in RUN.values()]
        for verb in ("show", "plan", "train", "sweep", "gate")
    }
    words["launch"] = [["launch"], ["launch", "logs"]]
    return words | {f"prepare {kind}": [["prepare", kind]] for kind in cli.PREPARATIONS}


HELP = _help()


@cache
def flags(verb: str) -> frozenset[str]:
    """The flags of a verb, as its own `--help` prints them."""
    text = io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(text),
    ):
        patch.setenv("COLUMNS", "120")
        for words in HELP[verb]:
            with contextlib.suppress(SystemExit):
                cli.main([*words, "--help"])
    # A flag starts its line; flags in the middle of a sentence do not count.
    lines = re.findall(
        r"^[│|]? {1,2}(?:-\w(?: \w+)?, )?(--[a-z][\w.-]*(?:, --[a-z][\w.-]*)*)",
        text.getvalue(),
        re.M,
    )
    found = {flag for line in lines for flag in line.split(", ")}
    if "--compile" in found:  # a pair on the command line, one field with three values below it
        found.add("--no-compile")
    return frozenset(found | {"--debug"})  # which `main` takes for every verb


def verb_of(words: Sequence[str]) -> str:
    """`prepare criteo` or `train`, whichever the words after `trainmark` start with."""
    two = " ".join(words[:2])
    return two if two in HELP else words[0] if words else ""


def parses(words: Sequence[str]) -> int:
    """Exit code of `trainmark WORDS...` with everything after the parsing left out."""

    def nothing(*args: object, **kwargs: object) -> int:
        return 0

    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()):
        for target in (
            "trainmark.verbs.runs.train",
            "trainmark.verbs.runs.dry_run",
            "trainmark.verbs.evaluate.evaluate",
            "trainmark.verbs.runs.infer",
            "trainmark.inference.predict.predict",
            "trainmark.verbs.runs.resolved_run",
            "trainmark.verbs.plan.plan",
            "trainmark.verbs.plan_check.check",
            "trainmark.verbs.calibrate.calibrate",
            "trainmark.verbs.export.export",
            "trainmark.verbs.verify.verify",
            "trainmark.verbs.replay.command",
            "trainmark.verbs.replay.described",
            "trainmark.inference.serving.serve",
            "trainmark.report.reports.report",
            "trainmark.report.reports.table_report",
            "trainmark.report.reports.compare",
            "trainmark.verbs.board.write",
            "trainmark.verbs.board.serve",
            "trainmark.verbs.suite.suite",
            "trainmark.verbs.gate.gate",
            "trainmark.verbs.sweep.sweep",
            "trainmark.verbs.sweep.dry_runs",
            "trainmark.run.alignment.sentence",
            *(
                f"trainmark.distributed.launch.{verb}"
                for verb in ("launch", "status", "logs", "stop")
            ),
            *(f"{module}.prepare" for module in cli.PREPARATIONS.values()),
        ):
            patch.setattr(target, nothing)
        patch.setattr("trainmark.hardware.hardware_file.read", lambda path: None)
        agreed = SimpleNamespace(passed=True)
        patch.setattr("trainmark.run.alignment.align", lambda *_: agreed)
        patch.setattr(import_module("trainmark.report.alignment_page"), "write_page", nothing)
        try:
            return cli.main(list(words))
        except SystemExit as stop:
            return int(stop.code or 0)
