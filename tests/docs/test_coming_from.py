"""`docs/coming_from.md` names only what exists here, and leaves out nothing of theirs."""

import dataclasses
import json
import re
import shlex
import typing
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.docs.commands import HELP, ROOT, flags, parses
from trainmark import cli, workloads
from trainmark.config import TrainOptions
from trainmark.hardware.devices import Cluster
from trainmark.resolve import accumulation_remark
from trainmark.run.result import Result
from trainmark.verbs.flags import parse_run

PAGE = ROOT / "docs" / "coming_from.md"
PUBLISHED: dict[str, dict[str, list[str]]] = json.loads(
    (Path(__file__).parent / "published_flags.json").read_text()
)
BACKTICKS = re.compile(r"`([^`]+)`")


@dataclass(frozen=True)
class Row:
    system: str
    kind: str
    """`flags` or `columns`."""
    theirs: list[str]
    """Without leading dashes."""
    here: str
    note: str


def read_rows() -> list[Row]:
    rows: list[Row] = []
    system, kind = "", ""
    for line in PAGE.read_text().splitlines():
        if line.startswith("## "):
            system = line.removeprefix("## ")
        if not line.startswith("|") or set(line) <= set("|-"):
            continue
        cells = [cell.strip().replace(r"\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        assert len(cells) == 3, line
        if cells[0].startswith("theirs"):
            kind = "columns" if "results" in cells[0] else "flags"
            continue
        theirs = [name.lstrip("-") for name in BACKTICKS.findall(cells[0])]
        rows.append(Row(system, kind, theirs, cells[1], cells[2]))
    return rows


ROWS = read_rows()


def ours() -> list[str]:
    """Everything in backticks in the second column and in the notes."""
    return [
        name for row in ROWS for cell in (row.here, row.note) for name in BACKTICKS.findall(cell)
    ]


def test_the_page_was_read() -> None:
    assert len(ROWS) > 240
    assert {row.system for row in ROWS} == set(PUBLISHED)


@pytest.mark.parametrize("system", PUBLISHED)
@pytest.mark.parametrize("kind", ["flags", "columns"])
def test_every_published_name_has_a_row(system: str, kind: str) -> None:
    listed = {
        name for row in ROWS if (row.system, row.kind) == (system, kind) for name in row.theirs
    }
    wanted = PUBLISHED[system][kind]
    assert len(wanted) == len(set(wanted))
    assert set(wanted) - listed == set()
    assert listed - set(wanted) == set(), "add these to published_flags.json"


def test_the_published_lists_are_complete() -> None:
    """How many there are, so that a list that shrinks by accident is noticed."""
    flags_of = {system: len(names["flags"]) for system, names in PUBLISHED.items()}
    assert flags_of == {
        "NVIDIA DLRM, TensorFlow 2": 94,
        "NVIDIA DLRM, PyTorch": 54,
        "TorchRec DLRM example": 65,
        "FlagPerf, the framework": 38,
        "FlagPerf DLRM": 65,
        "FlagPerf DistilBERT": 29,
        "FlagPerf Llama-3-8B (Megatron)": 71,
    }
    assert sum(len(names["columns"]) for names in PUBLISHED.values()) == 122


def test_every_row_answers() -> None:
    for row in ROWS:
        answered = row.here == "planned" or BACKTICKS.search(row.here) or row.here == "-"
        assert answered, row
        assert row.note or row.here != "-", f"no reason: {row}"


def test_named_flags_exist() -> None:
    """A flag stands alone (of `train`), with its value, or after the words of another verb."""
    checked = set()
    for name in ours():
        verb = next((v for v in HELP if name.startswith(f"{v} --")), "train")
        flag, *value = name.removeprefix(verb).split()
        if not flag.startswith("--"):
            continue
        assert flag in flags(verb), f"{name}: no such flag of {verb}"
        if value and verb == "train":
            assert parses(["train", "dlrm-demo", flag, *value]) == 0, name
        checked.add(f"{verb} {flag}")
    # 60 at the time of writing; later workloads may only add.
    assert len(checked) >= 50, sorted(checked)


def test_named_verbs_and_runs_exist() -> None:
    words = [name.split() for name in ours()]
    verbs = {w[1] for w in words if w[0] == "trainmark"}
    assert verbs <= set(cli.VERBS)
    assert len(verbs) >= 4
    runs = set(re.findall(r"`(dlrm-[\w-]+)`", PAGE.read_text()))
    assert runs <= set(workloads.named_runs())
    assert len(runs) == 7  # all but the demo


def test_named_fields_exist() -> None:
    """A word that starts with a field of the result is a path into it."""
    roots = {field.name for field in dataclasses.fields(Result)}
    paths = {name for name in ours() if re.fullmatch(r"[a-z_]+(\.[a-z_]+)*", name)}
    paths = {path for path in paths if path.split(".")[0] in roots}
    assert len(paths) >= 25, sorted(paths)
    config = typing.cast(typing.Any, workloads.named_run("dlrm-demo"))
    for path in paths:
        root, *rest = path.split(".")
        if root == "config":
            assert all(hasattr(config, name) for name in rest), path
        elif root == "hardware":
            assert rest in ([], ["monitor"]), path
        elif rest:
            kind = typing.get_type_hints(Result)[root]
            assert [f.name for f in dataclasses.fields(kind)].count(rest[0]) == 1, path


# --- whole command lines

NUMBERS = re.compile(r"[\d.e-]+(,[\d.e-]+)*")
IN_OTHER_UNITS = {"min-lr", "tensor-model-parallel-size", "pipeline-model-parallel-size"}
"""A fraction of the peak here, or part of one word; both are asserted below."""


def pairs() -> list[tuple[str, str]]:
    """Their lines and ours, as text."""
    _, _, after = PAGE.read_text().partition("## Whole command lines")
    text = after.partition("\n## ")[0].replace("\\\n", "")
    return re.findall(r"```text\n(.*?)```\n\n```sh\n(.*?)```", text, re.S)


def given(text: str) -> dict[str, str]:
    """Flags and their values in some lines."""
    words = shlex.split(text)
    values = [*words[1:], "--"]
    return {
        word.lstrip("-"): value
        for word, value in zip(words, values, strict=True)
        if word.startswith("--") and not value.startswith("--")
    }


@pytest.mark.parametrize(
    ("index", "system", "count"),
    [
        (0, "NVIDIA DLRM, TensorFlow 2", 11),
        (1, "NVIDIA DLRM, PyTorch", 11),
        (2, "TorchRec DLRM example", 7),
        (4, "FlagPerf Llama-3-8B (Megatron)", 14),
    ],
)
def test_translated_lines_say_the_same(index: int, system: str, count: int) -> None:
    """Every flag of theirs that has a counterpart by the tables is there, with the same numbers."""
    assert len(pairs()) == 5
    theirs, here = map(given, pairs()[index])
    checked = 0
    for flag, value in theirs.items():
        rows = [r for r in ROWS if r.system == system and r.kind == "flags" and flag in r.theirs]
        ours = [
            word.split()[-1 if " --" in word else 0].lstrip("-")
            for row in rows
            for word in BACKTICKS.findall(row.here)
            if "--" in word
        ]
        if not ours or not rows[0].here.strip("-"):
            continue
        found = [name for name in ours if name in here]
        if flag in ("mode", "restore_checkpoint_path"):
            continue  # verbs here
        assert found, f"--{flag}: none of {ours} in {here}"
        if NUMBERS.fullmatch(value) and flag not in IN_OTHER_UNITS:
            same = [list(map(float, text.split(","))) for text in (value, here[found[0]])]
            assert same[0] == same[1], flag
        checked += 1
    assert checked >= count


@pytest.mark.parametrize(
    ("index", "line", "cluster", "expected"),
    [
        (0, 1, "a100-80gx1x8", ("fp16", 65536, 8192, 1, 24)),
        (1, 0, "a100-80gx1x1", ("fp16", 65536, 65536, 1, 24)),
        (2, 1, "a100-40gx1x8", (None, 65536, 8192, 1, 5)),
        (3, 0, "a100-40gx1x8", ("fp16", 65536, 8192, 1, 24)),
        (3, 1, "a100-40gx1x8", ("fp32", 256, 32, 1, 5e-5)),
        (4, 0, "a100-80gx1x8", ("bf16", 512, 1, 128, 1e-5)),
    ],
)
def test_translated_lines_resolve(
    index: int, line: int, cluster: str, expected: tuple[typing.Any, ...]
) -> None:
    words = shlex.split(pairs()[index][1].splitlines()[line])
    words = words[words.index("train") + 1 :]
    place = words.index("--data")
    run, _ = parse_run("train", words[:place] + words[place + 2 :], TrainOptions)
    resolved = workloads.resolve(dataclasses.replace(run, data="synthetic"), Cluster.parse(cluster))
    assert resolved.precision == (expected[0] or resolved.precision)
    assert (resolved.global_batch, resolved.micro_batch, resolved.accumulate) == expected[1:4]
    assert resolved.lr == expected[4]
    named = workloads.named_run(run.name)
    assert accumulation_remark(named, run, resolved) is None or index == 4
    if index == 4:
        assert resolved.lr * resolved.schedule.end_factor == pytest.approx(1e-6)
        assert typing.cast(typing.Any, resolved).parallel == "PP2DP4TP1"
