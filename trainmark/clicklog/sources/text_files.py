"""Reads text files, plain or compressed, as pieces of whole lines."""

import gzip
import io
import zlib
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from trainmark.clicklog.arrays import primitives
from trainmark.clicklog.arrays.primitives import Scratch
from trainmark.clicklog.sources import remote
from trainmark.clicklog.sources.source import BadRows, Piece, Position, Room, starts
from trainmark.clicklog.sources.unpack import Unpacker
from trainmark.errors import InputError, raise_all

PADDING = 16
"""Zero bytes behind the text of a piece, so that parsers may look ahead."""
MAX_LINE_BYTES = 1 << 20
DECOMPRESS_BYTES = 1 << 16
REST_BYTES = 1 << 16
"""What is read at a time of a line that goes on behind a piece."""
LAST_BYTES = 8 << 20
"""The size of the last pieces, if others are larger."""
PACKED = (".gz", ".zst")
NEWLINE = ord("\n")
SAMPLE_BYTES = 1 << 20

_scratch = Scratch()


@dataclass(frozen=True)
class Text:
    """Lines: `length` bytes of `buffer`, which zeros follow, or other lines and zeros."""

    buffer: Any
    length: int
    damage: str | None = None
    """Why the rest of the file cannot be decompressed."""

    @cached_property
    def lines(self) -> int:
        return count_lines(self.buffer[: self.length])

    def __bytes__(self) -> bytes:
        return bytes(self.buffer[: self.length])


FORMATS = {
    b"\x1f\x8b": (".gz", "compressed by gzip: give it a name that ends in .gz"),
    b"\x28\xb5\x2f\xfd": (".zst", "compressed by zstd: give it a name that ends in .zst"),
    b"PAR1": (None, "a Parquet file, which `trainmark prepare parquet` reads"),
    b"\xff\xfe": (None, "text in UTF-16: convert it, as by iconv -f UTF-16 -t UTF-8"),
    b"\xfe\xff": (None, "text in UTF-16: convert it, as by iconv -f UTF-16 -t UTF-8"),
    b"PK\x03\x04": (None, "a zip archive (unpack it) or an Excel file (save it as CSV)"),
    b"\xd0\xcf\x11\xe0": (None, "an Excel file: save it as CSV"),
    b"BZh": (None, "compressed by bzip2: unpack it, or pack it by gzip or zstd"),
    b"\xfd7zX": (None, "compressed by xz: unpack it, or pack it by gzip or zstd"),
}
"""First bytes of files that are no plain text: the suffix that they need, and what to say."""


def check_files(paths: Sequence[Path], bad_rows: BadRows) -> None:
    """Refuse files that are not what their names say, no text at all, or, unless bad rows are
    passed over, empty."""
    raise_all(problem for path in paths if (problem := _format_problem(path)))
    if bad_rows == "stop":
        raise_all(f"{path} is empty." for path in paths if is_empty(path))


def is_empty(path: Path) -> bool:
    """Whether a file has no bytes, or none were compressed."""
    if path.suffix not in PACKED:
        return path.stat().st_size == 0
    with TextFile(path) as file:
        return not file.read_into(bytearray(1)) and not file.damage


def _format_problem(path: Path) -> str | None:
    try:
        with path.open("rb") as file:
            start = file.read(4)
    except OSError as error:
        raise _unreadable(path, error) from None
    for sign, (suffix, words) in FORMATS.items():
        if start.startswith(sign):
            return None if suffix == path.suffix else f"{path} is {words}."
    if start and path.suffix in PACKED:
        return f"{path} is not compressed, though its name ends in {path.suffix}: give it another."
    return None


def _unreadable(path: Path, error: OSError) -> InputError:
    # Arrow's errors, as of a connection that was lost, have a text alone.
    return InputError(f"{path} cannot be read: {error.strerror or error}.")


class _StoredFile(io.RawIOBase):
    """A file as it is stored. That it cannot be read is told here, where it is known that this is
    no damage of compressed data."""

    def __init__(self, path: Path, opened: Any) -> None:
        self._path, self._file = path, opened

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            return int(self._file.readinto(buffer))
        except OSError as error:
            raise _unreadable(self._path, error) from None

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return int(self._file.seek(offset, whence))

    def tell(self) -> int:
        return int(self._file.tell())

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()


