"""The engine with other columns than Criteo's: strings, 64-bit numbers, floating-point numbers."""

import gzip
import itertools
import random
import resource
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.unit.logs import prepare_log
from tests.unit.test_prepare_engine import files
from tests.waiting import PATIENCE_S
from trainmark.cli import main
from trainmark.clicklog.arrays import primitives, strings
from trainmark.clicklog.engine import parse_phase
from trainmark.clicklog.engine import phases as engine
from trainmark.clicklog.engine.job import Job
from trainmark.clicklog.engine.limits import Limits
from trainmark.clicklog.engine.splits import SplitRule
from trainmark.clicklog.engine.vocabulary import Rules
from trainmark.clicklog.engine.workers import Workers
from trainmark.clicklog.sources import apart, parquet_files, parquet_source, text_files, unpack
from trainmark.clicklog.sources.column_match import AskedColumns
from trainmark.clicklog.sources.csv_source import CsvSource
from trainmark.clicklog.sources.parquet_source import ParquetSource
from trainmark.clicklog.sources.recipes import RECIPES
from trainmark.clicklog.sources.rows import Column, ParsedRows, Schema, Values
from trainmark.clicklog.sources.source import BadRows, Piece, Position, Room
from trainmark.errors import InputError

KINDS: tuple[Any, ...] = ("string", "int64", "float64", "uint64", "uint32")


class ListSource:
    """Rows from a list, some at a time."""

    def __init__(self, rows: list[tuple[Any, ...]], rows_per_piece: int) -> None:
        self.rows, self.rows_per_piece = rows, rows_per_piece
        self.schema = Schema(0, tuple(Column(kind, kind) for kind in KINDS))
        self.files = [Path(__file__)]  # which is not read
        self.bad_rows: BadRows = "stop"

    def settings(self) -> dict[str, Any]:
        return {"rows": len(self.rows)}

    def inputs(self) -> None:
        return None

    def bytes_per_row(self) -> float:
        return 1.0

    def pieces(self, start: Position, piece_bytes: int, room: Room) -> Any:
        for offset in range(start.offset, len(self.rows), self.rows_per_piece):
            rows = self.rows[offset : offset + self.rows_per_piece]
            last = offset + len(rows) == len(self.rows)
            stop = Position(file=1) if last else Position(offset=offset + len(rows))
            yield Piece(Position(offset=offset), stop, rows, len(rows))
            if last:
                return

    def parse(self, piece: Piece) -> ParsedRows:
        columns = list(zip(*piece.raw, strict=True))
        categorical: list[Any] = [pa.array(columns[0], pa.string())]
        for kind, values in zip(KINDS[1:], columns[1:], strict=True):
            missing = np.array([value is None for value in values])
            numbers = np.array([value or 0 for value in values], kind)
            categorical.append(Values(numbers, missing))
        labels = np.arange(len(piece.raw)) % 2 == 0
        return ParsedRows(labels, np.empty((len(labels), 0), np.float16), categorical)


def prepare(source: ListSource, output: Path, memory: int = 1 << 26, workers: int = 2) -> Path:
    job = Job(
        source=source,
        output=output,
        rules=[Rules(recipe=RECIPES["nvidia"], threshold=3) for _ in KINDS],
        split=SplitRule(holdout="0.4"),
    )
    engine.prepare(job, Limits(memory=memory, workers=workers, piece_bytes=1))
    return output


def random_rows(count: int) -> list[tuple[Any, ...]]:
    rng = random.Random(8)
    words = ["", "a", "b", "ä", "z" * 40, "日本", "A", *(f"word {i}" for i in range(300))]
    pools: list[list[Any]] = [
        words,
        [-(2**63), 2**63 - 1, -1, 0, 1, *range(-50, 50)],
        [0.0, -0.0, -1.5, 1.5, float("inf"), -float("inf"), 1e300, *(i / 7 for i in range(40))],
        [0, 1, 2**64 - 1, 2**63, *range(60)],
        [0, 2**32 - 1, *range(60)],
    ]
    return [
        tuple(None if rng.random() < 0.1 else rng.choice(pool) for pool in pools)
        for _ in range(count)
    ]


def expected_ids(values: list[Any], threshold: int) -> dict[Any, int]:
    counts = Counter(value for value in values if value is not None)

    def rank(value: Any) -> tuple[int, Any]:
        return -counts[value], value.encode() if isinstance(value, str) else value

    kept = sorted((value for value in counts if counts[value] >= threshold), key=rank)
    return {value: number for number, value in enumerate(kept, start=1)}


