"""Input on other machines: the same bytes as from local files, through Arrow's filesystems."""

import gzip
import io
import json
import lzma
import os
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest
from pyarrow import fs

from tests.unit.criteo_oracle import random_lines, write_day
from tests.unit.test_prepare_engine import ROOMY, TIGHT, files, prepare
from tests.unit.test_tokens import bytes_tokenizer
from trainmark.clicklog import criteo, csv_data, parquet_data
from trainmark.clicklog.engine import phases
from trainmark.clicklog.engine.limits import Limits
from trainmark.clicklog.sources import remote
from trainmark.clicklog.sources.text_files import TextFile
from trainmark.corpus import tokens
from trainmark.errors import InputError


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files of s3://bucket, which lie in a folder. Only this process may read them."""
    folder, here = tmp_path / "bucket", os.getpid()
    folder.mkdir()

    def filesystem(uri: str) -> tuple[Any, str]:
        assert os.getpid() == here, "a connection does not survive a fork"
        path = uri.partition("?")[0].removeprefix("s3://bucket").lstrip("/")
        return fs.SubTreeFileSystem(str(folder), fs.LocalFileSystem()), path

    monkeypatch.setattr(remote, "filesystem", filesystem)
    return folder


def bins(folder: Path) -> dict[str, bytes]:
    return {name: data for name, data in files(folder).items() if not name.endswith("json")}


@pytest.mark.parametrize("kind", ["", ".gz", ".zst"])
def test_criteo_days(kind: str, bucket: Path, tmp_path: Path) -> None:
    (bucket / "raw").mkdir()
    for day in range(3):
        local = tmp_path / f"day_{day}"
        write_day(local, random_lines(random.Random(day), 120))
        text = local.read_bytes()
        data = {
            "": text,
            ".gz": gzip.compress(text),
            ".zst": pa.compress(text, "zstd", asbytes=True),
        }
        (bucket / "raw" / f"day_{day}{kind}").write_bytes(data[kind])
    expected = prepare(tmp_path / "day_*", tmp_path / "expected", TIGHT)
    options = criteo.Options(input=(f"s3://bucket/raw/day_*{kind}",), output=tmp_path / "out")
    phases.prepare(criteo.make_job(options), TIGHT)
    assert bins(tmp_path / "out") == bins(expected)


def test_csv_and_parquet(bucket: Path, tmp_path: Path) -> None:
    rows = {"label": [n % 2 for n in range(90)], "city": [f"c{n % 7}" for n in range(90)]}
    table = pa.table(rows | {"age": [float(n % 13) for n in range(90)]})
    for part in range(2):
        pa.csv.write_csv(table.slice(45 * part, 45), bucket / f"log_{part}.csv")
        pa.parquet.write_table(table.slice(45 * part, 45), bucket / f"log_{part}.parquet")
    for module, kind in ((csv_data, "csv"), (parquet_data, "parquet")):
        columns = "label=label numerical=age categorical=city"
        for where in (str(bucket), "s3://bucket"):
            module.prepare(
                module.Options(
                    input=(f"{where}/log_{{0..1}}.{kind}",),
                    output=tmp_path / f"{kind} {where[:3].strip('/')}",
                    columns=columns,
                )
            )
        first, second = (path for path in tmp_path.iterdir() if path.name.startswith(f"{kind} "))
        assert bins(first) == bins(second)


def test_a_parquet_file_without_rows_is_read_by_no_worker(
    bucket: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Limits, "of", lambda _: replace(ROOMY, piece_bytes=1 << 8))
    table = pa.table({"label": [0, 1] * 60, "city": ["a", "b", "c"] * 40})
    for part, rows in enumerate((60, 0, 60)):
        pa.parquet.write_table(table.slice(0, rows), bucket / f"log_{part}.parquet")
    options = parquet_data.Options(
        input=("s3://bucket/log_*",),
        output=tmp_path / "out",
        columns="label=label categorical=city",
        bad_rows="skip",
    )
    parquet_data.prepare(options)
    assert "log_1.parquet" in (tmp_path / "out" / "bad_rows.txt").read_text()


@pytest.mark.parametrize("name", ["day_0.gz", "day_*.gz"])
def test_an_address_may_have_options(name: str, bucket: Path) -> None:
    (bucket / "day_0.gz").write_bytes(b"text")
    options = "?endpoint_override=localhost:9000&scheme=http"
    (found,) = remote.find(f"s3://bucket/{name}{options}", "--input")
    assert str(found) == f"s3://bucket/day_0.gz{options}"
    assert (found.name, found.suffix) == ("day_0.gz", ".gz")
    assert found.open("rb").read() == b"text"


def test_what_is_not_there_is_told(bucket: Path, tmp_path: Path) -> None:
    for pattern in ("s3://bucket/day_*", "s3://bucket/day_7"):
        with pytest.raises(InputError, match=r"No file matches --input .s3"):
            criteo.make_job(criteo.Options(input=(pattern,), output=tmp_path / "out"))


