"""`prepare criteo --engine spark`, from the options to the finished folder.

The job is that of the embedded engine; engine.py says how its phases run.
"""

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainmark import files
from trainmark.clickdata import feature_spec, identity, planted
from trainmark.clicklog.engine import numbers, split_binary, summary
from trainmark.clicklog.engine.job import VOCABULARY, Job
from trainmark.clicklog.engine.phases import BAD_ROWS
from trainmark.clicklog.engine.summary import MANIFEST
from trainmark.clicklog.sources.criteo_format import NAMES, NUM_NUMERICAL
from trainmark.clicklog.sources.criteo_text import CriteoSource
from trainmark.clicklog.sources.recipes import Recipe
from trainmark.clicklog.sources.rows import BadRow
from trainmark.clicklog.sources.source import (
    BadRows,
    Patterns,
    day_order,
    expand_braces,
    listed,
    stop_at,
)
from trainmark.clicklog.spark import session as spark_session
from trainmark.errors import InputError, raise_all

NO_S3 = (
    " Hadoop reads S3 as s3a://, with --spark-conf "
    "spark.jars.packages=org.apache.hadoop:hadoop-aws:VERSION where the cluster lacks it."
)
JobOf = Callable[[Sequence[Any], Mapping[str, Any]], Job]
"""The job for the days that were found (`hadoop.File`) and the dataset's metadata."""


def prepare(
    patterns: Patterns, output: str, job_of: JobOf, master: str | None, settings: Sequence[str]
) -> dict[str, float]:
    """Write the dataset, unless the folder already holds it; seconds of each phase.

    Args:
        patterns: which files to read.
        output: the folder to write.
        job_of: what to prepare.
        master, settings: as of `session`.
    """
    with spark_session.session(master, settings) as spark:
        from py4j.protocol import Py4JJavaError
        from pyspark.errors import PySparkException

        try:
            return _Run(spark, patterns, output, job_of).run()
        except (Py4JJavaError, PySparkException) as error:
            reason = spark_session.first_line(error)
            hint = NO_S3 if 'scheme "s3"' in reason else ""
            raise InputError(f"Spark ended with an error: {reason}.{hint}") from error


class HadoopDays(CriteoSource):
    """Days on a Hadoop path: names and sizes for the settings. Spark reads their lines."""

    def __init__(self, days: Sequence[Any], recipe: Recipe, bad_rows: BadRows) -> None:
        super().__init__([], recipe, bad_rows)
        self.days = days
        self.files = [Path(day.name) for day in days]
        self._without_label = [False] * len(days)

    def settings(self) -> dict[str, Any]:
        sizes = [[file.name, file.num_bytes] for file in self.days]
        return {"input": sizes, "recipe": self.recipe.name}


