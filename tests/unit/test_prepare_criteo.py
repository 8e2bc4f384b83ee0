"""`prepare criteo` against a slow implementation in plain Python, and its answers to bad input."""

import gzip
import json
import random
from pathlib import Path
from typing import Any

import pytest

from tests.unit.criteo_oracle import Oracle, random_lines, write_day
from tests.unit.test_prepare_engine import assert_agrees, read_rows
from trainmark.clickdata import feature_spec
from trainmark.clicklog import criteo, synthetic
from trainmark.clicklog.arrays import primitives
from trainmark.errors import InputError


def prepare(tmp_path: Path, threshold: int = 0, pattern: str = "day_*", **options: Any) -> Path:
    output = tmp_path / "data"
    criteo.prepare(
        criteo.Options(
            input=str(tmp_path / pattern),
            output=output,
            frequency_threshold=str(threshold),
            **options,
        )
    )
    return output


def test_days_are_ordered_by_their_numbers(tmp_path: Path) -> None:
    """day_10 is the last day although day_2 follows it alphabetically."""
    days = [random_lines(random.Random(day), count) for day, count in enumerate((60, 45, 31))]
    for name, lines in zip(("day_1", "day_2", "day_10"), days, strict=True):
        write_day(tmp_path / name, lines)
    output = prepare(tmp_path)
    assert_agrees(output, Oracle(days))
    summary = json.loads((output / "prepare.json").read_text())
    assert summary["rows"] == {"train": 105, "test": 15, "validation": 16}


def test_ids_by_count_then_by_number(tmp_path: Path) -> None:
    """c occurs three times; a and B twice; d once, which is too rare."""
    column = ["0000000c"] * 3 + ["0000000B"] * 2 + ["0000000a"] * 2 + ["0000000d", ""]
    lines = [["0"] + [""] * 13 + [value] + [""] * 25 for value in column]
    write_day(tmp_path / "day_0", lines[:1])
    write_day(tmp_path / "day_1", lines[1:])
    output = prepare(tmp_path, threshold=2)
    splits = [read_rows(output, name) for name in ("train", "test", "validation")]
    assert [row[2][0] for rows in splits for row in rows] == [1, 1, 1, 3, 3, 2, 2, 0, 0]
    assert feature_spec.read(output).cardinalities == (4,) + (1,) * 25


def test_wide_columns_use_wider_types(tmp_path: Path) -> None:
    """127 ids and the 0 make 128: too many for the published limit of int8, so int16."""
    lines = [["1"] + ["5"] * 13 + [f"{i:08x}"] * 26 for i in range(127)]
    write_day(tmp_path / "day_0", lines)
    write_day(tmp_path / "day_1", lines[:4])
    output = prepare(tmp_path)
    assert (output / "train" / "cat_0.bin").stat().st_size == 127 * 2
    assert (output / "train" / "label.bin").stat().st_size == 127
    assert (output / "train" / "numerical.bin").stat().st_size == 127 * 26
    ids = [row[2][0] for row in read_rows(output, "train")]
    assert sorted(ids) == list(range(1, 128))


def test_a_last_line_without_an_end(tmp_path: Path) -> None:
    lines = random_lines(random.Random(2), 40)
    write_day(tmp_path / "plain", lines)
    text = (tmp_path / "plain").read_bytes()
    (tmp_path / "day_0.gz").write_bytes(gzip.compress(text[:-1]))
    assert_agrees(prepare(tmp_path, pattern="day_0.gz"), Oracle([lines]))


def test_second_run_changes_nothing_and_other_settings_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_day(tmp_path / "day_0", random_lines(random.Random(4), 20))
    write_day(tmp_path / "day_1", random_lines(random.Random(5), 20))
    output = prepare(tmp_path, threshold=3)
    before = {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in output.rglob("*")}
    prepare(tmp_path, threshold=3)
    assert "already holds this dataset" in capsys.readouterr().out
    with pytest.raises(InputError, match=r"other settings \(frequency_threshold: 3 there, 0 now\)"):
        prepare(tmp_path, threshold=0)
    write_day(tmp_path / "day_2", random_lines(random.Random(6), 20))
    with pytest.raises(InputError, match=r"other settings \(input: "):
        prepare(tmp_path, threshold=3)
    after = {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in output.rglob("*")}
    assert before == after


def test_foreign_output_folder_is_left_alone(tmp_path: Path) -> None:
    write_day(tmp_path / "day_0", random_lines(random.Random(4), 20))
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "thesis.tex").write_text("all of it")
    with pytest.raises(InputError, match=r"not empty and holds no prepare\.json"):
        prepare(tmp_path)
    assert (tmp_path / "data" / "thesis.tex").read_text() == "all of it"


def edited(field: int, text: str) -> str:
    line = random_lines(random.Random(7), 1)[0]
    line[field] = text
    return "\t".join(line)


