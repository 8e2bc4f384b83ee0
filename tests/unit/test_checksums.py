"""A flipped byte is found, whatever file it is in, and the file is named."""

import itertools
import json
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.unit.refusals import refused
from trainmark import checksums, files
from trainmark.cli import main
from trainmark.errors import InputError
from trainmark.inference.server import process
from trainmark.verbs.verify import verify

UNSEALED = {".lock", "loss.csv", "curves.csv", "perf.log", "mlperf.log", "assessment.json"}
"""Of a run's folder: logs, which grow while it trains."""


@pytest.fixture(scope="module")
def made(clicks: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset, a run and an export."""
    folder = tmp_path_factory.mktemp("made")
    shutil.copytree(clicks / "data", folder / "data")
    shutil.copytree(clicks / "run", folder / "run")
    assert main(["export", str(folder / "run"), "--output", str(folder / "export")]) == 0
    return folder


def _flipped(path: Path, place: int, bit: int) -> bytes:
    """Flip a bit; what the file held."""
    before = path.read_bytes()
    changed = bytearray(before)
    changed[place] ^= 1 << bit
    path.write_bytes(changed)
    return before


def _flips(folder: Path, count: int) -> Iterator[tuple[Path, int, int]]:
    draw = random.Random(count)
    sealed = [
        path
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in UNSEALED and path.stat().st_size
    ]
    for path in itertools.islice(itertools.cycle(sealed), count):
        yield path, draw.randrange(path.stat().st_size), draw.randrange(8)


def _says_the_same(before: bytes, after: bytes) -> bool:
    """A flip of the checksum's own key, or from 1e5 to 1E5, changes no content."""
    try:
        old, new = json.loads(before), json.loads(after)
    except ValueError:
        return False
    old.pop(checksums.KEY, None)
    return isinstance(new, dict) and all(new.get(key, "gone") == old[key] for key in old)


@pytest.mark.parametrize(("part", "count"), [("data", 400), ("export", 300), ("run", 300)])
def test_every_flip_is_found_and_its_file_named(
    made: Path, part: str, count: int, capsys: pytest.CaptureFixture[str]
) -> None:
    verify(made / part)
    assert "intact" in capsys.readouterr().out
    found, unnoticed, unnamed = 0, [], []
    for path, place, bit in _flips(made / part, count):
        before = _flipped(path, place, bit)
        try:
            verify(made / part)
            if not _says_the_same(before, path.read_bytes()):
                unnoticed.append(f"{path}: bit {bit} of byte {place:,}")
        except InputError as error:
            found += 1
            if path.name not in str(error) and str(path.parent) not in str(error):
                unnamed.append(str(error))
        finally:
            path.write_bytes(before)
    assert (unnoticed, unnamed) == ([], [])
    assert found >= 0.9 * count
    print(f"{part}: {found} of {count} found, each in a sentence; the others changed no content")
    verify(made / part)


def test_what_is_no_file_and_has_an_odd_name_stops_no_verification(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    odd = os.fsdecode(b"\xff\x1b[31m")
    (tmp_path / odd).mkdir()
    shutil.copy(made / "run" / "result.json", tmp_path / odd)
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "folder.json").mkdir()
    verify(tmp_path)
    told = capsys.readouterr().out
    assert "result.json: intact" in told
    assert "\x1b" not in told
    told.encode()


def test_data_are_checked_before_they_are_trained_on(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = made / "data"
    for name in ("train/label.bin", "train/cat_3.bin", "test/numerical.bin", "feature_spec.yaml"):
        before = _flipped(data / name, 20, 0)
        words = ["train", "dlrm-demo", "--data", str(data), "--output", str(tmp_path / "run")]
        refused(capsys, words, f"{data / name} is not as it was written")
        (data / name).write_bytes(before)
    assert not (tmp_path / "run").exists()


def test_other_readers_check_what_they_read(
    made: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(process, "_announce", lambda *args: pytest.fail("It is served."))
    serve = [
        ["serve", str(made / part), "--data", str(made / "data"), "--port", "0"]
        for part in ("run", "export")
    ]
    plan = ["plan", "dlrm-demo", "--data", str(made / "data"), "--cluster", "h200x1x2"]
    cases = [
        (made / "export" / "model.safetensors", serve[1]),
        (made / "data" / "vocabulary" / "cat_0.parquet", serve[0]),
        (made / "data" / "vocabulary" / "cat_0.parquet", plan),
        (made / "data" / "prepare.json", serve[0]),
        (made / "run" / "result.json", ["report", str(made / "run"), "--output", str(tmp_path)]),
        (made / "run" / "result.json", ["compare", str(made / "run"), str(made / "run")]),
        (made / "run" / "config.json", ["evaluate", str(made / "run")]),
    ]
    for path, words in cases:
        before = path.read_bytes()
        digit = next(
            place
            for place in range(len(before) // 3, len(before))
            if path.suffix != ".json" or before[place] in b"2468"
        )
        _flipped(path, digit, 0)
        refused(capsys, words, f"{path} is not as it was written")
        path.write_bytes(before)


def test_what_was_changed_on_purpose_can_be_used(made: Path, tmp_path: Path) -> None:
    data = shutil.copytree(made / "data", tmp_path / "data")
    _flipped(data / "train" / "numerical.bin", 0, 0)
    with pytest.raises(InputError, match=r"remove .*checksums\.json"):
        checksums.check(data)
    (data / "checksums.json").unlink()
    assert checksums.check(data) == 0


def test_an_export_without_checksums_is_held_to_its_form(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As earlier versions wrote it, and then somebody changed it."""
    model = shutil.copytree(made / "export", tmp_path / "model")
    (model / "checksums.json").unlink()
    config = json.loads((model / "config.json").read_text())
    for name, content, reason in [
        ("model.safetensors", (model / "model.safetensors").read_bytes()[:-8], "is damaged"),
        ("config.json", json.dumps(config | {"top_mlp": []}).encode(), "top_mlp"),
    ]:
        before = (model / name).read_bytes()
        (model / name).write_bytes(content)
        refused(capsys, ["serve", str(model), "--port", "0"], str(model / name), reason)
        (model / name).write_bytes(before)


def test_a_missing_file_is_named(made: Path, tmp_path: Path) -> None:
    data = shutil.copytree(made / "data", tmp_path / "data")
    (data / "train" / "cat_1.bin").unlink()
    with pytest.raises(InputError, match=r"cat_1\.bin is not as it was written"):
        verify(data)


def test_a_folder_without_checksums(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "folder.json").mkdir()
    refused(capsys, ["verify", str(tmp_path)], "holds nothing with a checksum")
    refused(capsys, ["verify", str(tmp_path / "none")], "is not a folder")


def test_sums_are_those_of_numpy(tmp_path: Path) -> None:
    words = np.random.default_rng(0).integers(0, 2**64, 1000, np.uint64)
    with files.building(tmp_path / "out") as folder:
        (folder / "a").write_bytes(words.tobytes() + b"\x05")
    sealed = json.loads((tmp_path / "out" / "checksums.json").read_text())["files"]
    expected = f"{(int(words.sum(dtype=np.uint64)) + 5) % 2**64:016x}"
    assert sealed == {"a": [8001, expected]}


def test_what_a_killed_process_left_unfinished_is_removed(tmp_path: Path) -> None:
    (tmp_path / "label.bin").write_bytes(b"1")
    (tmp_path / ".label.bin.bee80089.writing").write_bytes(b"")
    checksums.seal(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checksums.json", "label.bin"]


def test_a_file_may_be_summed_in_parts() -> None:
    data = random.Random(3).randbytes(1000)
    whole = checksums.Checksum()
    whole.update(data)
    for cuts in ([1, 2, 3], [8, 500], [333, 777, 778, 999]):
        bounds = [0, *cuts, len(data)]
        parts = []
        for start, stop in itertools.pairwise(bounds):
            part = checksums.Checksum(start)
            part.update(data[start:stop])
            parts.append(part.value())
        assert checksums.joined(parts) == whole.value()
