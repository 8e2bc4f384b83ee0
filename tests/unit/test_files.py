"""Files and folders that appear whole: what they replace, what they leave alone, who may write."""

import contextlib
import os
import stat
import threading
from pathlib import Path

import pytest

from tests.small import train
from tests.unit.refusals import refused
from tests.waiting import PATIENCE_S
from trainmark import files
from trainmark.errors import InputError

# --- an output that is no plain file


def test_a_fifo_gets_the_text_and_stays_a_fifo(tmp_path: Path) -> None:
    path, received = tmp_path / "fifo", []
    os.mkfifo(path)
    reader = threading.Thread(target=lambda: received.append(path.read_text()), daemon=True)
    reader.start()
    files.write_atomically(path, "some text")
    reader.join(timeout=PATIENCE_S)
    assert received == ["some text"]
    assert stat.S_ISFIFO(path.stat().st_mode)


def test_a_device_gets_the_text_and_stays_a_device(tmp_path: Path) -> None:
    """A terminal's, which a mistake of ours cannot replace; /dev/null, as root, it could."""
    ours, its = os.openpty()
    os.set_blocking(ours, False)
    with os.fdopen(ours, "rb", buffering=0) as screen, os.fdopen(its, "wb", buffering=0):
        path = tmp_path / "terminal"  # by a link, as /dev/stdout is one
        path.symlink_to(os.ttyname(its))
        files.write_atomically(path, "some text")
        assert screen.read(100) == b"some text"
        assert path.is_symlink()
        assert stat.S_ISCHR(path.stat().st_mode)


def test_a_descriptor_of_a_file_gets_the_text(tmp_path: Path) -> None:
    """As /dev/stdout behind a shell's `>`: another file of that name would not be the same."""
    with (tmp_path / "out").open("w") as out:
        files.write_atomically(Path(f"/proc/self/fd/{out.fileno()}"), "some text")
        assert os.path.samestat(os.fstat(out.fileno()), (tmp_path / "out").stat())
    assert (tmp_path / "out").read_text() == "some text"


def test_what_a_link_names_is_replaced_and_the_link_stays(tmp_path: Path) -> None:
    target, link = tmp_path / "page.html", tmp_path / "link.html"
    target.write_text("before")
    link.symlink_to(target)
    files.write_atomically(link, "after")
    assert link.is_symlink()
    assert target.read_text() == "after"


def test_a_socket_is_refused(tmp_path: Path) -> None:
    import socket

    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
        with pytest.raises(InputError, match="expected a file"):
            files.write_atomically(tmp_path / "socket", "text")
    assert stat.S_ISSOCK((tmp_path / "socket").stat().st_mode)


def test_a_folder_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "disk")
    with files.building(tmp_path / "out") as partial:
        (partial / "file").write_text("whole")
    assert (tmp_path / "out").is_symlink()
    assert (tmp_path / "disk" / "file").read_text() == "whole"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["disk", "out"]


# --- names that something else has


@pytest.mark.parametrize("name", [".page.writing", ".page.partial"])
def test_links_with_the_names_of_temporary_files_are_left_alone(tmp_path: Path, name: str) -> None:
    precious = tmp_path / "precious"
    precious.write_text("kept")
    (tmp_path / name).symlink_to(precious)
    files.write_atomically(tmp_path / "page", "text")
    assert (tmp_path / "page").read_text() == "text"
    assert precious.read_text() == "kept"


def test_a_lock_that_is_a_link_is_refused_and_its_target_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    precious, output = tmp_path / "precious", tmp_path / "run"
    precious.write_text("kept")
    output.mkdir()
    (output / ".lock").symlink_to(precious)
    assert train(output, "--max-steps", "2") == 2
    assert ".lock" in capsys.readouterr().err
    assert precious.read_text() == "kept"


def test_a_lock_of_a_preparation_that_is_a_link_is_refused_and_its_target_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    precious, log = tmp_path / "precious", tmp_path / "log.csv"
    precious.write_text("kept")
    log.write_text("label,a\n" + "0,x\n1,y\n" * 40)
    (tmp_path / ".data.work").mkdir()
    (tmp_path / ".data.work" / "lock").symlink_to(precious)
    words = ["prepare", "csv", "--input", str(log), "--output", str(tmp_path / "data")]
    refused(capsys, [*words, "--columns", "label=label categorical=a"], "lock")
    assert precious.read_text() == "kept"


# --- folders that cannot appear when they are whole


def test_a_folder_that_cannot_be_replaced_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "log.csv").write_text("label,a\n" + "0,x\n1,y\n" * 40)
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    csv = ["prepare", "csv", "--input", str(tmp_path / "log.csv"), "--output"]
    synthetic = ["prepare", "synthetic", "--rows", "300", "--days", "2", "--output", str(here)]
    for words in ([*csv, ".", "--columns", "label=label categorical=a"], synthetic):
        refused(capsys, words, f"{here} is the folder that you are in", f"such as {here / 'data'}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) == here)
    with pytest.raises(InputError, match="is where a disk is mounted"), files.building(here):
        pytest.fail("It was entered.")
    refused(capsys, [*csv, "/", "--columns", "label=label categorical=a"], "/ is not empty")
    assert not any(here.iterdir())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["here", "log.csv"]


# --- two processes, one output


def test_one_process_at_a_time_builds_a_folder(tmp_path: Path) -> None:
    output = tmp_path / "out"
    with files.building(output) as partial:
        (partial / "first").touch()
        with pytest.raises(InputError, match="Another process is writing"), files.building(output):
            pytest.fail("It was entered twice.")
        (partial / "last").touch()
    assert sorted(path.name for path in output.iterdir()) == ["checksums.json", "first", "last"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_what_a_killed_process_left_is_no_part_of_the_folder(tmp_path: Path) -> None:
    left = tmp_path / ".out.partial" / "whole"
    left.mkdir(parents=True)
    (left / "old").touch()
    (left.parent / "lock").touch()
    with files.building(tmp_path / "out") as partial:
        (partial / "new").touch()
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"new", "checksums.json"}


def test_a_lock_whose_folder_is_removed_by_its_holder_is_taken_anew(tmp_path: Path) -> None:
    """Whoever opened the file before it was removed, and locks it after, holds nothing."""
    taken, entered = [], []

    def contend() -> None:
        for _ in range(40):
            try:
                with files.building(tmp_path / "out") as partial:
                    entered.append(1)
                    assert len(entered) == 1
                    (partial / "file").touch()
                    entered.pop()
                taken.append(1)
                with contextlib.suppress(OSError):  # another may be quicker
                    (tmp_path / "out" / "file").unlink()
                    (tmp_path / "out").rmdir()
            except InputError:
                pass

    threads = [threading.Thread(target=contend) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert taken
    assert not entered
