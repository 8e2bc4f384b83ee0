"""What the columns say of a row besides its features: --positive, --split-by and --group; and
those that are carried along as they are (--keep).

The column of --split-by or --group may be a feature, too, or not be named in --columns at all. It
is read as the feature is; a colon may say it otherwise: `--split-by day:number`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from trainmark.clicklog.sources.column_spec import READINGS, ColumnUse
from trainmark.errors import InputError, unknown

IS = "is"
"""The comparison of a label that has two values."""
ORDERS = ("iso", "number")
"""How a column that rows are ordered by is read: as times, or as numbers."""


@dataclass(frozen=True)
class RowColumns:
    """What is asked of the columns for each row."""

    positive: str | None = None
    """The value of the label that is a click; None: as --columns says."""
    split_by: str | None = None
    """The column that rows are ordered by."""
    group: str | None = None
    """The column whose values group rows."""
    keep: tuple[str, ...] = ()
    """The columns to carry along."""

    def settings(self) -> dict[str, Any]:
        """What of it a source has to tell of itself: the rest decides on splits."""
        told = {"positive": self.positive, "keep": list(self.keep) or None}
        return {key: value for key, value in told.items() if value is not None}

    def add_to(
        self, uses: Sequence[ColumnUse], columns: Sequence[str], source: str
    ) -> list[ColumnUse]:
        """The uses with what is asked here, the columns of rows behind all others."""
        for name in self.keep:
            if name not in columns:
                raise unknown(f"column of {source} for --keep", name, columns)
        found = [self._label(use) if use.role == "label" else use for use in uses]
        if self.split_by is not None:
            found.append(_use("--split-by", self.split_by, "order", ORDERS, uses, columns, source))
        if self.group is not None:
            readings = READINGS["categorical"]
            found.append(_use("--group", self.group, "group", readings, uses, columns, source))
        return found

    def _label(self, use: ColumnUse) -> ColumnUse:
        if self.positive is None:
            return use
        if use.comparison is not None and use.comparison[0] != IS:
            operator, value = use.comparison
            raise InputError(
                f"--positive is {self.positive!r}, but --columns says when {use.column} is a "
                f"click: label={use.column}{operator}{value}. Give one of the two."
            )
        return replace(use, comparison=(IS, self.positive))


NOTHING = RowColumns()


def names_column(text: str, columns: Sequence[str]) -> bool:
    """Whether the words of --split-by or --group name one of these columns."""
    return text in columns or text.rpartition(":")[0] in columns


def _use(
    flag: str,
    text: str,
    role: str,
    readings: Sequence[str],
    uses: Sequence[ColumnUse],
    columns: Sequence[str],
    source: str,
) -> ColumnUse:
    name, _, reading = text.rpartition(":")
    if text in columns:
        name, reading = text, ""
    elif name not in columns:
        raise unknown(f"column of {source} for {flag}", text, columns)
    elif reading not in readings:
        raise unknown(f"way to read {name} for {flag}", reading, readings)
    asked = reading or next((_as(role, use) for use in uses if use.column == name), None)
    return ColumnUse(name, role, asked)  # type: ignore[arg-type]


def _as(role: str, use: ColumnUse) -> str | None:
    """How to order or group by a column that is read for another purpose, too."""
    if role == "group":
        return use.reading if use.role == "categorical" else None
    numbers = use.role == "numerical" or use.reading in ("unix", "unix_ms", "int64", "uint64")
    return "number" if numbers or use.reading == "float64" else None
