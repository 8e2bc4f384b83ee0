"""Whatever is wrong with what the user gave: exit code 2, one message, nothing half-written."""

import dataclasses
import errno
import importlib
import inspect
import io
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.small import snapshot, train, write_dataset
from tests.unit.refusals import refused, small
from tests.unit.results import make_result
from tests.waiting import PATIENCE_S
from trainmark import workloads
from trainmark.cli import PREPARATIONS, VERBS, main
from trainmark.config import Run, Schedule, TrainOptions
from trainmark.errors import in_words
from trainmark.files import write_atomically
from trainmark.verbs.flag_errors import ALIASES, sentence
from trainmark.verbs.flags import flags_of
from trainmark.verbs.options import ExportOptions
from trainmark.workloads.dlrm.runs import DlrmRun, Model, Optimizer

# --- words


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["trian"], ["Unknown verb 'trian'", "Did you mean 'train'?"]),
        (["train"], ["needs RUN", "dlrm-demo"]),
        (["show"], ["needs RUN"]),
        (["train", "dlrm-smal"], ["Unknown run 'dlrm-smal'", "Did you mean 'dlrm-small'?"]),
        (["show", "nothing-like-it"], ["Unknown run", "Known: dlrm-demo"]),
        (["prepare", "critoe"], ["Unknown kind of data", "Did you mean 'criteo'?"]),
        (["prepare"], ["needs KIND"]),
        (["train", "--lr", "3"], ["needs RUN"]),
        (["list", "--verbose"], ["--verbose"]),
        (["evaluate"], ["Missing from trainmark evaluate: PATH"]),
        (["evaluate", ""], ["An argument is empty"]),
        (["compare", "one"], ["Missing", "Output folder of another"]),
        (["evaluate", "/nonexistent"], ["/nonexistent", "config.json"]),
        (["report", "/nonexistent"], ["/nonexistent"]),
        (["compare", "/nonexistent", "/nonexistent"], ["/nonexistent"]),
        (
            ["prepare", "criteo", "--input", "/dev/", "--output", "never"],
            ["give its files, as '/dev/*'"],
        ),
        (["show", "dlrm-demo", "--cluster", "potato"], ["potato"]),
        (["show", "dlrm-demo", "--cluster", "h100x0x8"], ["h100x0x8"]),
    ],
)
def test_words(capsys: pytest.CaptureFixture[str], arguments: list[str], parts: list[str]) -> None:
    refused(capsys, arguments, *parts)


