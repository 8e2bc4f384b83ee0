"""Hugging Face's model folders: config.json, and tensors in safetensors files of a few GB each,
with the index that its code reads. No torch here."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from trainmark.errors import InputError
from trainmark.files import write_tensors

SHARD_BYTES = 5 * 2**30


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


def write_shards(
    folder: Path, sizes: Mapping[str, int], load: Callable[[list[str]], dict[str, Any]]
) -> None:
    """Write the tensors that `load` gives by their names, one file's at a time.

    Args:
        sizes: bytes of every tensor. One that is larger than a shard has a file of its own.
        load: the tensors of some names.
    """
    shards = _cut(sizes)
    files: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        file = "model.safetensors" if len(shards) == 1 else file
        write_tensors(folder / file, load(names))
        files |= dict.fromkeys(names, file)
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": files}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _cut(sizes: Mapping[str, int]) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if filled and filled + size > SHARD_BYTES:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards
