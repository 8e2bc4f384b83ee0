"""Files that are not what they seem, names that are numbers, and many files at once."""

import bz2
import gzip
import lzma
import random
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.unit.criteo_oracle import random_lines, write_day
from tests.unit.logs import prepare_log
from tests.unit.test_prepare_engine import prepare as prepare_criteo
from tests.unit.test_prepare_npy import read
from trainmark.cli import main
from trainmark.clicklog import csv_data, raw_values
from trainmark.clicklog.sources.column_match import AskedColumns
from trainmark.clicklog.sources.parquet_source import ParquetSource
from trainmark.clicklog.sources.source import Position, Room, expand_braces, find_days
from trainmark.errors import InputError

ROWS = [(i % 2, i % 5, f"{i}.5") for i in range(42)]


def text(header: str, delimiter: str = ",") -> str:
    lines = [delimiter.join(map(str, row)) for row in ROWS]
    return "\n".join([header, *lines]) + "\n"


def prepare(tmp_path: Path, name: str, content: bytes | str, **options: Any) -> Path:
    path = tmp_path / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    options = {"columns": "label=clicked categorical=user numerical=price:plain"} | options
    csv_data.prepare(csv_data.Options(input=str(path), output=tmp_path / "data", **options))
    return tmp_path / "data"


def assert_rows(data: Path) -> None:
    found = read(data, "test")
    assert found["numerical"][:, 0].tolist() == [36.5, 37.5, 38.5]
    assert found["labels"].tolist() == [False, True, False]


@pytest.mark.parametrize("header", ["0,1,2", "2024,NA,3.0", "true,1e3,-0"])
def test_names_are_texts(header: str, tmp_path: Path) -> None:
    label, user, price = header.split(",")
    columns = f"label={label} categorical={user} numerical={price}:plain"
    data = prepare(tmp_path, "log.csv", text(header), columns=columns, missing=("NA",))
    assert_rows(data)
    encoder = raw_values.open_dataset(data)
    assert encoder is not None
    assert (encoder.numerical, encoder.categorical) == ((price,), (user,))


def test_a_mark_before_the_text_is_no_part_of_it(tmp_path: Path) -> None:
    marked = text("clicked,user,price").encode("utf-8-sig")
    assert_rows(prepare(tmp_path, "log.csv", marked))
    (tmp_path / "bare").mkdir()
    bare = text("").lstrip("\n").encode("utf-8-sig")
    columns = "label=1 categorical=2 numerical=3:plain"
    assert_rows(prepare(tmp_path / "bare", "log.csv", bare, columns=columns, header=False))


PLAIN = text("clicked,user,price")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("log.csv", text("clicked;user;price", ";"), r"separated by ';': give --delimiter ';'"),
        ("log.csv", text("clicked\tuser\tprice", "\t"), r"by tabs: give --delimiter tab"),
        ("log.csv", PLAIN.encode("utf-16"), "is text in UTF-16: convert it"),
        ("log.csv", PLAIN.encode("utf-16-be"), "is text in UTF-16: .* -f UTF-16BE -t UTF-8"),
        ("log.csv", PLAIN.encode("utf-16-le"), "is text in UTF-16: .* -f UTF-16LE -t UTF-8"),
        ("log.csv", b"clicked\0,user,price\n", "is not text"),
        ("log.csv", gzip.compress(PLAIN.encode()), r"compressed by gzip: .* that ends in \.gz"),
        ("log.csv.gz", PLAIN, r"is not compressed, though its name ends in \.gz"),
        ("log.csv", b"PAR1 and so on", "a Parquet file, which `trainmark prepare parquet` reads"),
        ("log.csv", b"PK\x03\x04 and so on", r"a zip archive \(unpack it\) or an Excel file"),
        ("log.csv.bz2", bz2.compress(PLAIN.encode()), "by bzip2: unpack it, or pack it by gzip"),
        ("log.csv.xz", lzma.compress(PLAIN.encode()), "by xz: unpack it, or pack it by gzip"),
    ],
)
def test_files_that_are_something_else(
    name: str, content: bytes | str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=message):
        prepare(tmp_path, name, content)
    assert not (tmp_path / "data").exists()


def test_another_delimiter_is_named_without_a_header_too(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"separated by '\|': give --delimiter '\|'"):
        prepare(tmp_path, "log.csv", text("0|1|1.5", "|"), header=False, columns="label=1")


@pytest.mark.parametrize("number", ["0,5", "1.234,5", "-1,234.5", "1 234,5"])
def test_commas_in_numbers(number: str, tmp_path: Path) -> None:
    log = text("clicked;user;price", ";") + f"1;2;{number}\n"
    with pytest.raises(InputError, match="a finite number with a decimal point and no comma"):
        prepare(tmp_path, "log.csv", log, delimiter=";")
    with pytest.raises(InputError, match=r"price is 'a,b', expected a finite number\."):
        prepare(tmp_path, "log.csv", log.replace(number, "a,b"), delimiter=";")


