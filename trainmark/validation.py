"""Checks everything that comes from outside: TOML, JSON, YAML and flags."""

import copy
import dataclasses
import functools
import json
import math
import tomllib
from collections.abc import Callable
from pathlib import Path
from reprlib import Repr
from typing import Any, TypeVar

from trainmark.errors import InputError

T = TypeVar("T")


def parse(kind: type[T], data: Any, source: str) -> T:
    """Build a `kind` (a dataclass) from plain `data`, or say everything that is wrong with it.

    Args:
        kind: the dataclass. Give it `__pydantic_config__ = {"extra": "forbid"}` to refuse
            unknown keys.
        data: dictionaries, lists and scalars as a parser returned them.
        source: where the data came from, for the message (a path).
    """
    from pydantic import ValidationError

    try:
        parsed: T = _validator(kind)(data)
        return parsed
    except ValidationError as error:
        raise InputError(f"{source}: {'; '.join(_sentences(error.errors()))}.") from None


def _validator(kind: Any) -> Callable[[Any], Any]:
    return _made_validator(kind)  # mypy takes no type for hashable: `Any` is


@functools.cache  # making one takes a hundred times as long as using it
def _made_validator(kind: Any) -> Callable[[Any], Any]:
    from pydantic import TypeAdapter

    return TypeAdapter(kind).validate_python


def read_mapping(path: Path, what: str = "Configuration file") -> dict[str, Any]:
    """The content of a TOML or JSON file. `what` names the file in messages."""
    try:
        text = path.read_text(encoding="utf-8")
        data = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except FileNotFoundError:
        raise InputError(f"{what} {path} does not exist.") from None
    except (OSError, ValueError, RecursionError) as error:  # the parsers' errors are ValueErrors
        raise InputError(f"{what} {path} cannot be read: {error}.") from None
    if not isinstance(data, dict):
        raise InputError(f"{what} {path} must hold a table of fields.")
    return data


def problems(value: Any) -> list[str]:
    """What is wrong with a dataclass that was made from flags, a sentence each."""
    from pydantic import ValidationError

    try:
        _validator(type(value))(dataclasses.asdict(value))
    except ValidationError as error:
        return [f"{sentence}." for sentence in _sentences(error.errors())]
    return []


def load_yaml(text: bytes) -> Any:
    """Plain data from YAML; refuses aliases that stand for far more values than the text has."""
    return copy.deepcopy(_parsed_yaml(text))


@functools.lru_cache(maxsize=4)
def _parsed_yaml(text: bytes) -> Any:
    """Kept, because a verb reads a dataset's specification several times, a tenth of a second
    each."""
    import yaml

    loader = yaml.SafeLoader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        if (values := _expanded(node, {})) > MAX_YAML_VALUES:
            raise ValueError(f"its aliases stand for {values:.2g} values")
        return loader.construct_document(node)
    finally:
        loader.dispose()


MAX_YAML_VALUES = 1_000_000


def _expanded(node: Any, known: dict[int, float]) -> float:
    """How many nodes a tree has once every alias is replaced by what it stands for."""
    if isinstance(node.value, str):
        return 1
    if id(node) not in known:
        known[id(node)] = math.inf  # for an alias inside itself
        parts = [part for item in node.value for part in (item if type(item) is tuple else [item])]
        known[id(node)] = 1 + sum(_expanded(part, known) for part in parts)
    return known[id(node)]


# --- sentences

_OF_PYDANTIC = ("constrained-", "[key]")  # parts of a place that no file has
_BOUNDS = {
    "greater_than_equal": ("ge", "at least"),
    "greater_than": ("gt", "above"),
    "less_than_equal": ("le", "at most"),
    "less_than": ("lt", "below"),
}


def _sentences(errors: list[Any]) -> list[str]:
    return [_sentence(problem) for problem in errors if not _is_of_another_kind(problem)]


def _is_of_another_kind(problem: Any) -> bool:
    """Whether pydantic complains that a word is no number, or that a number is no such word."""
    kind, is_number = str(problem["loc"][-1:]), isinstance(problem["input"], int | float)
    return "literal[" in kind if is_number else "float" in kind


def _sentence(problem: Any) -> str:
    parts = [str(part) for part in problem["loc"] if not str(part).startswith(_OF_PYDANTIC)]
    where = ".".join(parts) or "top level"
    message = problem["msg"]
    if problem["type"] in ("missing", "missing_argument"):
        return f"{where} is missing"
    if problem["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        return f"{where} is not a known key"
    if problem["type"] == "dataclass_type":
        return f"{where} must be a table of fields. Received: {_short(problem['input'])}"
    if problem["type"] in _BOUNDS:
        name, words = _BOUNDS[problem["type"]]
        bound = problem["ctx"][name]
        wanted = f"{words} {int(bound):,}" if math.isfinite(bound) else "a finite number"
        return f"{where} must be {wanted}. Received: {problem['input']}"
    return f"{where}: {message[0].lower()}{message[1:]} (received {_short(problem['input'])})"


def _short(value: Any) -> str:
    """The beginning of `repr(value)`; the whole may be far longer than the file it came from."""
    limited = Repr()
    limited.maxlevel, limited.maxdict, limited.maxlist, limited.maxtuple = 3, 8, 8, 8
    limited.maxstring = limited.maxother = 80
    return limited.repr(value)[:80]
