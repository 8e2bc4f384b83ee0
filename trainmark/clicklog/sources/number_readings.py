"""How a numerical column is read: the words behind its colon in --columns, and of --numerical.

A column may give several inputs of the model, joined by `+`:

    plain, log, signed_log, standard, standard_log, quantile
               the number, transformed so (at most one of these)
    bins       the bin that it lies in, a categorical feature
    missing    1.0 where it is missing, else 0.0

`quantile+bins+missing` of `age` is the numerical features `age` and `age.missing` and the
categorical feature `age.bin`. `auto` leaves the choice to the column's training rows.
"""

from dataclasses import dataclass

from trainmark.errors import InputError

AUTO = "auto"
TRANSFORMS = ("plain", "log", "signed_log", "standard", "standard_log", "quantile")
BINS, MISSING = "bins", "missing"
WORDS = (AUTO, *TRANSFORMS, BINS)
"""What a column may be read as, for messages; `+` joins more than one."""


@dataclass(frozen=True, kw_only=True)
class NumberReading:
    """The inputs of the model that a numerical column gives."""

    transform: str | None = None
    """Of the number itself; None: it is no input."""
    bins: bool = False
    missing: bool = False

    def __str__(self) -> str:
        extras = (BINS if self.bins else None, MISSING if self.missing else None)
        return "+".join(word for word in (self.transform, *extras) if word)


def is_reading(text: str) -> bool:
    """Whether `text` says how to read a number."""
    words = text.split("+")
    transforms = [word for word in words if word in TRANSFORMS]
    return text == AUTO or (
        len(transforms) <= 1
        and bool(transforms or BINS in words)
        and len(set(words)) == len(words)
        and set(words) <= {*TRANSFORMS, BINS, MISSING}
    )


def parse(text: str) -> NumberReading:
    """A reading other than `auto`."""
    words = text.split("+")
    transforms = [word for word in words if word in TRANSFORMS]
    return NumberReading(
        transform=transforms[0] if transforms else None,
        bins=BINS in words,
        missing=MISSING in words,
    )


def in_order(text: str) -> str:
    """A reading with its words in the usual order."""
    return text if text == AUTO else str(parse(text))


def check_default(text: str) -> str:
    """The reading of --numerical."""
    if not is_reading(text):
        raise InputError(
            f"--numerical is {text!r}; expected {', '.join(WORDS[:-1])} or {WORDS[-1]}, or several "
            "with a plus between them, such as quantile+bins+missing."
        )
    return in_order(text)
