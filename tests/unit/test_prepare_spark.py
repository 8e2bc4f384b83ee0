"""`--engine spark`: the same bytes as the embedded engine, on Spark in this process (local[2])."""

import gzip
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pytest

from tests.unit.criteo_oracle import random_lines, write_day
from trainmark.checksums import FILE_NAME as CHECKSUMS
from trainmark.cli import main
from trainmark.clicklog import criteo
from trainmark.clicklog.sources.criteo_text import CriteoSource
from trainmark.clicklog.sources.recipes import RECIPES
from trainmark.clicklog.spark import session as spark_session
from trainmark.clicklog.spark.blocks import Parse
from trainmark.errors import InputError

# For a few hundred rows, compiling plans and planning anew cost more than they save.
SETTINGS = (
    "spark.sql.shuffle.partitions=2",
    "spark.sql.adaptive.enabled=false",
    "spark.sql.codegen.wholeStage=false",
    "spark.sql.codegen.factoryMode=NO_CODEGEN",
    "spark.driver.memory=1g",
    "spark.driver.extraJavaOptions=-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    "spark.driver.bindAddress=127.0.0.1",
    "spark.driver.host=127.0.0.1",
    "spark.ui.showConsoleProgress=false",
)


@pytest.fixture(scope="module")
def spark() -> Iterator[Any]:
    pytest.importorskip("pyspark", reason="pyspark is not installed (extra `spark`)")
    version = spark_session.java_version()
    if version is None or version < spark_session.JAVA_VERSION:
        pytest.skip(f"no Java {spark_session.JAVA_VERSION} was found; .ci/run installs one")
    with spark_session.session("local[2]", SETTINGS) as session:
        yield session


def contents(folder: Path) -> dict[str, bytes]:
    """All but the checksums, which the cluster's engine does not write."""
    paths = (path for path in folder.rglob("*") if path.is_file() and path.name != CHECKSUMS)
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def prepare(folder: Path, engine: Literal["embedded", "spark"], **options: Any) -> Path:
    output = folder / engine
    criteo.prepare(
        criteo.Options(input=str(folder / "day_*"), output=output, engine=engine, **options)
    )
    return output


def assert_same(folder: Path, **options: Any) -> dict[str, bytes]:
    embedded = contents(prepare(folder, "embedded", **options))
    distributed = contents(prepare(folder, "spark", **options))
    assert sorted(distributed) == sorted(embedded)
    different = [name for name in embedded if distributed[name] != embedded[name]]
    assert not different
    return embedded


def write_days(folder: Path, rows: int = 120) -> None:
    """Days in odd order and forms: day_10 is the last; line ends of Windows; compressed."""
    days = [random_lines(random.Random(seed), rows) for seed in range(3)]
    write_day(folder / "day_1", days[0])
    write_day(folder / "day_2", days[1], end="\r\n")
    text = "".join("\t".join(line) + "\n" for line in days[2])
    (folder / "day_10.gz").write_bytes(gzip.compress(text[:-1].encode()))


def spoil(day: Path) -> None:
    """Put five bad lines in."""
    lines = day.read_bytes().splitlines()
    lines[3:3] = [b"", b"0\t1", b"2" + lines[0][1:], lines[4] + b"\xff"]
    lines[50] = lines[50].replace(b"\t", b"\t9223372036854775808", 1)
    day.write_bytes(b"\n".join(lines) + b"\n")


def test_same_bytes_with_bad_rows_and_settings_by_column(
    spark: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_days(tmp_path)
    spoil(tmp_path / "day_1")
    old = tmp_path / ".spark.spark" / "counts"  # a phase of an earlier version, done again
    old.mkdir(parents=True)
    (old / "_SUCCESS").touch()
    files = assert_same(
        tmp_path, frequency_threshold="3,C2=0", max_rows="C5=4", bad_rows="skip", seed=7
    )
    assert len(files) == 3 * 28 + 26 + 5
    assert files["bad_rows.txt"].count(b"\n") == 5
    # The work folder is gone, and nothing is done twice.
    assert not list(tmp_path.glob(".*"))
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "spark").rglob("*")}
    prepare(
        tmp_path, "spark", frequency_threshold="3,C2=0", max_rows="C5=4", bad_rows="skip", seed=7
    )
    assert "already holds this dataset" in capsys.readouterr().out
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "spark").rglob("*")}
    with pytest.raises(InputError, match="made with other settings"):
        prepare(tmp_path, "spark", frequency_threshold="3", bad_rows="skip")


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"recipe": "torchrec", "frequency_threshold": "2", "vocabulary_from": "train"},
        {"recipe": "dlrm", "max_rows": "50"},
        {"holdout": "0.25", "test_half": "second", "bad_rows": "keep"},
    ],
    ids=lambda options: "-".join(options.values()),
)
def test_same_bytes_by_other_rules(spark: Any, options: dict[str, Any], tmp_path: Path) -> None:
    write_days(tmp_path)
    if "bad_rows" in options:
        spoil(tmp_path / "day_1")
    assert_same(tmp_path, **options)


