"""Dirty input of `prepare criteo`: named, skipped or kept, and never silent."""

import gzip
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from tests.unit.criteo_oracle import Oracle, random_lines
from tests.unit.test_prepare_criteo import BAD_LINES
from tests.unit.test_prepare_engine import ROOMY, TIGHT, assert_agrees, files, prepare
from trainmark.clicklog.arrays import primitives
from trainmark.clicklog.engine.limits import Limits
from trainmark.clicklog.sources import criteo_text
from trainmark.clicklog.sources.criteo_text import CriteoSource
from trainmark.clicklog.sources.recipes import RECIPES
from trainmark.clicklog.sources.source import Piece, Position
from trainmark.clicklog.sources.text_files import TextFile, TextRange
from trainmark.errors import InputError


def write_dirty(folder: Path) -> tuple[list[list[list[str]]], list[str]]:
    """Two days with every kind of bad line; the good lines by day, and where the bad ones are."""
    rng = random.Random(3)
    good_days, places = [], []
    for day in range(2):
        good = random_lines(rng, 120)
        lines = ["\t".join(line) for line in good]
        texts = list(enumerate(BAD_LINES.values()))[day::2]
        for number, (line, message) in texts:
            lines.insert(5 * number + 3, line)
            places.append(f"day_{day}:{5 * number + 4}: {message}")
        (folder / f"day_{day}").write_text("\n".join(lines) + "\n")
        good_days.append(good)
    return good_days, places


def listed(output: Path) -> list[str]:
    text = (output / "bad_rows.txt").read_text()
    return [line.rpartition("/")[2] for line in text.splitlines()]