BAD_LINES = {
    "39 fields": ("\t".join(["0"] * 39), "39 tab-separated fields, expected 40"),
    "41 fields": ("\t".join(["0"] * 41), "41 tab-separated fields, expected 40"),
    "7 digits behind": ("\t".join(["0"] * 39 + ["", "0123456"]), "41 tab-separated fields"),
    "empty line": ("", "1 tab-separated fields, expected 40"),
    "of a CSV": ("0,1,2", "1 tab-separated fields, expected 40 (`trainmark prepare csv` reads"),
    "label 2": (edited(0, "2"), "label '2', expected 0 or 1"),
    "no label": (edited(0, ""), "label '', expected 0 or 1"),
    "label yes": (edited(0, "yes"), "label 'yes', expected 0 or 1"),
    "integer 1.5": (edited(3, "1.5"), "integer 3 is '1.5', expected a whole number"),
    "integer nan": (edited(13, "nan"), "integer 13 is 'nan'"),
    "integer 2**63": (edited(1, str(2**63)), "integer 1 is '9223372036854775808'"),
    "not hex": (edited(14, "0000000g"), "categorical 1 is '0000000g', expected up to 8 hexa"),
    "9 digits": (edited(39, "123456789"), "categorical 26 is '123456789'"),
    "quoted": (edited(20, '"0000000"'), "categorical 7 is '\"0000000\"'"),
    "null": (edited(20, "NULL"), "categorical 7 is 'NULL'"),
    "not ASCII": (edited(20, "é"), "categorical 7 is 'é'"),
}


@pytest.mark.parametrize("case", BAD_LINES)
def test_bad_lines_are_named(case: str, tmp_path: Path) -> None:
    line, message = BAD_LINES[case]
    good = random_lines(random.Random(8), 10)
    write_day(tmp_path / "day_0", good)
    text = ["\t".join(fields) for fields in good]
    text[6] = line
    (tmp_path / "day_1").write_text("\n".join(text) + "\n")
    with pytest.raises(InputError) as error:
        prepare(tmp_path)
    assert f"day_1:7: {message}" in str(error.value)
    # The first day is done and kept, for the same command or one with --bad-rows.
    assert sorted(path.name for path in tmp_path.iterdir()) == [".data.work", "day_0", "day_1"]


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    line = edited(20, "X").encode().replace(b"X", b"\xff\xfe")
    (tmp_path / "day_0").write_bytes(line + b"\n")
    with pytest.raises(InputError, match="day_0:1: categorical 7 is"):
        prepare(tmp_path)


def test_nothing_to_read(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"No file matches --input '.*day_\*'"):
        prepare(tmp_path)
    (tmp_path / "day_0").touch()
    with pytest.raises(InputError, match="day_0 is empty"):
        prepare(tmp_path)
    write_day(tmp_path / "day_0", random_lines(random.Random(1), 5))
    with pytest.raises(InputError, match="--frequency-threshold is '-1'"):
        prepare(tmp_path, threshold=-1)


def test_too_few_rows(tmp_path: Path) -> None:
    write_day(tmp_path / "day_0", random_lines(random.Random(1), 5))
    with pytest.raises(InputError, match="5 rows to train on and 0 held out"):
        prepare(tmp_path)
    write_day(tmp_path / "day_1", random_lines(random.Random(1), 1))
    with pytest.raises(InputError, match="5 rows to train on and 1 held out"):
        prepare(tmp_path)


def test_generated_log_brings_its_best_auc(tmp_path: Path) -> None:
    synthetic.prepare(synthetic.Options(output=tmp_path / "raw", rows=6000, days=3))
    known = json.loads((tmp_path / "raw" / "synthetic.json").read_text())["best_auc"]
    output = prepare(tmp_path, threshold=15, pattern="raw/day_*")
    assert feature_spec.read(output).metadata == {"best_auc": known}
    assert (
        feature_spec.read(feature_spec.path_of(output, "validation")).metadata["best_auc"] == known
    )


@pytest.mark.parametrize("recipe", ["nvidia", "dlrm"])
@pytest.mark.parametrize("fast", [True, False])
def test_what_is_told_of_integers(
    recipe: Any, fast: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted by hand: with and without numba, and of lines that only the slow parser takes."""
    monkeypatch.setattr(primitives, "FAST", fast and primitives.FAST)
    lines = random_lines(random.Random(5), 300)
    lines[7][1:4] = ["-9", str(2**63 - 1), str(-(2**63))]
    for line in lines:
        line[5] = ""
    broken = [*lines[:100], [*lines[0][:-1], "xyz"], *lines[100:]]
    broken[100][2] = "77777"  # no good line has it
    write_day(tmp_path / "day_0", broken[:200])
    write_day(tmp_path / "day_1", broken[200:])
    output = prepare(tmp_path, recipe=recipe, bad_rows="skip")
    told = json.loads((output / "prepare.json").read_text())["numerical"]
    assert list(told) == [f"I{number}" for number in range(1, 14)]
    smallest = {"nvidia": -2, "dlrm": 0}[recipe]
    for place, column in enumerate(told.values(), 1):
        present = [int(line[place]) for line in lines if line[place]]
        expected = {
            "reading": {"nvidia": "ln(x + 3)", "dlrm": "ln(x + 1)"}[recipe],
            "missing": 300 - len(present),
            "minimum": min(present, default=None),
            "median": None,
            "maximum": max(present, default=None),
            "cut_off": 0,
            "became_zero": sum(number < smallest for number in present),
            "lost_digits": 0,
        }
        assert column == expected
