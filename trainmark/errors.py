"""The one exception that users see: a sentence, without a traceback, exit code 2."""

from collections.abc import Iterable
from difflib import get_close_matches


class InputError(ValueError):
    """Something the user gave (a flag, a file, a folder) cannot be used.

    The message says what is wrong, what was received, what was expected and how to fix it.
    """


def raise_all(problems: Iterable[str]) -> None:
    """Raise one `InputError` that names every problem; return if there is none."""
    problems = list(problems)
    if len(problems) == 1:
        raise InputError(problems[0])
    if problems:
        raise InputError(f"{len(problems)} problems:\n" + "\n".join(f"- {p}" for p in problems))


def unknown(kind: str, received: str, known: Iterable[str]) -> InputError:
    """The error for a name that is not known, the nearest known one first."""
    known = list(known)
    near = get_close_matches(received, known, n=1, cutoff=0.5)
    hint = f"Did you mean {near[0]!r}? " if near else ""
    return InputError(f"Unknown {kind} {received!r}. {hint}Known: {', '.join(known)}.")
