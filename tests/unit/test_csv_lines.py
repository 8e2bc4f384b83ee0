"""Lines of text and groups of rows: every piece that a file is cut into gives the same rows."""

import itertools
import random
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest

from trainmark.clicklog.sources import csv_source
from trainmark.clicklog.sources.column_match import AskedColumns
from trainmark.clicklog.sources.csv_source import CsvSource
from trainmark.clicklog.sources.parquet_source import ParquetSource
from trainmark.clicklog.sources.rows import ParsedRows
from trainmark.clicklog.sources.source import Piece, Position, Room


def parsed(source: CsvSource, piece_bytes: int, folder: Path) -> list[ParsedRows]:
    """The rows of all pieces."""
    pieces = source.pieces(Position(), piece_bytes, Room(folder / "unpacked", 1))
    return [source.parse(piece) for piece in pieces]


def bad_lines(blocks: list[ParsedRows]) -> list[tuple[int, str]]:
    """Bad lines by their numbers in the file; a piece numbers its own."""
    before = itertools.accumulate((block.lines for block in blocks), initial=0)
    pairs = zip(before, blocks, strict=False)
    return [(first + bad.line, bad.reason) for first, block in pairs for bad in block.bad]


@pytest.mark.parametrize("piece_bytes", [1 << 20, 40])
def test_a_quoted_field_without_an_end_swallows_no_lines(piece_bytes: int, tmp_path: Path) -> None:
    good = [f'{n % 2},"v,{n}"' for n in range(20)]
    lines = [
        *good[:3],
        '1,"open',
        *good[3:9],
        '0,"two',
        'lines"',
        *good[9:],
        '1,5" pipe',
        '0,"last',
    ]
    path = tmp_path / "log.csv"
    path.write_text("\n".join(["label,name", *lines]) + "\n")
    source = CsvSource([path], AskedColumns(text="label=label categorical=name"), bad_rows="skip")
    blocks = parsed(source, piece_bytes, tmp_path)
    assert (len(blocks) > 5) == (piece_bytes == 40)
    names = [name for block in blocks for name in block.categorical[0].to_pylist()]
    assert names == [*(f"v,{n}" for n in range(20)), '5" pipe']
    found = bad_lines(blocks)
    open_quote = "a quoted field does not end on its line"
    assert found == [
        *((5, open_quote), (12, open_quote), (13, "1 fields, expected 2"), (26, open_quote)),
    ]


@pytest.mark.parametrize("piece_bytes", [1 << 20, 16])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_blank_lines_are_no_rows(end: str, piece_bytes: int, tmp_path: Path) -> None:
    """And counted where lines are: whatever is bad is found under its number."""
    lines = ["label,name", "", "0,a", "", "", "1", "1,b", "0,c", "", '1,"open', "0,d", "", "", ""]
    path = tmp_path / "log.csv"
    path.write_bytes(end.join(lines).encode())
    source = CsvSource([path], AskedColumns(text="label=label categorical=name"), bad_rows="skip")
    blocks = parsed(source, piece_bytes, tmp_path)
    assert (len(blocks) > 2) == (piece_bytes == 16)
    names = [name for block in blocks for name in block.categorical[0].to_pylist()]
    assert names == ["a", "b", "c", "d"]
    found = bad_lines(blocks)
    open_quote = "a quoted field does not end on its line"
    assert found == [(6, "1 fields, expected 2"), (10, open_quote)]


@pytest.mark.parametrize("piece_bytes", [1 << 20, 16])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_carriage_return_within_a_line_cuts_no_value(
    end: str, piece_bytes: int, tmp_path: Path
) -> None:
    lines = ["label,name", "1,a", "1,he\rllo", "", "0", '1,"x\ry"', '0,"open\r', "\r\r", "0,b", ""]
    path = tmp_path / "log.csv"
    path.write_bytes(end.join(lines).encode())
    source = CsvSource([path], AskedColumns(text="label=label categorical=name"), bad_rows="skip")
    blocks = parsed(source, piece_bytes, tmp_path)
    names = [name for block in blocks for name in block.categorical[0].to_pylist()]
    assert names == ["a", "b"]
    inner = "a carriage return (CR) is not at the end of the line"
    numbers = (3, 6, 8) if end == "\n" else (3, 6, 7, 8)
    open_quote = [] if end == "\r\n" else [(7, "a quoted field does not end on its line")]
    expected = [(5, "1 fields, expected 2"), *open_quote, *((number, inner) for number in numbers)]
    assert bad_lines(blocks) == sorted(expected)


