"""What preparation says of training rows: how many are clicks, and which share of others it kept
(`prepare --negative-rate`)."""

from pathlib import Path
from typing import Any

from trainmark.errors import InputError
from trainmark.files import read_json


def negative_rate(folder: Path) -> float:
    """1, unless the dataset's preparation says less."""
    return _share(folder, "negative_rate", _manifest(folder).get("negative_rate", 1.0))


def click_rate(folder: Path, *, otherwise: float) -> float:
    """The share of clicks among the training rows that were kept; `otherwise` if not known."""
    rates = _manifest(folder).get("click_rate", {})
    rate = rates.get("train") if isinstance(rates, dict) else rates
    if rate is None:
        return otherwise
    return 0.0 if rate == 0 else _share(folder, "click_rate", rate)


def _manifest(folder: Path) -> dict[str, Any]:
    """Empty where there is none: the data are nobody's, or of another system."""
    manifest = folder / "prepare.json"
    return read_json(manifest) if manifest.is_file() else {}


def _share(folder: Path, name: str, rate: Any) -> float:
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 < rate <= 1:
        raise InputError(
            f"{folder / 'prepare.json'}: {name} must be a number above 0 and up to 1. Received: "
            f"{rate!r}. Prepare the data again."
        )
    return float(rate)
