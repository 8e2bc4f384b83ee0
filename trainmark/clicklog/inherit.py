"""What a preparation with --vocabulary takes over from the dataset that it names.

Everything that decides what an id or a number means: the columns by name, how each is read, its
threshold and its --max-rows, and the recipe. A flag that says something else is refused.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainmark import checksums, files
from trainmark.clickdata import identity, vocabulary_file
from trainmark.clicklog import per_column
from trainmark.clicklog.engine.job import VOCABULARY
from trainmark.clicklog.engine.summary import MANIFEST
from trainmark.clicklog.engine.vocabulary import Rules
from trainmark.clicklog.sources import column_spec
from trainmark.clicklog.sources.column_match import OldColumns
from trainmark.clicklog.sources.recipes import RECIPES, Recipe
from trainmark.errors import InputError


@dataclass(frozen=True)
class Inherited:
    """An earlier preparation."""

    name: str
    """As the user gave it."""
    vocabularies: Path
    """The folder of its vocabularies."""
    facts: Mapping[str, Any]
    """vocabulary.json."""
    settings: Mapping[str, Any]
    """Of prepare.json."""

    @property
    def recipe(self) -> Recipe:
        return RECIPES[self.facts["recipe"]]

    @property
    def is_criteo(self) -> bool:
        """Whether it is of Criteo's format, which has a recipe; other columns have --columns."""
        return "recipe" in self.settings

    def columns(self) -> OldColumns:
        """How its columns were read."""
        if self.is_criteo:
            raise InputError(
                f"{self.name} is of Criteo's format, which `trainmark prepare criteo` reads."
            )
        inputs = self.facts.get("inputs", {})
        if not inputs.get("label"):
            raise InputError(f"{self.name}: vocabulary.json does not say how its label is read.")
        label, *features = column_spec.from_inputs([inputs["label"], *inputs["columns"]])
        return OldColumns(self.name, label, tuple(features))

    @property
    def delimiter(self) -> str:
        """What separates the fields of its files; a comma, if they were no text."""
        return str(self.settings.get("delimiter", ","))

    @property
    def header(self) -> bool:
        """Whether its files start with the names of the columns."""
        return bool(self.settings.get("header", True))

    def missing(self, given: Sequence[str] = ()) -> Sequence[str]:
        """What stands for a missing value in its files. --missing must say the same."""
        if "delimiter" not in self.settings:  # Parquet files know what is missing
            return given
        there = [sign for sign in self.facts["inputs"]["missing"] if sign]
        if given and set(given) != set(there):
            raise InputError(
                f"--missing is {' '.join(given)}, but {self.name} was prepared with "
                f"{' '.join(there) or 'none'}. Leave the flag out."
            )
        return there

    def rules(
        self,
        names: Sequence[str],
        frequency_threshold: str | None = None,
        max_rows: str | None = None,
    ) -> list[Rules]:
        """Of its columns. The flags, where they are given, must say the same."""
        self._agree(names, "--frequency-threshold", frequency_threshold, "threshold")
        self._agree(names, "--max-rows", max_rows, "max_rows", minimum=1)
        return [
            Rules(recipe=self.recipe, threshold=rule["threshold"], max_rows=rule["max_rows"])
            for rule in (self.facts["columns"][name] for name in names)
        ]

    def _agree(
        self, names: Sequence[str], flag: str, text: str | None, key: str, minimum: int = 0
    ) -> None:
        given = per_column.parse(text, flag, len(names), minimum, names)
        for name, value in zip(names, given, strict=True):
            there = self.facts["columns"][name][key]
            if value not in (None, there):
                raise InputError(
                    f"{flag} is {value} for {name}, but the ids of {self.name} were "
                    f"made with {'none' if there is None else there}. Leave the flag out."
                )


def open_dataset(path: Path) -> Inherited:
    """A dataset that `prepare` wrote, by its folder or its folder `vocabulary`."""
    for vocabularies in (path, path / VOCABULARY):
        facts = vocabulary_file.read(vocabularies)
        if facts:
            break
    else:
        raise InputError(
            f"{path}: there is no vocabulary.json. Expected a dataset that "
            "`trainmark prepare` wrote, or its folder `vocabulary`."
        )
    if facts["recipe"] not in RECIPES:
        raise InputError(f"{vocabularies / 'vocabulary.json'} is not what `prepare` writes.")
    for name in identity.categorical_readings(facts.get("inputs", {}).get("columns", [])):
        if name not in facts["columns"]:
            raise InputError(f"{vocabularies / 'vocabulary.json'} lacks its column {name}.")
    vocabularies = vocabularies.absolute()
    of_columns = {name: f"cat_{number}.parquet" for number, name in enumerate(facts["columns"])}
    for name, file in of_columns.items():
        if not (vocabularies / file).is_file():
            raise InputError(f"{path}: the vocabulary of its column {name} is gone.")
    dataset = vocabularies.parent
    checksums.check(dataset, [f"{vocabularies.name}/{file}" for file in of_columns.values()])
    settings = files.read_json(dataset / MANIFEST).get("settings", {})
    if not isinstance(settings, Mapping):
        raise InputError(f"{dataset / MANIFEST} is not what `prepare` writes.")
    return Inherited(str(path), vocabularies, facts, settings)