def test_any_text_has_a_row_or_a_reason_for_each_line(tmp_path: Path) -> None:
    rng = random.Random(1)
    path = tmp_path / "log.csv"
    path.write_text("label,name,tail\n")
    source = CsvSource(
        [path], AskedColumns(text="label=label categorical=name,tail"), bad_rows="skip"
    )
    parts = [b"1,a,b\r\n", b"0,c,\n", b"\r\n", b"\n", b"\r", b"\xe9", "é".encode(), b","]
    parts += [b"x", b'"']
    for _ in range(300):
        text = b"".join(rng.choices(parts, k=rng.randint(0, 40)))
        ended = text if not text or text.endswith(b"\n") else text + b"\n"
        _, numbers, reasons = source._rows(ended + b"\n")
        lines = enumerate(text.split(b"\n"))
        filled = {number for number, line in lines if line.removesuffix(b"\r")}
        assert sorted([*numbers.tolist(), *reasons]) == sorted(filled)


def test_quotes_in_lines_of_another_encoding(tmp_path: Path) -> None:
    """Two lines with as many commas as a good one, whose quotes take in one of them or a line."""
    lines = ['0,"é,b",c', '0,"1,5é"', '1,"é,open', "0,é,tail", "1,ü,tail"]
    path = tmp_path / "log.csv"
    path.write_bytes("\n".join(["label,name,tail", *lines, ""]).encode("latin-1"))
    source = CsvSource(
        [path], AskedColumns(text="label=label categorical=name,tail"), bad_rows="skip"
    )
    [block] = parsed(source, 1 << 20, tmp_path)
    assert block.categorical[0].to_pylist() == ["é,b", "é", "ü"]
    open_quote = "a quoted field does not end on its line"
    assert bad_lines([block]) == [(3, "2 fields, expected 3"), (4, open_quote)]


def test_blocks_that_arrow_reads_decide_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lines with too few or many fields, blank ones, one that is longer than a block."""
    rng = random.Random(3)
    kinds = ["{label},name {n},{tail}", "{label},{n}", "", "{label},é{n},1", "{label},1,2,{n}"]
    lines = [
        rng.choices(kinds, [20, 1, 1, 1, 1])[0].format(label=n % 2, n=n, tail="x" * (n % 50))
        for n in range(600)
    ]
    lines[300] = f"1,{'long' * 500},y"
    path = tmp_path / "log.csv"
    path.write_bytes("\n".join(["label,name,tail", *lines, ""]).encode("latin-1"))
    found = []
    for block_bytes in (1 << 20, 1 << 12, 1 << 9):
        monkeypatch.setattr(csv_source, "BLOCK_BYTES", block_bytes)
        source = CsvSource(
            [path], AskedColumns(text="label=label categorical=name,tail"), bad_rows="skip"
        )
        [block] = parsed(source, 1 << 20, tmp_path)
        columns = [column.to_pylist() for column in block.categorical]
        found.append((block.labels.tolist(), columns, bad_lines([block])))
    assert found[0] == found[1] == found[2]
    assert len(found[0][0]) > 500
    assert len(found[0][2]) > 20


@pytest.mark.parametrize("rows_at_a_time", [7, 50, 1 << 15])
def test_groups_of_a_parquet_file_are_shared_and_pieces_follow_each_other(
    rows_at_a_time: int, tmp_path: Path
) -> None:
    """Small groups are joined; a run goes on at the end of any piece."""
    values = [[f"{number} {row}" for row in range(size)] for number, size in enumerate(SIZES)]
    for number, of_file in enumerate(values):
        labels = pa.array([0] * len(of_file), pa.int64())
        table = pa.table({"label": labels, "name": pa.array(of_file, pa.string())})
        pa.parquet.write_table(table, tmp_path / f"{number}.parquet", row_group_size=64)
    source = ParquetSource(
        sorted(tmp_path.glob("*.parquet")),
        AskedColumns(text="label=label categorical=name"),
        bad_rows="keep",
    )

    def read_from(start: Position) -> tuple[list[str], list[Piece]]:
        room = Room(tmp_path / "unpacked", 3)
        pieces, names = [], []
        for piece in source.pieces(start, 32 * rows_at_a_time, room):
            pieces.append(piece)
            names += source.parse(piece).categorical[0].to_pylist()
        return names, pieces

    names, pieces = read_from(Position())
    assert names == list(itertools.chain.from_iterable(values))
    assert all(one.stop == after.start for one, after in itertools.pairwise(pieces))
    whole = sum(path.stat().st_size for path in source.files)
    assert sum(piece.num_bytes for piece in pieces) == whole
    assert len(pieces) < 10 if rows_at_a_time > 1000 else len(pieces) > 15
    for piece in pieces[:: max(len(pieces) // 5, 1)]:
        left, _ = read_from(replace(piece.stop, line=9))
        assert left == names[len(names) - len(left) :]


SIZES = (700, 0, 257, 64)
