"""Which columns of a table's files are read, and as what: as --columns says, or, with --vocabulary,
as an earlier dataset read them, found by name. Besides: --positive, --split-by, --group, --keep."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any

from trainmark.clicklog.sources import column_spec, lists, number_readings
from trainmark.clicklog.sources.column_spec import IS, READINGS, ColumnUse, RowRole
from trainmark.clicklog.sources.rows import Schema
from trainmark.errors import InputError, listed, raise_all, unknown

ORDERS = ("iso", "number")
"""How a column that rows are ordered by is read: as times, or as numbers."""


@dataclass(frozen=True)
class OldColumns:
    """How an earlier dataset read its columns."""

    dataset: str
    """Its name, for messages."""
    label: ColumnUse | None
    """None: it is not to be read."""
    features: tuple[ColumnUse, ...]
    """In the order of its tables and numbers."""


@dataclass(frozen=True, kw_only=True)
class AskedColumns:
    """What is asked of the columns of a table's files."""

    text: str | None = None
    """--columns (column_spec.py). Where there is an `old` dataset, it must say the same of all
    columns but the label; None: as they were."""
    numerical: str = number_readings.AUTO
    """How to read the numbers of which `text` does not say it."""
    old: OldColumns | None = None
    """Columns to be found by name, and read in this order."""
    positive: str | None = None
    """The value of the label that is a click; None: as --columns says."""
    split_by: str | None = None
    """The column that rows are ordered by."""
    group: str | None = None
    """The column whose values group rows."""
    keep: tuple[str, ...] = ()
    """The columns to carry along as they are."""

    def uses(self, columns: Sequence[str], source: str) -> list[ColumnUse]:
        """What becomes of the columns of a file, those of rows behind all others; both as for
        `column_spec.parse`."""
        uses = self._features_and_label(columns, source)
        for name in self.keep:
            if name not in columns:
                raise unknown(f"column of {source} for --keep", name, columns)
        found = [self._positive(use) if use.role == "label" else use for use in uses]
        if self.split_by is not None:
            found.append(_of_rows("--split-by", self.split_by, "order", uses, columns, source))
        if self.group is not None:
            found.append(_of_rows("--group", self.group, "group", uses, columns, source))
        return found

    def read(self, uses: Iterable[ColumnUse]) -> list[str]:
        """The names of the columns to read, each once."""
        return list(dict.fromkeys([*(use.column for use in uses), *self.keep]))

    def settings(self, schema: Schema) -> dict[str, Any]:
        """What of it a source has to tell of itself, whose columns are those of `schema`; the rest
        decides on splits."""
        told = {
            "numerical": self.numerical if schema.numbers else None,
            "positive": self.positive,
            "keep": list(self.keep) or None,
        }
        given = {key: value for key, value in told.items() if value is not None}
        return {"columns": self.text, **given}

    def _features_and_label(self, columns: Sequence[str], source: str) -> list[ColumnUse]:
        given = None if self.text is None else column_spec.parse(self.text, columns, source)
        old = self.old
        if old is None:
            if given is None:
                raise InputError(
                    f"{source} has the columns {listed(columns)}. Say with --columns what those "
                    "to be read are, such as 'label=clicked numerical=age,price "
                    "categorical=user,city timestamp=seen_at'."
                )
            return given
        label = old.label if given is None else next(use for use in given if use.role == "label")
        wanted = [*([label] if label else []), *old.features]
        raise_all(_absent(wanted, columns, source, old.dataset))
        if given is not None:
            raise_all(_contradictions([use for use in given if use != label], old))
        return wanted

    def _positive(self, use: ColumnUse) -> ColumnUse:
        """The label, with what is asked of it."""
        if self.positive is None:
            return use
        if use.comparison is not None and use.comparison[0] != IS:
            operator, value = use.comparison
            raise InputError(
                f"--positive is {self.positive!r}, but --columns says when {use.column} is a "
                f"click: label={use.column}{operator}{value}. Give one of the two."
            )
        return replace(use, comparison=(IS, self.positive))


def _absent(
    wanted: Sequence[ColumnUse], columns: Sequence[str], source: str, dataset: str
) -> Iterator[str]:
    others = set(columns) - {use.column for use in wanted}
    for use in wanted:
        if use.column not in columns:
            near = get_close_matches(use.column, others, n=1, cutoff=0.5)
            hint = f" (did it become {near[0]!r}?)" if near else ""
            yield f"{source} has no column {use.column!r}, which {dataset} has as {use.role}{hint}."


def _contradictions(given: Sequence[ColumnUse], old: OldColumns) -> Iterator[str]:
    """Sentences on what --columns says otherwise than the dataset of --vocabulary."""
    named = {use.column: use for use in given}
    known = {use.column: use for use in old.features}
    for name in [name for name in known if name not in named]:
        yield (
            f"--columns leaves out {name!r}, which {old.dataset} has as {known[name].role}; with "
            "--vocabulary no --columns are needed."
        )
    for name, use in named.items():
        if name not in known:
            yield (
                f"--columns names {name!r}, which {old.dataset} does not have: only a dataset "
                "without --vocabulary can have a new column."
            )
        elif use.role != known[name].role:
            yield (
                f"--columns has {name!r} as {use.role}; in {old.dataset} it is {known[name].role}."
            )
        elif not _agree(use.reading, known[name].reading):
            yield (
                f"--columns reads {name!r} as {use.reading}; {old.dataset} has it as "
                f"{known[name].reading}, which its ids and numbers follow."
            )


def _agree(given: str | None, known: str | None) -> bool:
    """Whether --columns, which may leave it open, reads a column as it was."""
    if given == lists.WORD and (of_list := lists.parse(known)):
        return of_list.separator == lists.SEPARATOR
    return given in (None, number_readings.AUTO, known)


# --- columns of rows: each may be a feature, too, or not be named in --columns at all


def names_column(text: str, columns: Sequence[str]) -> bool:
    """Whether the words of --split-by or --group name one of these columns."""
    return text in columns or text.rpartition(":")[0] in columns


def _of_rows(
    flag: str,
    text: str,
    role: RowRole,
    uses: Sequence[ColumnUse],
    columns: Sequence[str],
    source: str,
) -> ColumnUse:
    """It is read as the feature is; a colon may say it otherwise: `--split-by day:number`."""
    readings = ORDERS if role == "order" else READINGS["categorical"]
    name, _, reading = text.rpartition(":")
    if text in columns:
        name, reading = text, ""
    elif name not in columns:
        raise unknown(f"column of {source} for {flag}", text, columns)
    elif reading not in readings:
        raise unknown(f"way to read {name} for {flag}", reading, readings)
    asked = reading or next((_as(role, use) for use in uses if use.column == name), None)
    return ColumnUse(name, role, asked)


def _as(role: RowRole, use: ColumnUse) -> str | None:
    """How to order or group by a column that is read for another purpose, too."""
    if role == "group":
        return use.reading if use.role == "categorical" else None
    numbers = use.role == "numerical" or use.reading in ("unix", "unix_ms", "int64", "uint64")
    return "number" if numbers or use.reading == "float64" else None