@pytest.mark.parametrize("fast", [True, False])
def test_all_kinds_of_columns(fast: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(primitives, "FAST", fast)
    monkeypatch.setattr(strings, "BATCH_ROWS", 16)
    monkeypatch.setattr(strings, "MERGED_ROWS", 64)
    rows = random_rows(1500)
    output = prepare(ListSource(rows, 400), tmp_path / "roomy")
    for column in range(len(KINDS)):
        ids = expected_ids([row[column] for row in rows], 3)
        got = np.fromfile(output / "test" / f"cat_{column}.bin", _dtype(len(ids) + 1)).tolist()
        assert got == [ids.get(row[column], 0) for row in rows[900:1200]], KINDS[column]
        table = pq.read_table(output / "vocabulary" / f"cat_{column}.parquet").to_pydict()
        assert dict(zip(table["value"], table["id"], strict=True)) == ids
    tight = prepare(ListSource(rows, 90), tmp_path / "tight", memory=1 << 13)
    assert files(tight) == files(output)


def _dtype(cardinality: int) -> str:
    return "int8" if cardinality < 127 else "int16"


@pytest.mark.parametrize(
    ("merged_rows", "merged_bytes"),
    [(8, 1 << 25), (40, 1 << 25), (1 << 17, 1 << 25), (1 << 17, 4000), (1 << 17, 1), (20, 900)],
)
def test_strings_of_blocks_are_merged_by_their_bytes(
    merged_rows: int, merged_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few at a time, fewer of long ones, and each but once: a table of all for every block was
    5 x as slow."""
    monkeypatch.setattr(strings, "BATCH_ROWS", 8)
    monkeypatch.setattr(strings, "MERGED_ROWS", merged_rows)
    monkeypatch.setattr(strings, "MERGED_BYTES", merged_bytes)
    monkeypatch.setattr(strings, "PART_BYTES", 100)
    rng, numbered = random.Random(1), strings.number_block
    letters = ["", "a", "b", "ä", "日", "\0", " ", "long" * 30]
    pool = ["".join(rng.choices(letters, k=rng.randint(0, 6))) for _ in range(300)]
    blocks: list[list[str | None]] = [
        [None, *rng.choices(pool, k=size)] for size in (200, 0, 7, 90, 1)
    ]
    own, seen = [], list[pa.Array]()
    for index, block in enumerate(blocks):
        numbers, dictionary = numbered(pa.array(block, pa.string()))
        strings.write_dictionary(strings.dictionary_path(tmp_path, index, 3), dictionary)
        own.append((numbers, len(dictionary)))
    fds = Path("/proc/self/fd")
    before = len(list(fds.iterdir()))

    def noted(part: pa.Array) -> Any:
        seen.append(part)
        # A log may have more blocks than files may be open.
        assert len(list(fds.iterdir())) <= before + 3 < before + len(blocks)
        return numbered(part)

    monkeypatch.setattr(strings, "number_block", noted)
    strings.intern(tmp_path, range(len(blocks)), 3)
    everything = sorted({text.encode() for block in blocks for text in block if text is not None})
    path = strings.all_strings_path(tmp_path, 3)
    ranks = np.arange(1, len(everything) + 1, dtype=np.uint32)
    assert [text.encode() for text in strings.of_numbers(path, ranks).to_pylist()] == everything
    assert [text.encode() for text in strings.of_numbers(path, ranks[5::7]).to_pylist()] == (
        everything[5::7]
    )
    for index, block in enumerate(blocks):
        final = strings.read_numbers(tmp_path, index, 3)[own[index][0]]
        expected = [0 if text is None else everything.index(text.encode()) + 1 for text in block]
        assert final.tolist() == expected
    assert sum(map(len, seen)) == sum(count for _, count in own)
    assert max(map(len, seen)) <= merged_rows + len(blocks) * strings.BATCH_ROWS
    most = strings.PART_BYTES + max(map(len, everything))
    sizes = [sum(map(len, part.to_pylist())) for part in seen]
    assert max(sizes) <= merged_bytes + len(blocks) * most
    asked = sorted({*everything[::3], b"between", b"~"})
    assert strings.to_numbers(path, pa.array(asked, pa.binary())).tolist() == [
        everything.index(text) + 1 if text in everything else 0 for text in asked
    ]


def test_compiled_loops_are_loaded_before_processes_are_forked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else every process of every phase loads them for itself: 110 s of 16 cores for 12."""
    happened: list[str] = []
    load, start = primitives.load, Workers.__init__

    def forked(self: Workers, *arguments: Any) -> None:
        happened.append("fork")
        start(self, *arguments)

    monkeypatch.setattr(primitives, "load", lambda: (happened.append("load"), load())[1])
    monkeypatch.setattr(Workers, "__init__", forked)
    prepare(ListSource(random_rows(60), 20), tmp_path / "out")
    assert happened[0] == "load"
    assert happened.count("load") == 1
    assert "fork" in happened


@pytest.mark.parametrize(
    ("whole", "workers", "expected"),
    [
        (267 << 20, 16, 8 << 20),
        (267 << 20, 2, 267 << 17),
        (27 << 30, 16, 64 << 20),
        (9, 4, 8 << 20),
    ],
)
def test_a_small_log_has_pieces_for_every_process(whole: int, workers: int, expected: int) -> None:
    assert Limits(1 << 40, workers, 64 << 20).piece_bytes_of(whole) == expected


def test_a_parquet_file_with_any_flipped_bit_is_read_or_refused(tmp_path: Path) -> None:
    """Its end says what is in it; its pages are found damaged when they are reached."""
    table = pa.table({"click": [1, 0] * 40, "age": [1.5, None] * 40, "city": ["x", "y"] * 40})
    pq.write_table(table, tmp_path / "log.parquet")
    good, refused = (tmp_path / "log.parquet").read_bytes(), {"opening": 0, "reading": 0}
    for place in range(0, len(good), 2):
        damaged = bytearray(good)
        damaged[place] ^= 1 << place % 7
        (tmp_path / "log.parquet").write_bytes(damaged)
        when = "opening"
        try:
            file = parquet_files.open_parquet(tmp_path / "log.parquet")
            when = "reading"
            for _ in parquet_files.batches(file, tmp_path / "log.parquet", 32):
                pass
        except InputError as error:
            refused[when] += "log.parquet is not readable as Parquet: " in str(error)
    assert min(refused.values()) > 20


def test_unpacking_stays_a_few_pieces_ahead_where_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unpack, "DISK_SHARE", 1 << 62)
    too_far = threading.Event()
    places = [Position(0), Position(1)]
    taken: list[int] = []

    def pieces(place: Position) -> Iterator[Piece]:
        for number in range(50):
            if number > len(taken) + 1 + 2 * unpack.PIECES_AHEAD:
                too_far.set()
            stop = Position(place.file + 1) if number == 49 else Position(place.file, number + 1)
            yield Piece(Position(place.file, number), stop, number, 1, disk_bytes=1)

    with unpack.Unpacker(places, pieces, Room(tmp_path / "unpacked", 2)) as unpacker:
        for place in places:
            taken.clear()
            for piece in unpacker.pieces(place):
                taken.append(piece.raw)
                assert len(taken) > 1 or not too_far.wait(0.2)
            assert taken == list(range(50))
    assert not too_far.is_set()


@pytest.mark.parametrize("most", [1 << 12, 1 << 15, 1 << 17])
@pytest.mark.parametrize("name", ["log.csv", "log.csv.gz"])
def test_a_full_disk_is_told_by_its_reason(name: str, most: int, tmp_path: Path) -> None:
    """Whatever writes at that moment; a limit on the size of files stands for it."""
    lines = [f"{i % 2},{i}.5,{'user' * (i % 9)}{i}" for i in range(20_000)]
    opener = gzip.open if name.endswith(".gz") else open
    with opener(tmp_path / name, "wt") as file:
        file.write("\n".join(["y,n,user", *lines, ""]))
    columns = "label=y numerical=n categorical=user"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
    try:
        with pytest.raises(InputError, match=r"data cannot be written: File too large\.$"):
            prepare_log(tmp_path / name, tmp_path / "data", columns=columns)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("workers", [1, 2])
def test_ctrl_c_ends_parsing(workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It reaches the thread that waits for the others."""
    begun, closed = threading.Event(), threading.Event()
    taken = 0

    class Slow(ListSource):
        def pieces(self, start: Position, piece_bytes: int, room: Room) -> Any:
            nonlocal taken
            try:
                for piece in super().pieces(start, piece_bytes, room):
                    taken += 1
                    yield piece
                    begun.set()
                    time.sleep(0.002)
            finally:
                closed.set()

    def interrupted(_: str) -> None:
        assert begun.wait(PATIENCE_S)
        raise KeyboardInterrupt

    monkeypatch.setattr(parse_phase, "importlib", SimpleNamespace(import_module=interrupted))
    with pytest.raises(KeyboardInterrupt):
        prepare(Slow(random_rows(1000), 1), tmp_path / "out", workers=workers)
    assert closed.is_set()
    assert 0 < taken < 1000


def test_strings_are_numbered_by_their_bytes() -> None:
    """As Python sorts them: with the same first 8 bytes or not, zeros, entries twice or unused."""
    rng = random.Random(7)
    for alphabet, start, most in itertools.product(
        (b"ab", b"\0a", b"abcdefgh"), (b"", b"x" * 9), (3, 12)
    ):
        texts = [start + bytes(rng.choices(alphabet, k=rng.randint(0, most))) for _ in range(200)]
        codes = [rng.choice([None, *range(150)]) for _ in range(300)]
        wanted = [None if code is None else texts[code] for code in codes]
        rising = sorted({text for text in wanted if text is not None})
        numbers = [0 if text is None else 1 + rising.index(text) for text in wanted]
        entries = pa.array(texts, pa.large_binary())
        encoded = pa.DictionaryArray.from_arrays(pa.array(codes, pa.int32()), entries)
        for given in (pa.array(wanted, pa.binary()), encoded, encoded.slice(0)):
            found, distinct = strings.number_block(given)
            assert found.tolist() == numbers
            assert distinct.to_pylist() == rising


def test_parquet_is_decoded_within_its_share_of_the_memory(tmp_path: Path) -> None:
    """Arrow would hold the dictionaries of a whole group of rows, and all that it was packed to."""
    rows, memory = 150_000, 16 << 20
    columns = {f"c{n}": [f"{n}-{row}" for row in range(rows)] for n in range(4)}
    pq.write_table(pa.table({"y": [0, 1] * (rows // 2)} | columns), tmp_path / "log.parquet")
    source = ParquetSource(
        [tmp_path / "log.parquet"], AskedColumns(text=f"label=y categorical={','.join(columns)}")
    )

    def peak(memory: int) -> int:
        before, pool = pa.default_memory_pool(), pa.proxy_memory_pool(pa.system_memory_pool())
        pa.set_memory_pool(pool)
        try:
            room, found = Room(tmp_path / "unpacked", 1, memory), 0
            for piece in source.pieces(Position(), 1 << 20, room):
                found += len(source.parse(piece))
        finally:
            pa.set_memory_pool(before)
        assert found == rows
        return int(pool.max_memory())

    assert peak(memory) < memory < peak(1 << 40)


def test_a_parquet_file_is_opened_once_for_each_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And twice before, not more: on S3, each time asks for its end again."""
    opened, shares, log = [], 30, {"y": [0, 1] * 1500, "c": ["a", "b", "c"] * 1000}
    pq.write_table(pa.table(log), tmp_path / "log.parquet", row_group_size=3000 // shares)
    source = ParquetSource([tmp_path / "log.parquet"], AskedColumns(text="label=y categorical=c"))

    def open_parquet(path: Path, *arguments: Any, **options: Any) -> Any:
        opened.append(path)
        return parquet_files.open_parquet(path, *arguments, **options)

    monkeypatch.setattr(parquet_source, "open_parquet", open_parquet)
    pieces = source.pieces(Position(), 320, Room(tmp_path / "unpacked", 1))
    assert sum(len(source.parse(piece)) for piece in pieces) == 3000
    assert len(opened) == 2 + shares


@pytest.mark.parametrize(("least", "processes"), [(100, 3), (101, 0)])
def test_processes_decode_files_that_are_worth_one(
    least: int, processes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To start one takes longer than to decode a small file; there may be thousands of them."""
    started, iterate = [], apart.iterate
    monkeypatch.setattr(apart, "iterate", lambda made: started.append(made) or iterate(made))
    monkeypatch.setattr(parquet_source, "PROCESS_ROWS", least)
    for number in range(3):
        table = pa.table({"y": [0, 1] * 50, "c": ["a", "b"] * 50})
        pq.write_table(table, tmp_path / f"log_{number}.parquet")
    files = sorted(tmp_path.glob("log_*.parquet"))
    source = ParquetSource(files, AskedColumns(text="label=y categorical=c"))
    pieces = source.pieces(Position(), 1 << 20, Room(tmp_path / "unpacked", 2))
    assert sum(len(source.parse(piece)) for piece in pieces) == 300
    assert len(started) == processes


def test_a_log_that_grows_is_read_as_it_was_when_it_was_found(tmp_path: Path) -> None:
    """By this size it is known on the next run."""
    files = [tmp_path / "day_0", tmp_path / "day_1"]
    for path in files:
        path.write_bytes(b"1,a\n" * 100)
    asked = AskedColumns(text="label=1 categorical=2")
    source = CsvSource(files, asked, header=False)

    def grow() -> None:
        for path in files:
            with path.open("ab") as file:
                file.write(b"0,one more\n" * 100)

    grow()
    pieces = source.pieces(Position(), 100, Room(tmp_path / "unpacked", 1))
    read = [next(pieces)]
    grow()
    read += pieces
    assert b"".join(bytes(text_files.read(piece.raw)) for piece in read) == b"1,a\n" * 200
    assert source.settings()["input"] == [["day_0", 400], ["day_1", 400]]


def test_addresses_of_this_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "log.csv").write_text("y,c\n" + "0,a\n1,b\n" * 30)
    asked = ["prepare", "csv", "--input", f"file://{tmp_path}/*.csv", "--columns"]
    asked += ["label=y categorical=c", "--output"]
    assert main([*asked, str(tmp_path / "data")]) == 0
    assert main([*asked, "s3://bucket/data"]) == 2
    assert "s3:/bucket/data is an address of s3:; expected a folder" in capsys.readouterr().err
