"""Reads Hugging Face's model folders. No torch here."""

import json
from pathlib import Path
from typing import Any

from trainmark.errors import InputError


def read_config(folder: Path) -> dict[str, Any]:
    """The config.json of a model folder."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(
            f"{folder} is not a Hugging Face model folder: it has no config.json."
        ) from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read: {error}.") from None
    if not isinstance(config, dict):
        raise InputError(f"{path} must hold a JSON object.")
    return config
