"""A Spark session for preparation, local or on a cluster."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from trainmark.errors import InputError

JAVA_VERSION = 17
INSTALL_JAVA = "Install one (Debian and Ubuntu: openjdk-17-jre-headless)."

SETTINGS = {
    "spark.app.name": "trainmark prepare",
    "spark.ui.enabled": "false",
    # Blocks of bytes pass through a column of strings.
    "spark.sql.castBinaryToString.validateUtf8": "false",
}


@contextmanager
def session(master: str | None, settings: Sequence[str]) -> Iterator[Any]:
    """A session, stopped at the end unless it was there before.

    Args:
        master: where to run, such as local[2], yarn or spark://host:7077; None: where
            spark-submit or spark-defaults.conf say, else local[*].
        settings: `K=V` each, over our own.
    """
    given = dict(_pair(setting) for setting in settings)
    try:
        import pyspark.errors
        from pyspark.sql import SparkSession
    except ImportError:
        raise InputError("--engine spark needs PySpark: pip install 'trainmark[spark]'.") from None
    existing = SparkSession.getActiveSession()
    if existing is None:
        check_java()
    builder = SparkSession.builder
    named = {} if master is None else {"spark.master": master}
    for key, value in (SETTINGS | named | given).items():
        builder = builder.config(key, value)
    try:
        spark = builder.getOrCreate()
    except (pyspark.errors.PySparkException, RuntimeError) as error:
        raise InputError(f"Spark does not start: {first_line(error)}.") from error
    spark.sparkContext.setLogLevel("ERROR")
    if str(spark.sparkContext.master).startswith("local"):
        # Otherwise Python on the workers is whatever `python3` is; a cluster has its own setting.
        spark.sparkContext.pythonExec = sys.executable
    else:
        check_executors(spark)
    try:
        yield spark
    finally:
        if existing is None:
            spark.stop()


def check_executors(spark: Any) -> None:
    """An `InputError` where Python on the executors lacks what this process runs with."""

    def found(_: int) -> str:
        try:
            return what_is_here()
        except ImportError as error:  # of this very package, perhaps
            return str(error)

    here = what_is_here()
    tasks = 2 * spark.sparkContext.defaultParallelism
    others = set(spark.sparkContext.parallelize(range(tasks), tasks).map(found).collect()) - {here}
    if others:
        raise InputError(
            f"Python on the executors has {others.pop()!r}, and here is {here!r}; both need the "
            "same. Install it there, or name another Python by --spark-conf spark.pyspark.python."
        )


def what_is_here() -> str:
    """What the two sides of a job have to have in common."""
    import trainmark
    from trainmark.clicklog.arrays import primitives

    return f"trainmark {trainmark.__version__} with{'' if primitives.FAST else 'out'} numba"


def _pair(setting: str) -> tuple[str, str]:
    key, equals, value = setting.partition("=")
    if not equals or not key:
        raise InputError(f"--spark-conf is {setting!r}; expected KEY=VALUE.")
    return key, value


def check_java() -> None:
    """An `InputError` where no Java is found that Spark 4 runs on."""
    found = java_version()
    if found is None:
        raise InputError(
            f"--engine spark needs Java {JAVA_VERSION}; none was found. {INSTALL_JAVA}"
        )
    if found < JAVA_VERSION:
        raise InputError(
            f"--engine spark needs Java {JAVA_VERSION} or newer; version {found} was found. "
            f"{INSTALL_JAVA}"
        )


def java_version() -> int | None:
    """The major version of the `java` that Spark would start, or None."""
    home = os.environ.get("JAVA_HOME")  # where Spark's own launcher looks first
    java = f"{home}/bin/java" if home else shutil.which("java")
    if java is None:
        return None
    try:
        output = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=60)
    except OSError:
        return None
    match = re.search(r'version "(?:1\.)?(\d+)', output.stderr)
    return int(match.group(1)) if match else None


def first_line(error: BaseException) -> str:
    """What an error of the JVM says, without its trace; if it is of our code in a task, what that
    says."""
    text = re.sub(r"^An error occurred while calling \S+\n: (\S+: )?", "", str(error).strip())
    if ours := re.search(r"trainmark\.errors\.InputError: (.+)", text):
        return ours[1].strip(" .")
    return text.splitlines()[0].strip(" .") if text else type(error).__name__
