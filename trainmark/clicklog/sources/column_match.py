"""Which columns of a table's files are read, and as what: as --columns says, or, with --vocabulary,
as an earlier dataset read them, found by name."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from trainmark.clicklog.sources import column_spec, number_readings
from trainmark.clicklog.sources.column_spec import ColumnUse
from trainmark.clicklog.sources.row_columns import NOTHING, RowColumns
from trainmark.clicklog.sources.rows import Schema
from trainmark.errors import InputError, listed, raise_all


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
    of_rows: RowColumns = NOTHING

    def uses(self, columns: Sequence[str], source: str) -> list[ColumnUse]:
        """What becomes of the columns of a file; both as for `column_spec.parse`."""
        return self.of_rows.add_to(_uses(self.text, columns, source, self.old), columns, source)

    def read(self, uses: Iterable[ColumnUse]) -> list[str]:
        """The names of the columns to read, each once."""
        return list(dict.fromkeys([*(use.column for use in uses), *self.of_rows.keep]))

    def settings(self, schema: Schema) -> dict[str, Any]:
        """What of it a source has to tell of itself, whose columns are those of `schema`."""
        numerical = {"numerical": self.numerical} if schema.numbers else {}
        return {"columns": self.text, **numerical, **self.of_rows.settings()}


def _uses(
    text: str | None, columns: Sequence[str], source: str, old: OldColumns | None
) -> list[ColumnUse]:
    given = None if text is None else column_spec.parse(text, columns, source)
    if old is None:
        if given is None:
            raise InputError(
                f"{source} has the columns {listed(columns)}. Say with --columns what those to "
                "be read are, such as 'label=clicked numerical=age,price categorical=user,city "
                "timestamp=seen_at'."
            )
        return given
    label = old.label if given is None else next(use for use in given if use.role == "label")
    wanted = [*([label] if label else []), *old.features]
    raise_all(_absent(wanted, columns, source, old.dataset))
    if given is not None:
        raise_all(_contradictions([use for use in given if use != label], old))
    return wanted


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
        elif use.reading not in (None, number_readings.AUTO, known[name].reading):
            yield (
                f"--columns reads {name!r} as {use.reading}; {old.dataset} has it as "
                f"{known[name].reading}, which its ids and numbers follow."
            )