def test_a_runs_folder_where_its_name_belongs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text("{}")
    command = f"'trainmark show NAME --config {tmp_path / 'config.json'}'"
    refused(capsys, ["show", str(tmp_path)], f"{tmp_path} is the folder of a run", command)


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (["--lr", "fast"], ["--lr", "fast"]),
        (["--lr"], ["--lr"]),
        (["--max-steps", "1.5"], ["--max-steps", "1.5"]),
        (["--max-stepz", "3"], ["--max-stepz", "--max-steps"]),
        (["--model.table-rows", "5", "x"], ["--model.table-rows"]),
        (["--precision", "fp12"], ["--precision", "fp12"]),
        (["--optimizer.name", "sdg"], ["--optimizer.name", "sdg"]),
        (["--compile", "maybe"], ["maybe"]),
        (["stray"], ["stray"]),
        (["--output", ""], ["--output is empty", "leave the flag out"]),
        (["--data="], ["--data is empty", "leave the flag out"]),
        (["--repeats", "0"], ["repeats must be at least 1"]),
        (["--cluster", "h100x1x8"], ["--cluster is for --dry-run"]),
        (["--device", "cuda"], ["--device cuda"]),
        (["--profile", "5:2"], ["START:STOP"]),
        (["--checkpoint-every", "often"], ["'N minutes'", "'often'"]),
        (["--data", "/nonexistent"], ["/nonexistent does not exist"]),
        (["--from", "/nonexistent"], ["Checkpoint /nonexistent does not exist"]),
        (["--config", "/nonexistent.toml"], ["/nonexistent.toml does not exist"]),
        (["--output", "/dev/null"], ["/dev/null is a file"]),
        (["--output", "/dev/null/run"], ["/dev/null/run: Not a directory. One of the folders"]),
        (["--from", "/dev"], ["/dev is not a checkpoint", "step-*"]),
        (["--model.embedding-dim", "100000", "--model.bottom-mlp", "100000",
          "--model.table-rows", "100000000"], ["does not fit", "GiB"]),
        (["--precision", "tf32"], ["tf32 needs a GPU"]),
        (["--seed", "-1"], ["seed must be at least 0"]),
        (["--seed", "-1", "--synthetic-ids", "planted"], ["seed must be at least 0"]),
        (["--schedule.decay-steps", "5", "--schedule.decay-start", "None"], ["decay_start"]),
        (["--schedule.decay-power", "nan", "--schedule.decay-steps", "5",
          "--schedule.decay-start", "9000"], ["decay_power"]),
        (["--optimizer.eps", "nan"], ["optimizer.eps"]),
        (["--optimizer.eps", "0"], ["optimizer.eps", "above 0"]),
        (["--synthetic-ids", "planted", "--model.numerical-features", "40000"],
         ["Planted rows have at most 1,000 features. Received: 40,0"]),
        (["--target", "2"], ["target must lie between 0 and 1, as auc does. Received: 2.0."]),
        (["--data", __file__], ["data must be a dataset's folder", "'trainmark prepare'"]),
        (["--lr", "inf"], ["lr must be a finite number"]),
        (["--model.table-rows", str(10**15), "--model.embedding-dim", "512",
          "--model.bottom-mlp", "512"], ["parameters"]),
        (["--model.numerical-features", str(10**15), "--model.table-rows", "5",
          "--model.bottom-mlp", "512", "8"], ["parameters"]),
        (["--synthetic-rows", str(10**15)], ["shuffle_window", "Raise it"]),
        (["--synthetic-rows", str(2**63)], ["synthetic_rows must be at most"]),
        (["--profile", f"0:{10**20}"], ["START:STOP"]),
        (["--profile", "²:³"], ["START:STOP"]),
        (["--checkpoint-every", f"{'9' * 5000} steps"], ["checkpoint_every"]),
        (["--quality-split", "validation", "--data", "DATA"], ["feature_spec_validation.yaml"]),
    ],
)  # fmt: skip
def test_flags(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], parts: list[str]
) -> None:
    if "DATA" in flags:
        flags = [str(write_dataset(tmp_path / "data")) if f == "DATA" else f for f in flags]
    refused(capsys, small(*flags, output=tmp_path / "run"), *parts)  # the last --output counts
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["train", "dlrm-demo", "--learning-rate", "1"], "Did you mean --lr? See"),
        (["train", "dlrm-demo", "--learning_rate=1"], "Did you mean --lr? See"),
        (["sweep", "llama3-demo", "--learning-rate", "1"], "Did you mean --lr? See"),
        (
            ["train", "dlrm-demo", "--batch-size", "64"],
            "Did you mean --global-batch or --micro-batch? See",
        ),
        (["train", "dlrm-demo", "--num-epochs", "2"], "Did you mean --epochs? See"),
        (["show", "distilbert-demo", "--eval-batch-size", "2"], "Did you mean --eval-batch? See"),
        (["train", "dlrm-demo", "--output-dir", "x"], "Did you mean --output? See"),
        (["train", "dlrm-demo", "--resume", "x"], "Did you mean --from? See"),
        (["export", "x", "--output-dir", "x"], "Did you mean --output? See"),
        (
            ["train", "dlrm-demo", "--learning-rate", "1", "--batch-size=64", "--lrr", "3"],
            "For --learning-rate say --lr. For --batch-size say --global-batch or --micro-batch. ",
        ),
    ],
)
def test_flags_of_other_systems(
    capsys: pytest.CaptureFixture[str], arguments: list[str], hint: str
) -> None:
    refused(capsys, arguments, hint)


def test_no_hint_at_a_flag_that_the_verb_does_not_have(capsys: pytest.CaptureFixture[str]) -> None:
    message = refused(capsys, ["evaluate", "x", "--learning-rate", "1"], "--learning-rate")
    assert "--lr" not in message


def test_every_hint_is_at_a_flag_of_some_verb() -> None:
    """So that the table cannot grow stale."""
    prepare = [importlib.import_module(name).Options for name in set(PREPARATIONS.values())]
    flags = frozenset().union(*(flags_of(kind, {}) for kind in (*prepare, ExportOptions)))
    for run in (workloads.named_run("dlrm-demo"), TrainOptions()):
        flags |= flags_of(type(run), {"default": run})
    assert len(ALIASES) > 10
    for name, theirs in ALIASES.items():
        assert f"--{name}" in flags
        assert theirs.split()