@pytest.mark.slow
def test_blocks_partitions_and_resume(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files read in many pieces, written in many; stopped before the last phase, and continued."""
    from trainmark.clicklog.spark import engine as spark_engine

    write_days(tmp_path, rows=400)
    for name, rows in {
        "LINES": 30,
        "SHARE_ROWS": 50,
        "MIN_SHARE_ROWS": 50,
        "RANGE_ROWS": 90,
    }.items():
        monkeypatch.setattr(spark_engine, name, rows)
    spark.conf.set("spark.sql.files.maxPartitionBytes", "20000")
    expected = contents(prepare(tmp_path, "embedded"))

    def stop(*arguments: object) -> None:
        raise KeyboardInterrupt

    try:
        with monkeypatch.context() as patch:
            patch.setattr(spark_engine.SparkEngine, "join_pieces", stop)
            with pytest.raises(KeyboardInterrupt):
                prepare(tmp_path, "spark")
        assert (tmp_path / ".spark.spark" / "pieces" / "_SUCCESS").exists()
        with pytest.raises(InputError, match="unfinished work with other settings"):
            prepare(tmp_path, "spark", seed=1)
        for phase in ("Parse", "Count", "Encode"):  # which are done
            monkeypatch.setattr(spark_engine, phase, stop)
        assert contents(prepare(tmp_path, "spark")) == expected
    finally:
        spark.conf.unset("spark.sql.files.maxPartitionBytes")


def test_bad_line_is_named(spark: Any, tmp_path: Path) -> None:
    for day in range(2):
        write_day(tmp_path / f"day_{day}", random_lines(random.Random(day), 10))
    text = (tmp_path / "day_1").read_text().splitlines()
    text[6] = text[6][:-3] + "xyz"
    (tmp_path / "day_1").write_text("\n".join(text) + "\n")
    with pytest.raises(InputError, match=r"day_1:7: categorical 26 is '.*xyz', expected up to 8"):
        prepare(tmp_path, "spark")


def test_a_batch_without_lines_is_no_block() -> None:
    types = {"file": pa.int64(), "block": pa.int64(), "line": pa.binary()}
    batch = pa.RecordBatch.from_pylist([], pa.schema(list(types.items())))
    assert list(Parse(CriteoSource([], RECIPES["nvidia"], "skip"))([batch])) == []


def test_zst_is_refused(spark: Any, tmp_path: Path) -> None:
    (tmp_path / "day_0.zst").write_bytes(b"x")
    with pytest.raises(InputError, match=r"day_0\.zst: --engine spark reads plain and \.gz files"):
        prepare(tmp_path, "spark")


def test_what_spark_says_is_a_sentence(
    spark: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_days(tmp_path)
    days, output = str(tmp_path / "day_{1..2}"), str(tmp_path / "out")
    (tmp_path / "file").touch()
    for given, to, words in (
        ("s3://bucket/day_*", output, 'No FileSystem for scheme "s3". Hadoop reads S3 as s3a://'),
        (days, str(tmp_path / "file/out"), "Spark ended with an error: "),
        ("hdfs://no.such.host/day_*", output, "no.such.host"),
    ):
        assert (
            main(["prepare", "criteo", "--engine", "spark", "--input", given, "--output", to]) == 2
        )
        said = capsys.readouterr().err
        assert words in said
        assert said.count("\n") == 1


def test_spark_decides_where_it_runs_unless_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """As spark-submit was told, or spark-defaults.conf says."""
    sql = pytest.importorskip("pyspark.sql", reason="pyspark is not installed (extra `spark`)")
    set_to: dict[str, str] = {}

    class Builder:
        def config(self, key: str, value: str) -> "Builder":
            set_to[key] = value
            return self

        def getOrCreate(self) -> None:  # noqa: N802
            raise RuntimeError(
                "An error occurred while calling o1.go\n: java.io.Bad: no start\n\tat"
            )

    monkeypatch.setattr(sql.SparkSession, "builder", Builder())
    monkeypatch.setattr(spark_session, "check_java", lambda: None)
    for master, settings, expected in (
        (None, [], None),
        ("yarn", [], "yarn"),
        (None, ["spark.master=local[3]"], "local[3]"),
    ):
        set_to.clear()
        with (
            pytest.raises(InputError, match=r"Spark does not start: no start\."),
            spark_session.session(master, settings),
        ):
            pass
        assert set_to.get("spark.master") == expected


def test_executors_have_what_is_here(spark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    spark_session.check_executors(spark)
    monkeypatch.setattr("trainmark.__version__", "0.0")
    with pytest.raises(InputError, match=r"executors has 'trainmark .*', and here is .*0\.0 with"):
        spark_session.check_executors(spark)


def test_what_spark_does_not_support(tmp_path: Path) -> None:
    with pytest.raises(InputError) as error:
        prepare(tmp_path, "spark", memory="1G", vocabulary=tmp_path)
    assert "2 problems" in str(error.value)
    with pytest.raises(InputError, match="--master and --spark-conf are for --engine spark"):
        prepare(tmp_path, "embedded", master="yarn")


def test_a_setting_that_is_none() -> None:
    pytest.importorskip("pyspark")
    with (
        pytest.raises(InputError, match="--spark-conf is 'x'; expected KEY=VALUE"),
        spark_session.session(None, ["x"]),
    ):
        pass
