"""Which share of a dataset's training rows without a click was kept (`prepare --negative-rate`)."""

from pathlib import Path
from typing import Any

from trainmark.errors import InputError
from trainmark.files import read_json


def negative_rate(folder: Path) -> float:
    """1, unless the dataset's preparation says less."""
    manifest = folder / "prepare.json"
    if not manifest.is_file():  # nobody's, or of another system: all rows are there
        return 1.0
    rate: Any = read_json(manifest).get("negative_rate", 1.0)
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 < rate <= 1:
        raise InputError(
            f"{manifest}: negative_rate must be a number above 0 and up to 1. Received: {rate!r}. "
            "Prepare the data again."
        )
    return float(rate)
