"""A run in a process of its own: its words are kept, its end is told, and a stop reaches it."""

import signal
import sys
from pathlib import Path

import pytest

from trainmark.verbs import attempt
from trainmark.verbs.attempt import DONE, FAILED, OUT_OF_MEMORY, Outcome

STOPPED = """
import os, signal, sys
def save(number, frame):
    alone = os.getpgrp() == os.getpid()  # so that a terminal's Ctrl-C comes once, passed on
    print("saved after", signal.Signals(number).name, "alone" if alone else "")
    sys.exit({code})
signal.signal(signal.{name}, save)
os.kill(os.getppid(), signal.{name})
signal.pause()
"""


def end(monkeypatch: pytest.MonkeyPatch, log: Path, script: str) -> Outcome:
    """What is said of a run that was this script."""
    start = attempt._start
    monkeypatch.setattr(
        attempt, "_start", lambda command, log: start([sys.executable, "-c", script], log)
    )
    return attempt.attempt(["dlrm-demo"], 1, log)


@pytest.mark.parametrize(
    ("script", "kind", "reason"),
    [
        ("print('fine')", DONE, ""),
        (
            "import sys; sys.exit('trainmark: Out of memory (CUDA). Use less.')",
            OUT_OF_MEMORY,
            "Out of memory (CUDA). Use less.",
        ),
        (
            "import sys; sys.exit('torch.OutOfMemoryError: CUDA')",
            OUT_OF_MEMORY,
            "ended with exit code 1, see LOG",
        ),
        ("import sys; sys.exit('step 1\\ntrainmark: No data.\\nwarning')", FAILED, "No data."),
        ("raise SystemExit(3)", FAILED, "ended with exit code 3, see LOG"),
        (
            "import os; os.kill(os.getpid(), 9)",
            FAILED,
            "was killed by SIGKILL (Linux does so when memory runs out), see LOG",
        ),
    ],
)
def test_how_a_run_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, kind: str, reason: str
) -> None:
    log = tmp_path / "new" / "run.log"
    assert end(monkeypatch, log, script) == Outcome(kind, reason.replace("LOG", str(log)))


def test_what_it_prints_is_shown_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "run.log"
    for word in ("erste", "zwölfte"):
        end(monkeypatch, log, f"import sys; print('{word}'); sys.stderr.write('e\\n')")
        monkeypatch.undo()
    assert sorted(log.read_text().split()) == ["e", "e", "erste", "zwölfte"]
    assert sorted(capsys.readouterr().err.split()) == ["e", "e", "erste", "zwölfte"]


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
@pytest.mark.parametrize("code", [0, 1, 130])
def test_a_stop_reaches_the_run_which_saves_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, code: int
) -> None:
    """Also where it was about to end anyway: then those after it are not started."""
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt, match="the same command goes on"):
        end(monkeypatch, tmp_path / "run.log", STOPPED.format(name=name, code=code))
    assert (tmp_path / "run.log").read_text() == f"saved after {name} alone\n"
    assert signal.getsignal(signal.SIGTERM) is before


def test_several_devices_are_launched() -> None:
    assert attempt.arguments(["dlrm-demo", "--lr", "1"], 1) == ["train", "dlrm-demo", "--lr", "1"]
    launched = ["launch", "--on", "torchrun", "-j", "1x4", "train", "dlrm-demo"]
    assert attempt.arguments(["dlrm-demo"], 4) == launched
