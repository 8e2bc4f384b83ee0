"""Weights in and out, in Hugging Face's layouts (`layouts.py`)."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from trainmark import checksums
from trainmark.config import SYNTHETIC
from trainmark.corpus import sentences, sst2
from trainmark.errors import InputError
from trainmark.files import replacing, write_atomically, write_tensors
from trainmark.workloads.distilbert import layouts
from trainmark.workloads.distilbert.runs import DistilbertRun, Model


def load(folder: str, model: Model, parameters: Mapping[str, Tensor]) -> None:
    """Copy a folder's encoder, and its head if it has one of the right size, into `parameters`."""
    stored = _without_prefix(_read(Path(folder)), model.layout)
    for ours, theirs in layouts.encoder_names(model):
        missing = [name for name in theirs if name not in stored]
        if missing:
            raise InputError(f"The weights in {folder} lack {', '.join(missing)}.")
        _fill(parameters[ours], [stored[name] for name in theirs], ours, folder)
    if layouts.TOKEN_TYPES in stored:
        positions = parameters["embeddings.positions.weight"]
        positions.add_(stored[layouts.TOKEN_TYPES][0].to(positions))
    for ours, theirs in layouts.head_names(model):
        (name,) = theirs
        name = name.removeprefix(f"{model.layout}.")
        if name in stored:
            _fill(parameters[ours], [stored[name]], ours, folder)


def _read(folder: Path) -> dict[str, Tensor]:
    path = layouts.weights_file(folder)
    if path is None:
        raise InputError(f"{folder} holds no weights.")
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        return torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, SafetensorError, RuntimeError, EOFError, ValueError) as error:
        raise InputError(f"{path} is damaged or is no weights file: {error}.") from None


def _without_prefix(stored: dict[str, Tensor], layout: str) -> dict[str, Tensor]:
    """A model with a head prefixes its encoder's names with the layout's; a bare encoder does not.

    Old files call LayerNorm's weight gamma and its bias beta.
    """
    renamed = {name.removeprefix(f"{layout}."): tensor for name, tensor in stored.items()}
    return {
        name.replace("LayerNorm.gamma", "LayerNorm.weight").replace(
            "LayerNorm.beta", "LayerNorm.bias"
        ): tensor
        for name, tensor in renamed.items()
    }


def _fill(parameter: Tensor, parts: list[Tensor], name: str, folder: str) -> None:
    joined = torch.cat(parts) if len(parts) > 1 else parts[0]
    if joined.shape != parameter.shape:
        raise InputError(
            f"The weights in {folder} do not fit: {name} should be {tuple(parameter.shape)}, "
            f"received {tuple(joined.shape)}."
        )
    parameter.copy_(joined)


def save(
    folder: Path, model: Model, parameters: Mapping[str, Tensor], tokenizer: list[Path]
) -> None:
    """Write a folder that `transformers` loads: config.json, model.safetensors, tokenizer files.

    Args:
        tokenizer: folders to look for tokenizer files in; the first that has any is taken.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(folder / "model.safetensors") as temporary:
        write_tensors(temporary, renamed(model, parameters))
    save_description(folder, model, tokenizer)
    checksums.seal(folder)


def save_description(folder: Path, model: Model, tokenizer: list[Path]) -> None:
    """All but the weights."""
    config = json.dumps(layouts.config_json(model), indent=2) + "\n"
    write_atomically(folder / "config.json", config)
    for source in tokenizer:
        if any((source / name).is_file() for name in sst2.TOKENIZER_FILES):
            sst2.copy_tokenizer(source, folder)
            break


def tokenizer_folders(cfg: DistilbertRun) -> list[Path]:
    """Where a run's tokenizer may lie: with the weights that it began from, or with its data."""
    beside_data = [] if cfg.data == SYNTHETIC else [Path(cfg.data or "") / sentences.MODEL_FOLDER]
    return [Path(cfg.weights or ""), *beside_data]


def renamed(model: Model, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our parameters by the names, and in the pieces, that `transformers` has for them."""
    tensors: dict[str, Tensor] = {}
    for ours, theirs in layouts.encoder_names(model):
        pieces = parameters[ours].detach().cpu().chunk(len(theirs))
        for name, piece in zip(theirs, pieces, strict=True):
            tensors[f"{model.layout}.{name}"] = piece.clone()
    for ours, (name,) in layouts.head_names(model):
        tensors[name] = parameters[ours].detach().cpu().contiguous()
    if model.layout == "bert":
        # Type 0 lives in the position embeddings. Type 1 was never trained; sentence pairs that
        # need it must be trained for.
        tensors[f"bert.{layouts.TOKEN_TYPES}"] = torch.zeros(2, model.hidden)
    return tensors
