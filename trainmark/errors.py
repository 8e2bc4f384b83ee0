"""The one exception that users see: a sentence, without a traceback, exit code 2."""

import errno
import os
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from importlib.util import find_spec
from os.path import isdir


class InputError(ValueError):
    """Something the user gave (a flag, a file, a folder) cannot be used.

    The message says what is wrong, what was received, what was expected and how to fix it.
    """


_REMEDIES = {
    errno.ENOSPC: "Free some space, or write to another disk.",
    errno.EEXIST: "It should be a folder, not a file or a link to nothing.",
    errno.ENOTDIR: "One of the folders in this path is a file.",
    errno.EACCES: "Change its permissions, or give another path.",
    errno.EROFS: "Give another path.",
}


def in_words(error: Exception) -> str:
    """An error as a sentence; Python's words for a file that cannot be used are none."""
    if isinstance(error, UnicodeEncodeError):
        return (
            f"{error.object[:300]} is not text in UTF-8, which is needed here. Give another path; "
            "or, if it is one, set LC_ALL=C.UTF-8."
        )
    if not isinstance(error, OSError) or not error.strerror:
        return str(error) or "Out of memory." if isinstance(error, MemoryError) else str(error)
    return f"{error.filename}: {reason(error)}" if error.filename else reason(error)


def reason(error: OSError) -> str:
    """Why the system refused something, and what helps; Arrow's errors tell it behind words of
    their own."""
    why = (error.strerror or str(error)).rstrip(".")
    if error.errno and f"[errno {error.errno}]" in why:
        why = os.strerror(error.errno)
    return f"{why}. {_REMEDIES.get(error.errno or 0, '')}".rstrip()


def out_of_memory(error: RuntimeError) -> InputError | None:
    """The message for memory that ran out, of a GPU or of this machine; None for other errors."""
    # What follows are the other processes on this GPU.
    sentence = str(error).partition("\n")[0].partition(" Process ")[0]
    of_a_gpu = type(error).__name__ == "OutOfMemoryError"  # torch's, which need not be loaded here
    if not of_a_gpu and "can't allocate memory" not in sentence:
        return None
    return InputError(f"Out of memory ({sentence}). Use a smaller micro_batch.")


MOST_PROBLEMS, MOST_NAMES = 20, 100
"""That a message tells. A file of 2,000 columns may have one with each."""


def raise_all(problems: Iterable[str]) -> None:
    """Raise one `InputError` that names every problem, of many the first; return if there is
    none."""
    problems = list(problems)
    if len(problems) == 1:
        raise InputError(problems[0])
    if problems:
        lines = [f"- {problem}" for problem in problems[:MOST_PROBLEMS]]
        if more := problems[MOST_PROBLEMS:]:
            lines.append(f"- and {len(more):,} more")
        raise InputError("\n".join([f"{len(problems):,} problems:", *lines]))


def listed(names: Sequence[str]) -> str:
    """Names in a sentence, of many the first."""
    more = len(names) - MOST_NAMES
    return ", ".join(names[:MOST_NAMES]) + (f" and {more:,} more" if more > 0 else "")


def no_file_matches(pattern: str, flag: str = "--input") -> InputError:
    """The error for a pattern without a file; a folder is the usual reason."""
    hint = (
        f" It is a folder: give its files, as '{pattern.rstrip('/')}/*'." if isdir(pattern) else ""
    )
    return InputError(f"No file matches {flag} {pattern!r}.{hint}")


def require(what: str, *packages: str, extra: str) -> None:
    """Refuse what needs packages that are not installed, and name the extra that brings them."""
    if missing := [name for name in packages if find_spec(name) is None]:
        raise InputError(f"{what} needs {' and '.join(missing)}: pip install 'trainmark[{extra}]'.")


def unknown(kind: str, received: str, known: Iterable[str]) -> InputError:
    """The error for a name that is not known, the nearest known one first."""
    known = list(known)
    near = get_close_matches(received, known, n=1, cutoff=0.5)
    hint = f"Did you mean {near[0]!r}? " if near else ""
    return InputError(f"Unknown {kind} {received!r}. {hint}Known: {listed(known)}.")