class _Run:
    """One run."""

    def __init__(self, spark: Any, patterns: Patterns, output: str, job_of: JobOf) -> None:
        from trainmark.clicklog.spark.hadoop import Hadoop

        self.spark, self.files = spark, Hadoop(spark)
        self.days = self._find_days(patterns)
        raw = self.days[0].path.rpartition("/")[0]
        metadata = planted.known_auc(self.files.read_json(f"{raw}/{planted.MANIFEST}"))
        self.job = job_of(self.days, metadata)
        self.output = self.files.qualified(output)
        parent, _, name = self.output.rpartition("/")
        self.work = f"{parent}/.{name}.spark"
        self.seconds: dict[str, float] = {}

    def _find_days(self, patterns: Patterns) -> list[Any]:
        found: dict[str, Any] = {}
        for pattern in [each for given in listed(patterns) for each in expand_braces(given)]:
            days = self.files.glob(pattern)
            if not days:
                raise InputError(f"No file matches --input {pattern!r}.")
            found |= {day.path: day for day in days}
        days = list(found.values())
        raise_all(f"{_plain(day.path)} is empty." for day in days if day.num_bytes == 0)
        raise_all(
            f"{_plain(day.path)}: --engine spark reads plain and .gz files, not .zst."
            for day in days
            if day.name.endswith(".zst")
        )
        return sorted(days, key=lambda day: day_order(day.name))

    def run(self) -> dict[str, float]:
        if self._is_finished():
            print(f"{self.output} already holds this dataset; nothing to do.")
        else:
            self._build()
        summary.show(Path(_plain(self.output)), self.files.read_json(f"{self.output}/{MANIFEST}"))
        return self.seconds

    def _is_finished(self) -> bool:
        if not self.files.exists(self.output) or self.files.is_empty_folder(self.output):
            return False
        found = self.files.read_json(f"{self.output}/{MANIFEST}")
        files.check_settings(self.output, MANIFEST, found, self.job.settings)
        return True

    def _build(self) -> None:
        from trainmark.clicklog.spark.engine import SparkEngine

        self._agree_on_work()
        dataset = f"{self.work}/dataset"
        with tempfile.TemporaryDirectory() as here:
            engine = SparkEngine(self.spark, self.days, self.job, self.work, Path(here))
            self._phase("parse", lambda: self._check_lines(engine))
            self._phase("vocabulary", lambda: engine.distinct)
            self._phase("encode", engine.write_pieces)
            self._phase("finish", lambda: self._finish(engine, dataset))
        if self.files.exists(self.output):
            self.files.remove(self.output)  # an empty folder
        self.files.rename(dataset, self.output)
        self.files.remove(self.work)

    def _phase(self, name: str, run: Callable[[], Any]) -> None:
        started = time.perf_counter()
        run()
        self.seconds[name] = time.perf_counter() - started

    def _agree_on_work(self) -> None:
        """Continue the work of the same settings; refuse to touch that of others."""
        path = f"{self.work}/work.json"
        found = self.files.read_json(path)
        if found and (different := files.difference(found, self.job.settings)):
            raise InputError(
                f"{self.work} holds unfinished work with other settings ({different}). Run the "
                "earlier command again, or remove that folder."
            )
        self.files.write_json(path, self.job.settings)

    def _bad_rows(self, engine: Any) -> Iterator[BadRow]:
        for file, line, reason in engine.bad_lines():
            yield BadRow(_plain(self.days[file].path), line, reason)

    def _check_lines(self, engine: Any) -> None:
        bad = engine.bad_rows()
        if bad and self.job.source.bad_rows == "stop":
            stop_at(next(self._bad_rows(engine)))

    def _finish(self, engine: Any, dataset: str) -> None:
        """Everything that is not a column: written here, then copied."""
        engine.join_pieces(dataset)
        with tempfile.TemporaryDirectory() as temporary:
            here = Path(temporary)
            self._write_vocabulary(engine, here)
            bad = engine.bad_rows()
            if bad:
                with (here / BAD_ROWS).open("w") as report:
                    report.writelines(f"{row}\n" for row in self._bad_rows(engine))
            spec = feature_spec.default_spec(engine.cardinalities, NUM_NUMERICAL, self.job.metadata)
            split_binary.write_specs(here, spec)
            files.write_json(here / MANIFEST, self._manifest(engine, bad))
            for path in sorted(here.rglob("*")):
                if path.is_file():
                    target = f"{dataset}/{path.relative_to(here)}"
                    self.files.copy_from_local(str(path), target)

    def _write_vocabulary(self, engine: Any, here: Path) -> None:
        (here / VOCABULARY).mkdir()
        digests = []
        for number in range(len(NAMES)):
            path = here / VOCABULARY / f"cat_{number}.parquet"
            shutil.copyfile(engine.path_of(number), path)
            digests.append(identity.digest(path))
        rules, inputs = self.job.rules, self.job.source.inputs()
        facts = summary.vocabulary_facts(rules, NAMES, inputs, digests)
        files.write_json(here / VOCABULARY / "vocabulary.json", facts)

    def _manifest(self, engine: Any, bad: int) -> dict[str, Any]:
        (clicks, rare), missing = engine.clicks_and_rare(), engine.missing()
        features = {
            name: {
                "distinct": engine.distinct[number],
                "kept": engine.kept[number],
                "cardinality": engine.cardinalities[number],
                "missing": missing[number],
                "rare": rare[number],
            }
            for number, name in enumerate(NAMES)
        }
        columns = zip(self.job.source.schema.transformed, engine.numbers(), strict=True)
        return summary.manifest(
            settings=self.job.settings,
            splits=self.job.split.apply(engine.rows_per_file()),
            clicks=clicks,
            bad=bad,
            features=features,
            numerical={
                column.name: numbers.transformed_facts(column, facts) for column, facts in columns
            },
            metadata=self.job.metadata,
        )


def _plain(path: str) -> str:
    """A local path without its scheme."""
    return path.removeprefix("file://").removeprefix("file:")
