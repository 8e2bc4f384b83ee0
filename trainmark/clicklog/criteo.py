"""`trainmark prepare criteo`: raw Criteo days -> the dataset that `trainmark train` reads.

The recipes are described in recipes.py, the engine in the package's docstring. By default, all days
but the last train; the first half of the last day (rounded down) is the test split and the
rest the validation split. A single file, such as Kaggle's train.txt, counts as seven days: its last
seventh is the last day.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import tyro

from trainmark import files
from trainmark.clickdata import planted
from trainmark.clicklog import log_options
from trainmark.clicklog.engine.job import Job
from trainmark.clicklog.engine.splits import RANDOM
from trainmark.clicklog.inherit import Inherited
from trainmark.clicklog.log_options import LogOptions
from trainmark.clicklog.sources import remote
from trainmark.clicklog.sources.criteo_format import NAMES
from trainmark.clicklog.sources.criteo_text import CriteoSource
from trainmark.clicklog.sources.recipes import RECIPES, Name
from trainmark.errors import InputError, raise_all

DEFAULT: Name = "nvidia"


@dataclass(frozen=True, kw_only=True)
class Options(LogOptions):
    """Turn raw click logs in Criteo's format into a dataset for training."""

    recipe: Name | None = None
    """Whose rules to follow: NVIDIA's, TorchRec's of 2022, or those of the original dlrm. Default
    nvidia; with --vocabulary, that dataset's."""
    engine: Literal["embedded", "spark"] = "embedded"
    """What does the work: this process, or Spark (extra `spark`), with the same result. With Spark,
    input and output may be any Hadoop paths."""
    master: str | None = None
    """Where Spark runs: local[2], yarn, spark://host:7077, ...; default: as spark-submit or
    spark-defaults.conf say, else local[*]."""
    spark_conf: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """A setting for Spark, K=V; may be given several times."""


def prepare(options: Options) -> dict[str, float]:
    """Write the dataset, unless the folder already holds it; seconds of each phase."""
    if options.engine == "spark":
        return _prepare_on_spark(options)
    if options.master or options.spark_conf:
        raise InputError("--master and --spark-conf are for --engine spark.")
    return log_options.prepare(options, make_job(options))


def _prepare_on_spark(options: Options) -> dict[str, float]:
    from trainmark.clicklog.spark import job as spark

    raise_all(_unsupported_on_spark(options))

    def job_of(days: Sequence[Any], metadata: Mapping[str, Any]) -> Job:
        source = spark.HadoopDays(days, RECIPES[options.recipe or DEFAULT], options.bad_rows)
        return make_job(options, source, metadata)

    where = (options.master, options.spark_conf)
    return spark.prepare(options.input, str(options.output), job_of, *where)


def _unsupported_on_spark(options: Options) -> Iterator[str]:
    if options.to != "split_binary":
        yield "--engine spark writes split_binary; --to npy is for the embedded engine."
    if options.vocabulary is not None:
        yield "--engine spark builds its vocabularies; it does not take --vocabulary."
    if options.train or options.test or options.validation:
        yield "--engine spark divides --input; it does not take --train, --test and --validation."
    if options.holdout.startswith(RANDOM) or options.negative_rate is not None:
        yield "--engine spark takes neither --holdout random nor --negative-rate."
    if options.grow:
        yield "--engine spark builds its vocabularies; it does not take --grow."
    if options.memory is not None:
        yield (
            "--memory is for the embedded engine; Spark's is --spark-conf spark.driver.memory=... "
            "and spark.executor.memory=..."
        )


def make_job(
    options: Options, source: CriteoSource | None = None, metadata: Mapping[str, Any] | None = None
) -> Job:
    """What the options ask of an engine. Without a source, that is the local files they name."""
    old = _old(options)
    recipe = old.recipe if old else RECIPES[options.recipe or DEFAULT]
    of_splits = None
    if source is None:
        if not options.has_files:
            raise InputError("Give --input, or --train and --test.")
        paths, of_splits = log_options.find_files(options)
        source = CriteoSource(paths, recipe, options.bad_rows)
        if not remote.is_remote(str(paths[0])):
            metadata = planted.known_auc(files.read_json(paths[0].parent / planted.MANIFEST))
    job = log_options.make_job(options, source, recipe, old, of_splits, metadata=metadata)
    if recipe.name == "dlrm" and any(rule.threshold > 1 for rule in job.rules):
        raise InputError(
            "The recipe dlrm keeps all values; --frequency-threshold needs the recipe nvidia or "
            "torchrec."
        )
    return job


def _old(options: Options) -> Inherited | None:
    """The dataset of --vocabulary, which must be of Criteo's columns."""
    old = options.old()
    if old is None:
        return None
    if tuple(old.facts["columns"]) != NAMES:
        raise InputError(
            f"{old.name} has the columns {', '.join(old.facts['columns'])}, which are "
            "not those of Criteo's format. `trainmark prepare csv` and `parquet` take it."
        )
    if options.recipe not in (None, old.recipe.name):
        raise InputError(
            f"{old.name} was made by the recipe {old.recipe.name}, not {options.recipe}."
        )
    return old