@pytest.mark.parametrize("word", ["NA", "null", r"\N", "?"])
def test_words_for_a_missing_value(word: str, tmp_path: Path) -> None:
    log = text("clicked,user,price").replace("20.5", word)
    message = re.escape(f"price is {word!r}, expected a finite number (with `prepare csv --missing")
    with pytest.raises(InputError, match=f"{message} '{re.escape(word)}'` it is a missing value"):
        prepare(tmp_path, "log.csv", log)
    with pytest.raises(InputError, match=r"clicked is '.*', expected 0, 1, [^`]*$"):
        prepare(tmp_path, "log.csv", PLAIN + f"{word},1,2.5\n")  # a label cannot be missing
    assert_rows(prepare(tmp_path, "log.csv", log, missing=(word,)))


def test_missing_is_proposed_for_csv_files_only(tmp_path: Path) -> None:
    table = pa.table({"clicked": [0, 1], "user": ["a", "b"], "price": ["1.5", "NA"]})
    pq.write_table(table, tmp_path / "log.parquet")
    source = ParquetSource(
        [tmp_path / "log.parquet"], AskedColumns(text="label=clicked numerical=price")
    )
    [piece] = source.pieces(Position(), 1 << 20, Room(tmp_path / "unpacked", 1))
    assert source.parse(piece).bad[0].reason == "price is 'NA', expected a finite number"
    encoder = raw_values.open_dataset(prepare(tmp_path, "log.csv", PLAIN))
    assert encoder is not None
    with pytest.raises(InputError, match=r"price is 'NA', expected a finite number\.$"):
        encoder.encode([["NA"]], [["1"]])


# --- what --columns says


@pytest.mark.parametrize(
    ("columns", "parts"),
    [
        (None, ["has the columns y, f0, f1, ", " and 1,901 more. Say with --columns"]),
        ("label=no numerical=*", ["Unknown column", "Known: y, f0, f1, ", " and 1,901 more."]),
        ("label=y numerical=f* categorical=f*", ["2,000 problems:", "'f19' twice", "1,980 more"]),
        ("label=y numerical=*", ["column 2 is 'f1999', there 'f0'. All files need the same col"]),
    ],
)
def test_files_of_many_columns_have_short_messages(
    columns: str | None, parts: list[str], tmp_path: Path
) -> None:
    names = [f"f{number}" for number in range(2000)]
    for name, header in (("log_1", names), ("log_2", names[::-1])):
        (tmp_path / f"{name}.csv").write_text(",".join(["y", *header]) + "\n")
    pattern = "log_*.csv" if columns == "label=y numerical=*" else "log_1.csv"
    with pytest.raises(InputError) as error:
        csv_data.prepare(
            csv_data.Options(input=str(tmp_path / pattern), output=tmp_path / "d", columns=columns)
        )
    for part in parts:
        assert part in str(error.value)
    assert len(str(error.value)) < 1500


def test_a_first_line_that_is_data(tmp_path: Path) -> None:
    for columns in ("label=1 numerical=3", "label=clicked numerical=price"):
        with pytest.raises(InputError, match=r"Unknown column .* is no header, give --no-header"):
            prepare(tmp_path, "log.csv", text("0,1,1.5"), columns=columns)
    for options in ({"header": False}, {}):
        with pytest.raises(InputError, match=r"Unknown column .*\. Known: [^.]*\.$"):
            prepare(tmp_path, "log.csv", PLAIN, columns="label=no numerical=x", **options)


def test_a_role_that_there_is_not(tmp_path: Path) -> None:
    message = r"Unknown role in --columns 'numeric'\. Did you mean 'numerical'\?"
    for columns in (
        "label=clicked numeric=price",
        "label=clicked categorical=user numeric=price",
        "label=clicked=yes numeric=price categorical=user",
        "label=clicked=yes numeric=pr*:log categorical=user",
    ):
        with pytest.raises(InputError, match=message):
            prepare(tmp_path, "log.csv", PLAIN, columns=columns)
    asked = PLAIN.replace("clicked", "was clicked")  # a name with a blank, compared
    columns = "label=was clicked=1 categorical=user numerical=price:plain"
    assert_rows(prepare(tmp_path, "log.csv", asked, columns=columns))


def test_a_label_compared_with_a_text_that_has_an_equals_sign(tmp_path: Path) -> None:
    rows = "".join(f"{'New York=x' if click else 'a=b'},{n},{m}\n" for click, n, m in ROWS)
    columns = "categorical=user label=city=New York=x numerical=price:plain"
    assert_rows(prepare(tmp_path, "log.csv", f"city,user,price\n{rows}", columns=columns))