class TextFile:
    """The decompressed text of a file; .gz and .zst by their names."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.damage: str | None = None
        try:
            self._raw = _StoredFile(path, path.open("rb", buffering=0))
        except OSError as error:
            raise _unreadable(path, error) from None
        self._file: Any = self._raw
        self._stored: Any = self._raw
        self._unread = memoryview(b"")
        if path.suffix in PACKED:
            self._stored = io.BufferedReader(self._raw, remote.READ_BYTES)
        if path.suffix == ".gz":
            self._file = gzip.GzipFile(fileobj=self._stored)
        elif path.suffix == ".zst":
            import pyarrow as pa

            self._file = pa.CompressedInputStream(pa.PythonFile(self._stored, "r"), "zstd")

    def __enter__(self) -> "TextFile":
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()
        self._stored.close()

    def bytes_read(self) -> int:
        """How much of the file on disk has been read."""
        return int(self._stored.tell())

    def skip(self, offset: int) -> None:
        """Go to a byte of the text."""
        if self._file is self._raw:
            self._raw.seek(offset)
            return
        while offset and not self.damage:
            offset -= self.read_into(_scratch.array("skipped", min(offset, 1 << 22), "u1"))

    def read_into(self, buffer: Any) -> int:
        """Fill `buffer` as far as the text goes, or until it turns out damaged."""
        view, done = memoryview(buffer), 0
        while done < len(view):
            if self._file is self._raw:
                count = self._raw.readinto(view[done:])
            else:
                if not self._unread:
                    self._unread = self._next_block()
                count = min(len(self._unread), len(view) - done)
                view[done : done + count] = self._unread[:count]
                self._unread = self._unread[count:]
            if not count:
                break
            done += count
        return done

    def _next_block(self) -> memoryview:
        """What is read together with damaged data is lost: always as much, however much is asked
        for at a time, and little."""
        block, done = memoryview(bytearray(DECOMPRESS_BYTES)), 0
        try:
            while count := self._file.readinto(block[done:]):
                done += count
        except (EOFError, zlib.error, OSError) as error:  # the last is Arrow's, for zstd
            self.damage = f"the compressed data is damaged from here on ({error})"
            done = 0
        return block[:done]


# --- pieces


@dataclass(frozen=True)
class TextRange:
    """The raw part of a `Piece`: the lines that start from byte `begin` to before `end`."""

    path: Path
    begin: int
    end: int
    unpacked: bool = False
    """Whether it is a file of our own, to be removed when it is read."""
    damage: str | None = None
    """Why the rest of the archive that it is from cannot be unpacked."""


def pieces(
    paths: Sequence[Path], sizes: Sequence[int], start: Position, piece_bytes: int, room: Room
) -> Generator[Piece]:
    """Pieces of about `piece_bytes` from `start` on, of plain files and of packed ones.

    Args:
        sizes: how much of each plain file to read: a log may grow meanwhile.
    """
    places = starts(paths, start)
    packed = [place for place in places if is_packed(paths[place.file])]

    def unpack(place: Position) -> Iterator[Piece]:
        return _unpacked(paths[place.file], place, piece_bytes, room.folder)

    left = sum(sizes[place.file] - place.offset for place in places if place not in packed)
    with Unpacker(packed, unpack, room) as unpacker:
        for place in places:
            if place in packed:
                yield from unpacker.pieces(place)
                continue
            plain = (paths[place.file], sizes[place.file])
            for piece in _plain_pieces(*plain, place, piece_bytes, left, room):
                left -= piece.num_bytes
                yield piece


def is_packed(path: Path) -> bool:
    """Whether it can only be read from its start on, or by the process that began the run."""
    return path.suffix in PACKED or remote.is_remote(str(path))


def _plain_pieces(
    path: Path, size: int, start: Position, piece_bytes: int, left: int, room: Room
) -> Iterator[Piece]:
    """Pieces of a file, of all that is left to read."""
    begin = start.offset
    while begin < max(size, 1):  # an empty file is a piece, too
        # Smaller ones at the end of everything, so that no process works on a last one alone.
        share = max((left + start.offset - begin) // (2 * room.threads), LAST_BYTES)
        end = min(begin + min(piece_bytes, share), size)
        stop = Position(start.file + 1) if end == size else Position(start.file, end)
        place = Position(start.file, begin)
        yield Piece(place, stop, TextRange(path, begin, end), end - begin)
        begin = max(end, 1)


def read(where: TextRange) -> Text:
    """The text of a piece, which is good until the next one is read in this thread."""
    [text] = chunks(where, where.end - where.begin + 1)
    return text


def chunks(where: TextRange, most: int) -> Iterator[Text]:
    """The text of a piece, about `most` bytes of whole lines at a time, or once nothing; each is
    good until the next."""
    begin = max(where.begin - 1, 0)  # whether a line starts at `begin`, the byte before it says
    left, held, within = where.end - begin, 0, not where.begin
    buffer = _scratch.array("text", most + MAX_LINE_BYTES + PADDING, "u1")
    with TextFile(where.path) as file:
        file.skip(begin)
        while True:
            count = file.read_into(buffer[held : held + min(left, most)])
            left, filled, first = left - count, held + count, 0
            if not within:
                found = _newline(buffer[:filled])
                first, within = (filled, False) if found is None else (found + 1, True)
            buffer[filled : filled + PADDING] = 0
            if not (count and left):
                break
            end = first + _after_last_newline(buffer[first:], filled - first)
            if end > first:
                yield Text(buffer[first:], end - first)
            held = filled - end
            if held > MAX_LINE_BYTES:
                raise _too_long(where.path)
            buffer[:held] = buffer[end:filled]
        filled = _with_last_line(file, buffer, filled, where.path)
    if where.unpacked:
        where.path.unlink()
    buffer[filled : filled + PADDING] = 0
    first = first if within else filled
    yield Text(buffer[first:], filled - first, where.damage)


def _with_last_line(file: TextFile, buffer: Any, filled: int, path: Path) -> int:
    """Read what a line that has begun goes on with; where it ends."""
    while filled and buffer[filled - 1] != NEWLINE:
        if filled + REST_BYTES > len(buffer) - PADDING:
            raise _too_long(path)
        more = file.read_into(buffer[filled : filled + REST_BYTES])
        found = _newline(buffer[filled : filled + more])
        filled += more if found is None else found + 1
        if found is not None or not more:
            break
    return filled


def _too_long(path: Path) -> InputError:
    return InputError(
        f"{path} has a line that is longer than {MAX_LINE_BYTES:,} bytes. Is this a click log?"
    )


def _newline(text: Any) -> int | None:
    """Where the first line ends."""
    for start in range(0, len(text), REST_BYTES):
        found: int = text[start : start + REST_BYTES].tobytes().find(b"\n")
        if found >= 0:
            return start + found
    return None


def _unpacked(path: Path, position: Position, piece_bytes: int, folder: Path) -> Iterator[Piece]:
    with TextFile(path) as file:
        file.skip(position.offset)
        read = file.bytes_read() if position.offset else 0
        carried = b""
        ended = False
        while not ended:
            text, carried, ended = _next_text(file, piece_bytes, carried)
            to = folder / f"{position.file}.{position.offset}"
            to.write_bytes(text.buffer[: text.length].data)
            stop = (
                Position(position.file + 1)
                if ended
                else Position(position.file, position.offset + text.length)
            )
            before, read = read, file.bytes_read()
            raw = TextRange(to, 0, text.length, unpacked=True, damage=text.damage)
            yield Piece(position, stop, raw, read - before, disk_bytes=text.length)
            position = stop


def _next_text(file: TextFile, piece_bytes: int, carried: bytes) -> tuple[Text, bytes, bool]:
    """Text up to the last line end that fits, what follows it, and whether the file is done."""
    wanted = piece_bytes
    while True:
        wanted = max(wanted, len(carried) + 1)
        buffer = _scratch.array("text", wanted, "u1")
        buffer[: len(carried)] = np.frombuffer(carried, "u1")
        filled = len(carried) + file.read_into(buffer[len(carried) : wanted])
        ended = filled < wanted
        # Half a line before damaged data is part of the damage.
        end = filled if ended and not file.damage else _after_last_newline(buffer, filled)
        if end or ended:
            break
        if filled > MAX_LINE_BYTES:
            raise _too_long(file.path)
        carried, wanted = bytes(buffer[:filled]), 2 * wanted
    rest = bytes(buffer[end:filled])
    return Text(buffer, end, file.damage), rest, ended


def _after_last_newline(buffer: Any, filled: int) -> int:
    step = 1 << 12
    for stop in range(filled, 0, -step):
        start = max(stop - step, 0)
        found: int = buffer[start:stop].tobytes().rfind(b"\n")
        if found >= 0:
            return start + found + 1
    return 0


def bytes_per_line(paths: Sequence[Path]) -> float:
    """Bytes on disk that a line takes, roughly: from the start of the first file of each kind of
    compression that has any lines."""
    sizes: dict[str, int] = {}
    per_line: dict[str, float] = {}
    for path in paths:
        sizes[path.suffix] = sizes.get(path.suffix, 0) + path.stat().st_size
        if path.suffix not in per_line and (found := _sampled_bytes_per_line(path)):
            per_line[path.suffix] = found
    lines = sum(sizes[suffix] / found for suffix, found in per_line.items())
    return sum(sizes.values()) / lines if lines else 1.0


def _sampled_bytes_per_line(path: Path) -> float | None:
    with TextFile(path) as file:
        sample = np.empty(SAMPLE_BYTES, np.uint8)
        length = file.read_into(sample)
        read = file.bytes_read()
    lines = count_lines(sample[:length])
    return read / lines if lines else None


def count_lines(text: Any) -> int:
    """Lines of an array of bytes; the last need not be ended."""
    if not len(text):
        return 0
    newlines = primitives.count(text, ord("\n"))
    return newlines + int(text[-1] != ord("\n"))