def test_all_problems_are_reported_together(capsys: pytest.CaptureFixture[str]) -> None:
    """Numbers out of bounds first: of the rest, nothing can be said with them."""
    flags = ["--model.top-mlp", "4", "2", "--checkpoint-every", "x"]
    flags += ["--global-batch", "7", "--micro-batch", "2"]
    out_of_bounds = ["--lr", "-1", "--epochs", "0", "--log-every", "0"]
    first = ("lr", "epochs", "log_every", "checkpoint_every")
    message = refused(capsys, small(*flags, *out_of_bounds), *first, lines=5)
    assert "4 problems" in message
    names = ("top_mlp", "checkpoint_every", "global_batch")
    assert "3 problems" in refused(capsys, small(*flags), *names, lines=4)


def test_debug_shows_the_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(small("--lr", "-1", "--debug")) == 2
    assert "Traceback" in capsys.readouterr().err


# --- datasets


def _truncate(folder: Path, file: str) -> None:
    path = folder / file
    path.write_bytes(path.read_bytes()[:-1])


def _replace(path: Path, old: str, new: str) -> None:
    path.write_text(path.read_text().replace(old, new))


DAMAGES = {
    "a missing file": (lambda d: (d / "train/cat_1.bin").unlink(), "cat_1.bin does not exist"),
    "a missing label": (lambda d: (d / "test/label.bin").unlink(), "label.bin does not exist"),
    "a missing split": (lambda d: shutil.rmtree(d / "test"), "does not exist"),
    "a truncated numerical file": (lambda d: _truncate(d, "train/numerical.bin"), "truncated"),
    "a short id file": (lambda d: _truncate(d, "train/cat_1.bin"), "differ in length"),
    "an empty file": (lambda d: (d / "train/label.bin").write_bytes(b""), "is empty"),
    "an empty test split": (
        lambda d: [p.write_bytes(b"") for p in (d / "test").iterdir()],
        "is empty",
    ),
    "an empty specification": (lambda d: (d / "feature_spec.yaml").write_text(""), "nothing"),
    "no specification": (lambda d: (d / "feature_spec.yaml").unlink(), "does not exist"),
    "broken YAML": (lambda d: (d / "feature_spec.yaml").write_text("{"), "not readable as YAML"),
    "several ids a feature": (
        lambda d: _replace(d / "feature_spec.yaml", "dtype: int8", "dtype: int8\n    hotness: 2"),
        "differ in length",
    ),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_datasets_that_cannot_be_read_leave_no_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    folder, output = write_dataset(tmp_path / "data"), tmp_path / "run"
    do, part = DAMAGES[damage]
    do(folder)
    before = snapshot(folder)
    refused(capsys, small("--data", str(folder), output=output), part, str(folder), lines=None)
    assert not output.exists()
    assert snapshot(folder) == before


@pytest.mark.parametrize("split", ["train", "test"])
def test_an_id_out_of_range_ends_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], split: str
) -> None:
    folder = write_dataset(tmp_path / "data")
    path = folder / split / "cat_2.bin"
    ids = np.fromfile(path, np.int8)
    ids[250] = 3
    ids.tofile(path)
    flags = ("--data", str(folder), "--global-batch", "100")
    assert train(tmp_path / "run", *flags) == 2
    message = capsys.readouterr().err.splitlines()[-1]
    assert f"{path}: row 250 has id 3; cat_2.bin has ids 0 to 2" in message
    assert not (tmp_path / "run" / "result.json").exists()


# --- folders of runs


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", "{"),
        ("config.json", "[]"),
        ("config.json", '{"name": "nothing"}'),
        ("config.json", '{"name": "dlrm-demo", "lr": "x"}'),
        ("result.json", "{"),
        ("result.json", "[]"),
        ("result.json", '{"schema": "other/1"}'),
        ("result.json", '{"schema": "trainmark.result/1"}'),
    ],
)
def test_damaged_run_folders(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: str
) -> None:
    output = shutil.copytree(finished, tmp_path / "run")
    (output / name).write_text(content)
    before = snapshot(output)
    if name == "config.json":
        refused(capsys, ["evaluate", str(output)], str(output), lines=None)
        refused(capsys, small(output=output), lines=None)
    else:
        refused(capsys, ["report", str(output)], str(output), lines=None)
    assert snapshot(output) == before


def test_an_unwritable_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may write anywhere")
    tmp_path.chmod(0o500)
    refused(capsys, small(output=tmp_path / "run"), "Permission denied", lines=None)


def test_a_file_that_cannot_be_written_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = tmp_path / "result.json"
    write_atomically(path, "old")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"result.json") as raised:
        write_atomically(path, "new")
    assert in_words(raised.value) == (
        f"{path}: No space left on device. Free some space, or write to another disk."
    )
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [
        ("result.json", "old")
    ]


# --- a few real processes


