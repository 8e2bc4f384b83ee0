"""`trainmark prepare criteo`: raw Criteo days -> the dataset that `trainmark train` reads.

The recipes are described in recipes.py, the engine in the package's docstring. By default, all days
but the last train; the first half of the last day (rounded down) is the test split and the
rest the validation split. A single file, such as Kaggle's train.txt, counts as seven days: its last
seventh is the last day.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro

from trainmark import files
from trainmark.clickdata import planted
from trainmark.clicklog import inherit, per_column, split_options, to_npy
from trainmark.clicklog.engine import phases as engine
from trainmark.clicklog.engine import summary
from trainmark.clicklog.engine.job import Job
from trainmark.clicklog.engine.limits import Limits
from trainmark.clicklog.engine.splits import RANDOM
from trainmark.clicklog.engine.summary import MANIFEST
from trainmark.clicklog.engine.vocabulary import Rules
from trainmark.clicklog.inherit import Inherited
from trainmark.clicklog.sources import remote
from trainmark.clicklog.sources.criteo_format import NAMES
from trainmark.clicklog.sources.criteo_text import CriteoSource
from trainmark.clicklog.sources.recipes import RECIPES, Name, Recipe
from trainmark.clicklog.sources.source import BadRows
from trainmark.clicklog.split_options import SplitOptions
from trainmark.errors import InputError, raise_all

DEFAULT: Name = "nvidia"


@dataclass(frozen=True, kw_only=True)
class Options(SplitOptions):
    """Turn raw click logs in Criteo's format into a dataset for training."""

    output: str | Path
    """Folder to write; it appears when everything is written."""
    frequency_threshold: str | None = None
    """Categorical values seen less often are rare and share an id; 0 keeps all. For single columns:
    15,C20=3. Default: 15 for nvidia (published: 15, 3 and 0), else 0."""
    recipe: Name | None = None
    """Whose rules to follow: NVIDIA's, TorchRec's of 2022, or those of the original dlrm. Default
    nvidia; with --vocabulary, that dataset's."""
    max_rows: str | None = None
    """Fold ids into this many per column by modulo; for single columns: 40000000,C20=1000."""
    vocabulary_from: Literal["all", "train"] = "all"
    """Count values in all days, as published, or in the training days only."""
    vocabulary: Path | None = None
    """A dataset prepared earlier, whose vocabularies to use instead of counting, with their recipe,
    thresholds and --max-rows."""
    grow: bool = False
    """With --vocabulary: values that it does not know, and that occur often enough, get ids behind
    the old ones, so that a model can learn on from it (train --from)."""
    bad_rows: BadRows = "stop"
    """Lines that break the format: stop at the first, skip them, or keep them with the bad fields
    as missing. Skipped and kept ones are listed in bad_rows.txt."""
    seed: int = 0
    """Seed of the training rows' random order, and of what else is drawn at random."""
    memory: str | None = None
    """Peak memory, such as 1G; default a quarter of the machine. Does not change the result."""
    to: Literal["split_binary", "npy"] = "split_binary"
    """npy: TorchRec's day_N_{dense,sparse,labels}.npy too, in the folder npy of the output."""
    engine: Literal["embedded", "spark"] = "embedded"
    """What does the work: this process, or Spark (extra `spark`), with the same result. With Spark,
    input and output may be any Hadoop paths."""
    master: str | None = None
    """Where Spark runs: local[2], yarn, spark://host:7077, ...; default local[*]."""
    spark_conf: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """A setting for Spark, K=V; may be given several times."""


def prepare(options: Options) -> dict[str, float]:
    """Write the dataset, unless the folder already holds it; seconds of each phase."""
    if options.engine == "spark":
        return _prepare_on_spark(options)
    if options.master or options.spark_conf:
        raise InputError("--master and --spark-conf are for --engine spark.")
    job = make_job(options)
    check = to_npy.check_halves if options.to == "npy" else None
    seconds = engine.prepare(job, Limits.of(options.memory), check)
    summary.show(job.output, files.read_json(job.output / MANIFEST))
    if options.to == "npy":
        to_npy.write(job.output, days=max(len(job.source.files), 2))
    return seconds


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
    flags = (options.frequency_threshold, options.max_rows)
    rules = _rules(options, recipe) if old is None else old.rules(NAMES, *flags)
    of_splits = None
    if source is None:
        if not options.has_files:
            raise InputError("Give --input, or --train and --test.")
        paths, of_splits = split_options.find_files(options, options.bad_rows)
        source = CriteoSource(paths, recipe, options.bad_rows)
        if not remote.is_remote(str(paths[0])):
            metadata = planted.known_auc(files.read_json(paths[0].parent / planted.MANIFEST))
    split = split_options.split_rule(
        options, of_splits, test_half=recipe.test_half, rounds_up=recipe.rounds_up
    )
    return Job(
        source=source,
        output=Path(options.output),
        rules=rules,
        split=split,
        seed=options.seed,
        bad_rows=options.bad_rows,
        vocabulary_from=options.vocabulary_from,
        vocabulary=old.vocabularies if old else None,
        grow=options.grow,
        metadata=metadata or {},
    )


def _rules(options: Options, recipe: Recipe) -> list[Rules]:
    flag = "--frequency-threshold"
    thresholds = [
        recipe.threshold if threshold is None else threshold
        for threshold in per_column.parse(options.frequency_threshold, flag, len(NAMES))
    ]
    max_rows = per_column.parse(options.max_rows, "--max-rows", len(NAMES), minimum=1)
    if recipe.name == "dlrm" and any(threshold > 1 for threshold in thresholds):
        raise InputError(
            "The recipe dlrm keeps all values; --frequency-threshold needs the recipe nvidia or "
            "torchrec."
        )
    return [
        Rules(recipe=recipe, threshold=threshold, max_rows=cap)
        for threshold, cap in zip(thresholds, max_rows, strict=True)
    ]


def _old(options: Options) -> Inherited | None:
    """The dataset of --vocabulary, which must be of Criteo's columns."""
    if options.vocabulary is None:
        return None
    old = inherit.open_dataset(options.vocabulary)
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
