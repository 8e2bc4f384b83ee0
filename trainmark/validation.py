"""One validator for everything that comes from a file: TOML, JSON and YAML into dataclasses."""

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
    from pydantic import TypeAdapter, ValidationError

    try:
        return TypeAdapter(kind).validate_python(data)
    except ValidationError as error:
        raise InputError(f"{source}: {'; '.join(map(_sentence, error.errors()))}.") from None


def _sentence(problem: Any) -> str:
    where = ".".join(str(part) for part in problem["loc"]) or "top level"
    message = problem["msg"]
    if problem["type"] in ("missing", "missing_argument"):
        return f"{where} is missing"
    if problem["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        return f"{where} is not a known key"
    return f"{where}: {message[0].lower()}{message[1:]} (received {problem['input']!r:.80})"
