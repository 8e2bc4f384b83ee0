"""The report of a finished preparation: prepare.json, and tables on the terminal."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainmark.clicklog.engine.splits import RowSet
from trainmark.clicklog.engine.vocabulary import Rules
from trainmark.clicklog.sources import lists
from trainmark.errors import InputError
from trainmark.files import read_json
from trainmark.formatting import readable_size
from trainmark.progress import SafeConsole

MANIFEST = "prepare.json"
SCHEMA = "trainmark.prepare/1"
EMBEDDING_DIM = 128
"""That of the published runs."""
AUTO_DIM = 16
"""That of dlrm-auto, which a log of one's own is trained with."""
RARE_SHARE = 0.1
"""Of a column's rows: more than this many with the id of rare values are worth a warning."""
DAYS_OF_WEEK = 7
MAX_NAMED = 5
"""Columns in a warning."""
LOSSES = {
    "cut_off": "cut off (beyond float32, or beyond all training rows)",
    "became_zero": "became 0",
    "lost_digits": "lost digits (float32 keeps seven)",
}
"""What a transform loses of numbers: in prepare.json, and in words."""


def manifest(
    *,
    settings: Mapping[str, Any],
    splits: Sequence[RowSet],
    clicks: Mapping[str, int],
    bad: int,
    features: Mapping[str, Mapping[str, Any]],
    numerical: Mapping[str, Mapping[str, Any]] | None = None,
    metadata: Mapping[str, Any],
) -> dict[str, Any]:
    """The content of prepare.json. No times: the same input gives the same bytes.

    Args:
        features: facts of the categorical features.
        numerical: of the numerical columns.
    """
    rows = sum(split.rows for split in splits)
    cardinalities = [feature["cardinality"] for feature in features.values()]
    table_rows = sum(cardinalities)
    return {
        "schema": SCHEMA,
        "settings": settings,
        "rows": {split.name: split.rows for split in splits if split.rows},
        "bad_rows": bad,
        "click_rate": {
            split.name: clicks[split.name] / split.rows for split in splits if split.rows
        },
        "cardinalities": cardinalities,
        "features": {
            name: {
                "distinct": feature["distinct"],
                "kept": feature["kept"],
                "cardinality": feature["cardinality"],
                "missing_share": feature["missing"] / rows,
                "rare_rows": feature["rare"],
                "rare_share": feature["rare"] / rows,
                **({"new_ids": feature["grown"]["new_ids"]} if "grown" in feature else {}),
                **{key: feature[key] for key in ("most", "longest", "limit") if key in feature},
            }
            for name, feature in features.items()
        },
        **({"numerical": numerical} if numerical else {}),
        "model": {
            "embedding_dim": EMBEDDING_DIM,
            "table_rows": table_rows,
            "parameters": table_rows * EMBEDDING_DIM,
            "fp32_bytes": table_rows * EMBEDDING_DIM * 4,
        },
        **metadata,
    }


def vocabulary_facts(
    rules: Sequence[Rules],
    names: Sequence[str],
    inputs: Mapping[str, Any] | None,
    digests: Sequence[str],
    extends: Mapping[str, Sequence[Mapping[str, Any]]] | None = None,
) -> dict[str, Any]:
    """What one must know besides the files to encode new data in the same way.

    Args:
        inputs: how the columns were read, where the format does not say it.
        digests, extends: of the vocabularies, see `clickdata.identity`.
    """
    return {
        "schema": "trainmark.vocabulary/1",
        "recipe": rules[0].recipe.name if rules else "nvidia",  # without ids, all are alike
        "columns": {
            name: {
                "threshold": rule.threshold,
                "max_rows": rule.max_rows,
                "rare_id": rule.rare_id,
                "digest": digest,
                **({"extends": extends[name]} if extends and extends[name] else {}),
            }
            for name, rule, digest in zip(names, rules, digests, strict=True)
        },
        **({} if inputs is None else {"inputs": inputs}),
    }