def test_names_with_commas(tmp_path: Path) -> None:
    log = text('clicked,user,"price, EUR"')
    columns = "label=clicked numerical=price, EUR:plain,user:plain"
    data = prepare(tmp_path, "log.csv", log, columns=columns)
    assert read(data, "test")["numerical"][:, 0].tolist() == [36.5, 37.5, 38.5]
    encoder = raw_values.open_dataset(data)
    assert encoder is not None
    assert encoder.numerical == ("price, EUR", "user")


def test_a_pattern_leaves_out_what_is_named_by_itself(tmp_path: Path) -> None:
    data = prepare(tmp_path, "log.csv", PLAIN, columns="numerical=*:plain label=clicked")
    assert read(data, "test")["numerical"].tolist() == [[1, 36.5], [2, 37.5], [3, 38.5]]
    with pytest.raises(InputError, match="--columns names 'user' twice"):
        prepare(tmp_path, "log.csv", PLAIN, columns="label=clicked numerical=user categorical=user")
    with pytest.raises(InputError, match="--columns names 'user' twice"):
        prepare(tmp_path, "log.csv", PLAIN, columns="label=clicked numerical=* categorical=*")
    with pytest.raises(InputError, match="--columns names 'price' twice"):  # be it one, or more
        prepare(tmp_path, "log.csv", PLAIN, columns="label=clicked numerical=p* categorical=*")


def test_criteo_files_that_are_something_else(tmp_path: Path) -> None:
    write_day(tmp_path / "plain", random_lines(random.Random(0), 40))
    (tmp_path / "day_0").write_bytes(gzip.compress((tmp_path / "plain").read_bytes()))
    with pytest.raises(InputError, match=r"day_0 is compressed by gzip"):
        prepare_criteo(tmp_path / "day_0", tmp_path / "data")


# --- many files


def test_any_number_of_files_and_patterns(tmp_path: Path, capsys: Any) -> None:
    for number in (1, 2, 10, 11):
        (tmp_path / f"day_{number}.csv").write_text(PLAIN)
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "day_2.csv").write_text(PLAIN)
    (tmp_path / "day_[x].csv").write_text(PLAIN)

    def found(*patterns: str) -> list[str]:
        paths = find_days(tuple(str(tmp_path / pattern) for pattern in patterns))
        return [path.relative_to(tmp_path).as_posix() for path in paths]

    assert found("day_1?.csv", "day_{1,2}.csv") == [f"day_{n}.csv" for n in (1, 2, 10, 11)]
    assert found("day_{10..11}.csv") == ["day_10.csv", "day_11.csv"]
    assert found("more/day_2.csv", "day_2.csv", "day_*2.csv") == ["day_2.csv", "more/day_2.csv"]
    assert found("day_[x].csv") == ["day_[x].csv"]
    with pytest.raises(InputError, match=r"No file matches --input '.*day_9\.csv'"):
        found("day_{9..11}.csv")
    flags = ["--input", *(str(tmp_path / f"day_{n}.csv") for n in (1, 2)), "--output"]
    flags += [str(tmp_path / "data"), "--columns", "label=clicked categorical=user"]
    assert main(["prepare", "csv", *flags]) == 0
    capsys.readouterr()


def test_braces() -> None:
    assert expand_braces("a_{1,x}_{2..3}") == ["a_1_2", "a_1_3", "a_x_2", "a_x_3"]
    assert expand_braces("a_{1}_{b") == ["a_{1}_{b"]


def test_columns_that_parquet_files_have_twice_or_otherwise(tmp_path: Path) -> None:
    clicks, numbers = pa.array([True, False] * 30), pa.array(range(60))
    columns = {
        "day_0": (["y", "n", "c"], [clicks, numbers, numbers]),
        "day_1": (["y", "n", "n"], [clicks, numbers, numbers]),
        "day_2": (["y", "n", "c"], [clicks, numbers, numbers.cast("float64")]),
    }
    for name, (names, arrays) in columns.items():
        pq.write_table(pa.Table.from_arrays(arrays, names), tmp_path / f"{name}.parquet")
    wanted = "label=y numerical=n categorical=c"
    with pytest.raises(InputError) as refused:
        prepare_log(tmp_path / "day_*.parquet", tmp_path / "data", columns=wanted)
    twice, absent, other = str(refused.value).splitlines()[1:]
    assert "day_1.parquet has more than one column n. Rename all but one" in twice
    assert re.search(r"day_1.parquet has no column 'c', which .*day_0.parquet has", absent)
    assert re.search(
        r"day_2.parquet has 'c' as double, files from .*day_0.parquet on as int64", other
    )
    with pytest.raises(InputError, match="has more than one column n"):
        prepare_log(tmp_path / "day_1.parquet", tmp_path / "data", columns="label=y numerical=n")