@pytest.mark.parametrize("error", [pa.ArrowException, OSError, ValueError])
def test_what_cannot_be_reached_is_told_in_a_line(
    error: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def from_uri(uri: str) -> Any:
        asked.append(uri)
        raise error("Unable to load libjvm\ndlopen failed: here\ndlopen failed: there.")

    monkeypatch.setattr(fs, "FileSystem", SimpleNamespace(from_uri=from_uri))
    for pattern in ("hdfs://b/day_*", "gs://b/day_0?project_id=p", "gs://b/day_*"):
        with pytest.raises(InputError, match=r"^\S+ cannot be reached: Unable to load libjvm\.$"):
            csv_data.prepare(csv_data.Options(input=(pattern,), output=tmp_path / "out"))
    retry = "retry_limit_seconds=60"
    assert asked == ["hdfs://b", f"gs://b/day_0?project_id=p&{retry}", f"gs://b?{retry}"]
    with pytest.raises(InputError, match=r"--input is 'http://b/day_0'\. Besides .* s3://, gs://"):
        csv_data.prepare(csv_data.Options(input=("http://b/day_0",), output=tmp_path / "out"))


@pytest.mark.parametrize("kind", ["", ".gz", ".zst"])
def test_a_lost_connection_is_no_damage(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that could not be fetched are none to skip."""
    text = random.Random(1).randbytes(1 << 18).hex().encode()
    packed = {".gz": gzip.compress, ".zst": lambda data: pa.compress(data, "zstd", asbytes=True)}

    class Lost(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            if self.tell() > 1 << 17:
                raise OSError("the server is gone")  # without a number, as Arrow's are
            return super().read(min(size or 0, 1 << 16))

    def opened(*_: Any, **__: Any) -> Any:
        return pa.PythonFile(Lost(packed.get(kind, bytes)(text)), "r")

    monkeypatch.setattr(remote.RemoteFile, "open", opened)
    where: Any = remote.RemoteFile(f"s3://bucket/day_0{kind}")
    with TextFile(where) as file, pytest.raises(InputError, match=r"read: the server is gone\.$"):
        file.read_into(bytearray(len(text)))
    assert file.damage is None


def test_packed_files_are_read_in_large_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is a request; gzip asks for 8 KiB at a time."""
    text, reads = random.Random(1).randbytes(1 << 18).hex().encode(), list[int]()

    class Counted(io.FileIO):
        def readinto(self, buffer: Any) -> int:
            reads.append(len(buffer))
            return super().readinto(buffer) or 0

    monkeypatch.setattr(remote.RemoteFile, "open", lambda self, *_, **__: Counted(self.uri[5:]))
    for name, packed in {
        "a.gz": gzip.compress(text), "b.zst": pa.compress(text, "zstd", asbytes=True),
        "c.xz": lzma.compress(text),
    }.items():  # fmt: skip
        (tmp_path / name).write_bytes(packed)
        where: Any = remote.RemoteFile(f"s3://{tmp_path / name}")
        found = bytearray(len(text))
        if where.suffix != ".xz":
            with TextFile(where) as file:
                assert file.read_into(found) == len(text)
            assert found == text
        if where.suffix != ".zst":
            assert next(tokens._blocks([where])).text == text
    assert len(reads) <= 4 * 4  # of four files


def test_texts(bucket: Path, tmp_path: Path) -> None:
    """Plain and packed, of several lines; a continued preparation knows them by address."""
    texts = {
        "a.txt": b"one two\nthree\n", "b.txt.gz": gzip.compress(b"four five\n"),
        "c.txt.xz": lzma.compress(b"six\nseven"),
    }  # fmt: skip
    for name, packed in texts.items():
        (bucket / name).write_bytes(packed)
    tokenizer, found = bytes_tokenizer(tmp_path / "tokenizer"), []
    for number, given in enumerate((f"{bucket}/*.txt*", "s3://bucket/*.txt*")):
        output = tmp_path / f"{number}"
        tokens.prepare(tokens.Options(input=given, tokenizer=tokenizer, output=output))
        found.append({path.suffix: path.read_bytes() for path in output.glob("corpus_*.[bi]*")})
    assert set(found[0]) == {".bin", ".idx"}
    assert found[0] == found[1]
    (bucket / "a.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    address, output = "s3://bucket/a.jsonl?endpoint_override=localhost:9000", tmp_path / "json"
    tokens.prepare(tokens.Options(input=address, tokenizer=tokenizer, output=output))
    note = json.loads(next(output.glob("*.json")).read_text())
    assert note["settings"]["inputs"][0][0] == "s3://bucket/a.jsonl"
    for given, kept in (
        ("s3://KEY:secret@bucket/a@b:c", "s3://KEY@bucket/a@b:c"),
        ("abfs://store@account/a", "abfs://store@account/a"),
        ("logs/a?b", "logs/a?b"),
    ):
        assert remote.without_secrets(given) == kept
    assert (note["documents"], note["tokens"]) == (2, 2 * len("one") + 2)
    with pytest.raises(InputError, match=r"No file matches --input 's3://bucket/d\.txt'"):
        tokens.prepare(
            tokens.Options(input="s3://bucket/d.txt", tokenizer=tokenizer, output=tmp_path / "d")
        )