@pytest.mark.parametrize("fast", [True, False])
def test_skip(fast: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(primitives, "FAST", fast)
    days, places = write_dirty(tmp_path)
    output = prepare(
        tmp_path / "day_*", tmp_path / "out", TIGHT, bad_rows="skip", frequency_threshold="0"
    )
    assert_agrees(output, Oracle(days))
    report = listed(output)
    assert len(report) == len(places)
    assert all(line.startswith(place) for line, place in zip(report, places, strict=True))


def repaired(line: str) -> list[str]:
    """What `keep` makes of a line: bad fields are missing, lacking ones too, surplus ones go."""
    fields = (line.split("\t") + [""] * 40)[:40]

    def good(number: int, field: str) -> bool:
        try:
            int(field, 10 if number < 14 else 16)
        except ValueError:
            return False
        if number < 14:
            return -(2**63) <= int(field) < 2**63
        return len(field) <= 8

    return fields[:1] + [f if good(n, f) else "" for n, f in enumerate(fields[1:], start=1)]


@pytest.mark.parametrize("fast", [True, False])
def test_keep(fast: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(primitives, "FAST", fast)
    _, places = write_dirty(tmp_path)
    days = []
    for day in range(2):
        lines = [repaired(line) for line in (tmp_path / f"day_{day}").read_text().split("\n")[:-1]]
        days.append([line for line in lines if line[0] in ("0", "1")])
    output = prepare(
        tmp_path / "day_*", tmp_path / "out", ROOMY, bad_rows="keep", frequency_threshold="0"
    )
    assert_agrees(output, Oracle(days))
    assert len(listed(output)) == len(places)


def test_stopped_runs_go_on_with_another_choice(tmp_path: Path) -> None:
    write_dirty(tmp_path)
    whole = prepare(tmp_path / "day_*", tmp_path / "whole", bad_rows="skip")
    with pytest.raises(InputError, match=r"day_0:4: 39 tab-separated fields.*--bad-rows skip"):
        prepare(tmp_path / "day_*", tmp_path / "out", TIGHT)
    with pytest.raises(InputError, match="fraction"):
        prepare(tmp_path / "day_*", tmp_path / "out", TIGHT, holdout="2")
    kept = prepare(tmp_path / "day_*", tmp_path / "out", TIGHT, bad_rows="skip")
    assert files(kept) == files(whole)


@pytest.mark.parametrize("kind", ["gz", "zst"])
def test_damaged_archive(kind: str, tmp_path: Path) -> None:
    lines = random_lines(random.Random(1), 3000)
    text = "".join("\t".join(line) + "\n" for line in lines).encode()
    data = gzip.compress(text) if kind == "gz" else pa.compress(text, "zstd", asbytes=True)
    (tmp_path / f"day_0.{kind}").write_bytes(data[: len(data) * 2 // 3])
    (tmp_path / "day_1").write_bytes(text[:4000].rpartition(b"\n")[0])
    with pytest.raises(InputError, match=rf"day_0\.{kind}:\d+: the compressed data is damaged"):
        prepare(tmp_path / "day_*", tmp_path / "out")
    output = prepare(tmp_path / "day_*", tmp_path / "out", bad_rows="skip")
    (line,) = listed(output)
    assert line.startswith(f"day_0.{kind}:")
    assert "damaged" in line
    found = set()
    for step in (1000, 65_537, 1 << 20):  # however much is asked for at a time
        with TextFile(tmp_path / f"day_0.{kind}") as file:
            parts, buffer = [], np.empty(step, np.uint8)
            while count := file.read_into(buffer):
                parts.append(buffer[:count].tobytes())
        found.add(b"".join(parts))
    [before_damage] = found
    assert len(before_damage) > 1 << 16
    assert text.startswith(before_damage)


@pytest.mark.parametrize("kind", ["", ".gz"])
def test_empty_file_among_others(kind: str, tmp_path: Path) -> None:
    days = [random_lines(random.Random(1), 50), [], random_lines(random.Random(2), 20)]
    for number, lines in enumerate(days):
        text = "".join("\t".join(line) + "\n" for line in lines).encode()
        written = gzip.compress(text) if kind else text
        (tmp_path / f"day_{number}{kind}").write_bytes(written)
    with pytest.raises(InputError, match=f"day_1{kind} is empty"):
        prepare(tmp_path / "day_*", tmp_path / "out")
    output = prepare(tmp_path / "day_*", tmp_path / "out", bad_rows="skip", frequency_threshold="0")
    assert listed(output) == [f"day_1{kind}:1: the file is empty"]
    assert_agrees(output, Oracle(days))


ODD_FIELDS: dict[str, Any] = {
    "space": (5, " 5"),
    "plus": (5, "+5"),
    "prefix": (5, "0x5"),
    "minus alone": (5, "-"),
    "two minus": (5, "--5"),
    "lone CR": (20, "ab\rcd"),
    "zero byte": (20, "ab\x00cd"),
    "float": (5, "1e5"),
    "wide digits": (20, "１２"),
    "above 64 bits": (1, "99999999999999999999"),
    "NaN": (13, "nan"),
    "8 digits and more": (39, "1234567g"),
    "CR before the end": (39, "12\r34"),
}


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("case", ODD_FIELDS)
def test_odd_fields_are_bad_for_every_parser(
    case: str, fast: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(primitives, "FAST", fast)
    lines = random_lines(random.Random(4), 30)
    field, text = ODD_FIELDS[case]
    lines[17][field] = text
    raw = "".join("\t".join(line) + "\n" for line in lines)
    (tmp_path / "day_0").write_bytes(raw.encode())
    with pytest.raises(InputError, match="day_0:18: "):
        prepare(tmp_path / "day_*", tmp_path / "out")


def test_a_file_without_lines_is_no_log(tmp_path: Path) -> None:
    (tmp_path / "day_0").write_bytes(b"x" * (3 << 20))
    with pytest.raises(InputError, match="longer than 1,048,576 bytes"):
        prepare(tmp_path / "day_0", tmp_path / "out", ROOMY)


@pytest.mark.parametrize("fast", [True, False])
def test_a_log_of_bad_lines_alone_is_refused(
    fast: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(primitives, "FAST", fast)
    for day in range(2):
        (tmp_path / f"day_{day}").write_text("no\tclicks\n" * 20)
    message = r"All 40 lines of the input are bad; the first is .*day_0:1: 2 tab-separated fields"
    with pytest.raises(InputError, match=message):
        prepare(tmp_path / "day_*", tmp_path / "out", bad_rows="skip")


def test_bad_lines_have_their_numbers_in_any_piece_of_any_file(tmp_path: Path) -> None:
    """Where pieces are smaller than a line, some of them have none."""
    lines = ["\t".join(line) for line in random_lines(random.Random(9), 60)]
    for number in (1, 30, 59):
        lines[number] = "bad"
    for day in range(2):
        (tmp_path / f"day_{day}").write_text("\n".join(lines))
        with gzip.open(tmp_path / f"packed_{day}.gz", "wt") as file:
            file.write("\n".join(lines))
    wanted = [f"{line}: 1 tab-separated fields, expected 40" for line in (2, 31, 60)]
    for name, piece_bytes in (("day", 64), ("day", 5000), ("packed", 64), ("packed", 5000)):
        output = tmp_path / f"{name} {piece_bytes}"
        limits = Limits(memory=1 << 20, workers=3, piece_bytes=piece_bytes)
        prepare(tmp_path / f"{name}_*", output, limits, bad_rows="skip")
        assert [line.partition(":")[2] for line in listed(output)] == wanted * 2


def spoiled(text: str, rng: random.Random) -> str:
    """A text with some characters changed, put in or left out."""
    for _ in range(rng.choice([0, 1, 4, 40])):
        place = rng.randrange(len(text) - 50)
        new = rng.choice("\t\n\r-+*,./:@G`g 09afAF") * rng.choice([0, 1, 1, 2, 9])
        text = text[:place] + new + text[place + rng.choice([0, 1, 1, 2, 30]) :]
    return text


@pytest.mark.parametrize("chunk_bytes", [50, 2000, 1 << 20])
def test_the_compiled_parser_takes_what_the_rules_say(
    chunk_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of lines that are spoiled, in chunks of one line, of some and of all; beside the parser that
    takes a line at a time."""
    monkeypatch.setattr(criteo_text, "CHUNK_BYTES", chunk_bytes)
    path, rng = tmp_path / "day_0", random.Random(chunk_bytes)
    for number in range(40):
        lines = "\n".join("\t".join(line) for line in random_lines(rng, rng.randint(2, 150)))
        text = spoiled(lines + rng.choice(["", "\n", "\r\n"]), rng).encode("latin-1")
        path.write_bytes(text)
        found = []
        for fast in (True, False):
            monkeypatch.setattr(primitives, "FAST", fast)
            source = CriteoSource([path], RECIPES["nvidia"], ("skip", "keep")[number % 2])
            where = TextRange(path, 0, len(text))
            rows = source.parse(Piece(Position(), Position(1), where, len(text)))
            values = [(v.numbers.tolist(), np.sort(v.zeros).tolist()) for v in rows.categorical]
            parsed = (rows.labels.tolist(), rows.numerical.tobytes(), values)
            found.append((*parsed, rows.bad, rows.lines, rows.numbers))
        assert found[0] == found[1]