def with_lists(inputs: dict[str, Any], features: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """How columns were read, where those of lists have as many values as are stored of a row."""

    def of_column(use: Mapping[str, Any]) -> Mapping[str, Any]:
        feature = features.get(use["column"], {})
        reading = lists.parse(use.get("reading")) if "most" in feature else None
        return {**use, "reading": str(replace(reading, most=feature["most"]))} if reading else use

    return {**inputs, "columns": [of_column(use) for use in inputs["columns"]]}


def rare_shares(manifest: Path) -> dict[str, float]:
    """The share of rare values in each column, where preparation recorded it."""
    try:
        features: Any = read_json(manifest).get("features") if manifest.is_file() else None
    except (InputError, OSError):  # written by something else
        return {}
    shares = {
        name: feature.get("rare_share")
        for name, feature in (features.items() if isinstance(features, dict) else ())
        if isinstance(feature, dict)
    }
    return {
        name: share
        for name, share in shares.items()
        if isinstance(share, float) and math.isfinite(share)
    }


def rare_warning(shares: Mapping[str, float]) -> str | None:
    """A sentence on the columns of which rare values have too large a share; None if none has."""
    many = {name: share for name, share in shares.items() if share > RARE_SHARE}
    if not many:
        return None
    columns = "1 column" if len(many) == 1 else f"{len(many)} columns"
    whole = " Leave out a column that only numbers the rows." if max(many.values()) == 1 else ""
    return (
        f"The id of rare values has more than {RARE_SHARE:.0%} of the rows in {columns}: "
        f"{_named(many)}. Values of training rows get ids by a lower --frequency-threshold, those "
        "of held-out rows alone do not; with --vocabulary, take one that knows these values."
        f"{whole}"
    )


def unknown_warning(shares: Mapping[str, float], before: Mapping[str, float]) -> str | None:
    """A sentence on columns of new rows that a model knows far less of than of those before."""
    many = {n: share for n, share in shares.items() if share > before.get(n, 0.0) + RARE_SHARE}
    if not many:
        return None
    return (
        f"The model does not know many values of {_named(many)}. New ones are scored as rare ones; "
        "but check that the column is written as in its own log (7 and 7.0 are two texts)."
    )


def list_warning(name: str, feature: Mapping[str, Any]) -> str | None:
    """A sentence on a column of lists with far more room, or other separators, than its rows have;
    of other columns, None."""
    longest = feature.get("longest", 0)
    most = feature.get("limit", feature.get("most", 0))
    if longest == 1 < most:
        return (
            f"No row of {name} has more than one value. If its lists are texts, say what is "
            f"between their values, such as {name}:string[{most};] for semicolons; brackets and "
            "quotation marks would be part of the values."
        )
    if "limit" not in feature and most > 2 * longest > 0:
        return (
            f"Every row of {name} has room for {most:,} values; the longest list has {longest:,}. "
            f"[{longest}] behind its kind, in --columns, takes less."
        )
    return None


def weekday_warning(name: str, kept: int, names: Collection[str]) -> str | None:
    """A sentence on a timestamp's days of the week, where the training rows lack some."""
    column, _, part = name.rpartition(".")
    if part != "weekday" or f"{column}.hour" not in names or kept >= DAYS_OF_WEEK:
        return None
    return (
        f"The training rows have {kept} of the {DAYS_OF_WEEK} days of the week in {name}. If they "
        "are of less than a week, it tells days apart that do not come again, and later days are "
        f"scored worse. Prepare more days, or leave timestamp={column} out and give the hour as a "
        "categorical column."
    )


def _named(shares: Mapping[str, float]) -> str:
    """Columns with their shares, the largest first."""
    names = sorted(shares, key=lambda name: -shares[name])
    others = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return ", ".join(f"{name} ({shares[name]:.0%})" for name in names[:MAX_NAMED]) + others


def show_splits(output: Path, facts: Mapping[str, Any]) -> None:
    """Print the table of splits."""
    from rich.table import Table

    splits = Table("split", "rows", "click rate", title=str(output))
    for name, rows in facts["rows"].items():
        splits.add_row(name, f"{rows:,}", f"{facts['click_rate'][name]:.4f}")
    SafeConsole().print(splits)
    if "negative_rate" in facts:
        print(
            f"Of the training rows without a click, {facts['negative_rate']:.4g} of all are kept; "
            "scores of a model are corrected for it."
        )
    train = facts["rows"].get("train", 0)
    held_out = sum(facts["rows"].values()) - train
    if held_out > train and "negative_rate" not in facts:
        warn(
            f"{held_out:,} rows are held out, more than the {train:,} to train on. --holdout 0.2 "
            "would hold out a fifth of all rows."
        )
    for name, rate in facts["click_rate"].items():
        if rate in (0, 1):
            which = "no row" if rate == 0 else "every row"
            print(f"In {name} {which} is a click, so AUC is undefined there. Is the label right?")


def warn(sentence: str) -> None:
    """Print a warning."""
    line = f"Warning: {sentence}"
    SafeConsole().print(line, style="yellow", markup=False, highlight=False, soft_wrap=True)


def show(output: Path, facts: Mapping[str, Any]) -> None:
    """Print the tables."""
    from rich.table import Table

    console = SafeConsole()
    show_splits(output, facts)
    _show_numerical(console, facts.get("numerical", {}))
    features = Table("feature", "distinct", "kept", "table rows", "missing", "rare")
    for name, feature in facts["features"].items():
        counts = (f"{feature[key]:,}" for key in ("distinct", "kept", "cardinality"))
        rare = f"{feature['rare_rows']:,} ({feature['rare_share']:.1%})"
        features.add_row(name, *counts, f"{feature['missing_share']:.1%}", rare)
    console.print(features)
    model = facts["model"]
    console.print(
        f"{_tables(len(facts['cardinalities']))}, {model['table_rows']:,} rows together: "
        f"{readable_size(model['table_rows'] * AUTO_DIM * 4)} in fp32 at dimension {AUTO_DIM} "
        f"(dlrm-auto), {readable_size(model['fp32_bytes'])} at {model['embedding_dim']}",
        soft_wrap=True,
    )
    new = {name: feature.get("new_ids") for name, feature in facts["features"].items()}
    if any(count is not None for count in new.values()):
        named = ", ".join(f"{name} {count:,}" for name, count in new.items() if count)
        console.print(f"new ids behind the old ones: {named or 'none'}", soft_wrap=True)
    if facts["bad_rows"]:
        rows = "1 bad row" if facts["bad_rows"] == 1 else f"{facts['bad_rows']:,} bad rows"
        console.print(f"{rows}, listed in {output / 'bad_rows.txt'}")
    shares = {name: feature["rare_share"] for name, feature in facts["features"].items()}
    if warning := rare_warning(shares):
        warn(warning)
    # With --vocabulary, the earlier dataset has decided what columns are.
    is_new = not facts["settings"].get("vocabulary")
    for name, feature in facts["features"].items() if is_new else ():
        if sentence := list_warning(name, feature):
            warn(sentence)
        if sentence := weekday_warning(name, feature["kept"], facts["features"]):
            warn(sentence)
    if "best_auc" in facts:
        console.print(f"best possible AUC on the last day: {facts['best_auc']:.4f}")


def _show_numerical(console: Any, columns: Mapping[str, Mapping[str, Any]]) -> None:
    """What the numerical columns are, what they are read as, and what that loses."""
    from rich.table import Table

    if not columns:
        return
    table = Table("number", "read as", "missing", "minimum", "median", "maximum")
    for name, column in columns.items():
        ends = (_short(column[key]) for key in ("minimum", "median", "maximum"))
        table.add_row(name, column["reading"], f"{column['missing']:,}", *ends)
    console.print(table)
    for name, column in columns.items():
        lost = [f"{column[key]:,} {words}" for key, words in LOSSES.items() if column[key]]
        if lost:
            console.print(f"{name}: {', '.join(lost)}", markup=False, soft_wrap=True)


def _short(number: float | None) -> str:
    return "-" if number is None else f"{number:,.6g}"


def _tables(count: int) -> str:
    return "1 table" if count == 1 else f"{count} tables"
