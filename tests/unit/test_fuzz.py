"""No traceback, no hang, no empty sentence, whatever is given."""

import contextlib
import random
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest

from tests.fuzz import KINDS, cases
from trainmark.cli import main

HANG_S = 120
FEW, MANY = 20, 910  # of each of eleven kinds: 10,010 in all


@contextmanager
def _ended_in_time(words: list[str]) -> Iterator[None]:
    """A hang is an error here, and not the end of all tests."""

    def hangs(number: int, frame: FrameType | None) -> None:
        raise AssertionError(f"It hangs: {words}")

    before = signal.signal(signal.SIGALRM, hangs)
    signal.alarm(HANG_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def _fault(words: list[str], capsys: pytest.CaptureFixture[str]) -> str | None:
    """What is wrong with the way that a command line ends."""
    try:
        with _ended_in_time(words):
            code = main(words)
    except Exception as error:
        return f"{words!r:.400}: {type(error).__name__}: {error!s:.300}"
    finally:
        printed = capsys.readouterr()
    if "\x1b" in printed.out + printed.err:
        return f"{words!r:.400} sends control characters to the terminal"
    if code not in (0, 1, 2):
        return f"{words!r:.400} ends with {code}"
    last = printed.err.strip().rpartition("trainmark: ")[2]
    if code == 2 and len(last) < 8:
        return f"{words!r:.400} ends with {code} and says {last!r}"
    return None


def _fuzz(kind: str, count: int, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder.mkdir()
    lines = cases(random.Random(f"{kind} {count}"), folder, kind, count)
    with contextlib.chdir(folder):
        faults = [fault for words in lines if (fault := _fault(words, capsys))]
    assert not faults, f"{len(faults)} of {count}:\n" + "\n".join(faults[:20])


@pytest.mark.parametrize("kind", KINDS)
def test_a_few(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _fuzz(kind, FEW, tmp_path / "fuzz", capsys)


def test_a_page_that_lacks_the_rows_that_its_file_counts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its readers waited for them without end."""
    (words,) = cases(random.Random(0), tmp_path, "parquet", 1)
    damaged = bytearray((tmp_path / "good.parquet").read_bytes())
    damaged[37] = 0x10
    (tmp_path / "log.parquet").write_bytes(damaged)
    assert _fault(words, capsys) is None


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_many(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _fuzz(kind, MANY, tmp_path / "fuzz", capsys)
