"""The estimates of docs/preparation_speed.md follow from benchmarks/results."""

import re

import pytest

from benchmarks.common import read_rows
from tests.docs.commands import ROOT, table
from tests.docs.test_performance import assert_rounded, only


def test_a_billion_rows() -> None:
    """The estimates' totals are those of their phases, which stand in the results."""
    rows = [row for row in read_rows("prepare_cores") if row["rows"] == 100_000_000]
    newest = [row for row in rows if row["cores"] == 16 and row["output"] != "disk"]
    *phases, in_memory, to_disk = table("docs/preparation_speed.md", "phase | reads |")
    for column, share in ((3, 1), (4, 4)):
        seconds = [int(line[column]) for line in phases]
        assert sum(seconds) == int(in_memory[column])
        of_parse, of_encode = (
            10 * sum(row["phase_seconds"][phase] for row in newest) / len(newest) / share
            for phase in ("parse", "encode")
        )
        assert seconds[1] == pytest.approx(of_parse, abs=0.51)
        assert sum(seconds[2:]) == pytest.approx(of_encode, abs=1)
    assert {*to_disk[3:]} == {str(sum(int(line[-1]) for line in phases if line[-1]))}
    on_spark = [row for row in read_rows("prepare") if row["system"] == "trainmark"]
    few, many = (
        only([row for row in on_spark if row["rows"] == count], engine="spark", cores=1)
        for count in (4_000_000, 16_000_000)
    )
    *phases, in_all = table("docs/preparation_speed.md", "phase | a row,")
    assert sum(int(line[2]) for line in phases) == int(in_all[2])
    of_row = {line[0].partition(":")[0].partition(",")[0]: line for line in phases}
    for name, phase in (("parse", "parse"), ("count", "vocabulary"), ("encode", "encode"),
                        ("finish", "finish")):  # fmt: skip
        seconds = many["phase_seconds"][phase] - few["phase_seconds"][phase]
        assert_rounded(of_row[name][1], seconds / 12)
        cores = 1 if name == "finish" else 160
        assert_rounded(of_row[name][2], 1000 * seconds / 12 / cores)


def test_small_logs() -> None:
    rows = [row for row in read_rows("prepare_cores") if row["rows"] in (4_000_000, 0)]
    header = (1, 2, 4, 8, 16)
    for kind, *cells in table("docs/preparation_speed.md", "input | 1 |"):
        for cores, shown in zip(header, cells, strict=True):
            if shown:
                assert_rounded(shown, only(rows, kind=kind.strip("`"), cores=cores)["seconds"])
    of_csv = {row["digest"] for row in rows if row["kind"] == "csv"}
    assert len(of_csv) == 1


def test_an_earlier_version() -> None:
    page, rows = (ROOT / "docs/preparation_speed.md").read_text(), read_rows("prepare")
    earlier, now = (only(rows, engine=name) for name in ("earlier command", "command"))
    shown = re.search(r"commit (\w+)\) takes ([\d.]+) s .*? this one ([\d.]+)\s", page, re.S)
    assert shown is not None
    commit, *seconds = shown.groups()
    assert commit == earlier["commit"]
    for cell, row in zip(seconds, (earlier, now), strict=True):
        assert_rounded(cell, row["seconds"])