def python(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    line, environment = [sys.executable, *words], os.environ | variables
    return subprocess.run(line, capture_output=True, text=True, timeout=PATIENCE_S, env=environment)


def trainmark(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return python("-m", "trainmark", *words, **variables)


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_flag_errors_read_the_same_on_any_terminal(encoding: str) -> None:
    words = ["train", "dlrm-demo", "--max-stepz", "3"]
    done = trainmark(*words, PYTHONIOENCODING=encoding, COLUMNS="60")
    expected = (
        "trainmark: Unrecognized options: --max-stepz, 3. Did you mean --max-steps? "
        "See 'trainmark train dlrm-demo --help'.\n"
    )
    assert (done.returncode, done.stdout, done.stderr) == (2, "", expected)


def test_exit_codes_of_a_real_process(tmp_path: Path) -> None:
    wrong = trainmark("train", "dlrm-smal")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr.startswith("trainmark: Unknown run 'dlrm-smal'")
    assert trainmark("--version").stdout.startswith("trainmark ")


HELP = f"""
import sys
from trainmark.cli import main
def help(*words):
    try:
        return main([*words, "--help"])
    except SystemExit as stop:
        return stop.code
calls = [(), *((verb,) for verb in {list(VERBS)}), ("train", "dlrm-demo"), ("show", "dlrm-small")]
codes = [help(*call) for call in calls]
assert not any(codes), codes
heavy = {{"torch", "pyarrow", "scipy", "sklearn", "pandas", "fastapi", "uvicorn"}}
heavy &= set(sys.modules)
assert not heavy, heavy
"""


def test_help_of_all_verbs_imports_no_torch() -> None:
    done = python("-c", HELP)
    assert done.returncode == 0, done.stderr
    for word in ("usage: trainmark VERB", "--evals-per-epoch", "Peak learning rate"):
        assert word in done.stdout


def test_every_flag_has_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:

    for kind in (Run, TrainOptions, Schedule, DlrmRun, Model, Optimizer):
        source = inspect.getsource(kind)
        own = [f for f in dataclasses.fields(kind) if re.search(rf"^    {f.name}: ", source, re.M)]
        assert own
        for field in own:
            nested = dataclasses.is_dataclass(field.default)
            overridden = any(field.name in base.__annotations__ for base in kind.__mro__[1:-1])
            text = rf'^    {field.name}: .*\n    """[A-Z`\d].*'
            assert nested or overridden or re.search(text, source, re.M), (kind, field.name)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (socket.gaierror(-2, "Name or service not known"), "Name or service not known."),
        (
            OSError(errno.EIO, "Short of room", "model.safetensors"),
            "model.safetensors: Short of room.",
        ),
        (
            OSError(errno.EACCES, "Error writing bytes. Detail: [errno 13] Permission denied"),
            "Permission denied. Change its permissions, or give another path.",
        ),
    ],
)
def test_what_an_error_tells_is_told(error: OSError, words: str) -> None:
    assert in_words(error) == words


def test_a_path_that_is_no_text_is_printed_byte_by_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    printed = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(printed, encoding="utf-8", errors="strict"))
    make_result().write(tmp_path)
    page = tmp_path / os.fsdecode(b"\xff.html")
    assert main(["board", str(tmp_path), "--output", str(page)]) == 0
    sys.stdout.flush()
    assert printed.getvalue() == os.fsencode(page) + b"\n"


def test_a_path_that_arrow_cannot_take_is_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "log.csv").write_text("label,a\n" + "0,x\n1,y\n" * 40)
    words = ["prepare", "csv", "--input", str(tmp_path / "log.csv")]
    words += ["--columns", "label=label categorical=a", "--output"]
    assert main([*words, str(tmp_path / os.fsdecode(b"\xff"))]) == 2
    said = capfd.readouterr().err.splitlines()[-1]
    assert said.startswith(f"trainmark: {tmp_path}")
    assert "is not text in UTF-8" in said
    assert "LC_ALL=C.UTF-8" in said


def test_a_folder_that_is_a_link_to_nothing_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "link").symlink_to("nowhere")
    refused(capsys, small(output=tmp_path / "link"), "a folder, not a file or a link to nothing")


def test_a_misspelt_choice_is_told_with_the_choices_in_order() -> None:
    box = (
        "╭─ Invalid choice ─╮\n│ invalid choice 'nvidi' for argument '--like'. Expected one of │\n"
        "│ ('torchrec', 'None', 'nvidia', 'flagperf'). │\n╰──╯"
    )
    expected = "Unknown --like 'nvidi'. Did you mean 'nvidia'? Known: flagperf, nvidia, torchrec."
    assert sentence(box, "report") == f"{expected} See 'trainmark report --help'."
