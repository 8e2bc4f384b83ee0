"""A trained DLRM, loaded for `trainmark serve`: its weights, and what encodes its features.

Where a CPU computes it in one pass, torch is not loaded: importing it takes longer than all else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import psutil
from annotated_types import MinLen
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from trainmark.bounds import Count, CountOrZero, Width
from trainmark.checkpoint import folders
from trainmark.checkpoint.run_tensors import read_weight_arrays, read_weights, weight_entries
from trainmark.clickdata import feature_spec, identity
from trainmark.clicklog.preparation import FOLDER
from trainmark.clicklog.raw_values import open_dataset
from trainmark.config import filled
from trainmark.errors import InputError
from trainmark.files import read_json
from trainmark.formatting import readable_size
from trainmark.hardware import backends
from trainmark.scoring import Served
from trainmark.validation import parse
from trainmark.workloads.dlrm import one_pass
from trainmark.workloads.dlrm.description import description
from trainmark.workloads.dlrm.prepared_values import PreparedValues
from trainmark.workloads.dlrm.request_values import RawRequestValues
from trainmark.workloads.dlrm.requests import Clicks, ClickScorer, Values
from trainmark.workloads.dlrm.runs import DlrmRun, is_generated

if TYPE_CHECKING:
    from torch import Tensor


def load(served: Served[DlrmRun]) -> ClickScorer:
    """The model of a run or of an export, and what encodes its features."""
    facts: dict[str, Any] = {"name": served.folder.name, "workload": "dlrm", "step": None}
    if served.run is None:
        weights = of_export(served.folder)
        config = described(served.folder)
        values = _values(served, config, None)
    else:
        config = description(served.run)
        values = _values(served, config, served.run.data)
        path = filled(served.checkpoint)
        state = folders.read_state(path)
        facts |= {"name": served.run.name, "step": state["progress"]["step"]}
        facts["samples"] = state["data"]["samples"]
        weights = of_checkpoint(path)
    return ClickScorer(config, clicks_of(config, weights, served.device), values, facts)


@dataclass(frozen=True)
class _Described:
    """What a model's `description` must say for it to be computed."""

    numerical_features: CountOrZero
    table_rows: list[Count]
    bottom_mlp: Annotated[list[Width], MinLen(1)]
    top_mlp: Annotated[list[Width], MinLen(1)]
    interaction: str = "dot"
    logit_offset: float = 0.0
    crosses: tuple[list[int], ...] = ()
    dataset: tuple[str, ...] = ()


def described(folder: Path) -> dict[str, Any]:
    """The description of an exported model."""
    config = read_json(folder / "config.json")
    parse(_Described, config, str(folder / "config.json"))
    return config


# --- weights


@dataclass(frozen=True)
class Weights:
    """Of a model, not read yet."""

    kinds: Mapping[str, one_pass.Kind]
    """By name."""
    num_bytes: int
    arrays: Callable[[], dict[str, NDArray[Any]]]
    """All of them, of a model whose types numpy has."""
    tensors: Callable[[str], dict[str, Tensor]]
    """The same on a device: of those for a GPU, one at a time is in the host's memory."""


def of_export(folder: Path) -> Weights:
    """The model in a folder that `trainmark export` wrote."""
    files = sorted(folder.glob("model*.safetensors"))
    if not files:
        raise InputError(
            f"{folder} holds no model*.safetensors. Give the folder of the run, or one that "
            "trainmark export --format safetensors wrote."
        )

    def arrays() -> dict[str, NDArray[Any]]:
        from safetensors.numpy import load_file

        return {name: array for file in files for name, array in load_file(file).items()}

    def tensors(device: str) -> dict[str, Tensor]:
        from safetensors.torch import load_file

        return {n: tensor for file in files for n, tensor in load_file(file, device).items()}

    kinds: dict[str, one_pass.Kind] = {}
    for file in files:
        try:
            with safe_open(file, framework="np") as opened:
                stored = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise InputError(f"{file} is damaged: {error}.") from None
        kinds |= {n: (one.get_dtype(), tuple(one.get_shape())) for n, one in stored.items()}
    return Weights(kinds, sum(path.stat().st_size for path in files), arrays, tensors)


def of_checkpoint(path: Path) -> Weights:
    """The model of a checkpoint."""
    entries = weight_entries(path)

    def tensors(device: str) -> dict[str, Tensor]:
        return {name: read_weights(path, [name])[name].to(device) for name in entries}

    kinds = {name: (entry.dtype, entry.shape) for name, entry in entries.items()}
    num_bytes = sum(chunk.byte_length for entry in entries.values() for chunk in entry.chunks)
    return Weights(kinds, num_bytes, partial(read_weight_arrays, path), tensors)


def clicks_of(config: dict[str, Any], weights: Weights, device: str) -> Clicks:
    """A model's probabilities, the fastest way that there is."""
    _check_memory(weights.num_bytes, device)
    if device != "cpu" or not one_pass.suits(config, weights.kinds):
        from trainmark.workloads.dlrm.graphed_prediction import clicks_by_torch

        return clicks_by_torch(config, weights.tensors(device), device)
    logits = one_pass.logits_of(config, weights.arrays())
    return lambda numbers, ids: one_pass.clicks(logits(numbers.astype(np.float32, copy=False), ids))


def _check_memory(needed: int, device: str) -> None:
    free = psutil.virtual_memory().available
    if on_gpu := device != "cpu":
        import torch

        free = backends.free_bytes(torch.device(device))
    if needed > free:
        where, instead = ("the GPU", "--device cpu, or ") if on_gpu else ("this machine", "")
        raise InputError(
            f"The model takes {readable_size(needed)}, and {where} has {readable_size(free)} free. "
            f"Use {instead}a larger one."
        )


# --- features


def _values(served: Served[DlrmRun], config: dict[str, Any], run_data: str | None) -> Values:
    """What reads the values of requests."""
    carried = served.folder / FOLDER  # by an export
    data = served.data or (None if is_generated(run_data) else run_data)
    if data is None and carried.is_dir():
        data = str(carried)
    if data is None or served.values == "prepared":
        if served.values == "raw":
            raise InputError("--values raw: give --data DIR, the dataset that was trained on.")
        return _prepared(config)
    if not Path(data).is_dir():
        raise InputError(
            f"The dataset {data} is not here, and with it what encodes raw values. Give --data "
            "DIR, or --values prepared for requests with numbers and ids."
        )
    values = open_dataset(Path(data))
    if values is None:
        if served.values == "raw":
            raise InputError(f"--values raw: {data} has no vocabularies to encode them with.")
        return _prepared(config)
    identity.check(config.get("dataset", []), Path(data), run_data)
    check_same_tables(Path(data), Path(data), config)
    return RawRequestValues(values)


def _prepared(config: dict[str, Any]) -> PreparedValues:
    count, tables = config["numerical_features"], _feature_rows(config)
    numerical = config.get("numerical", [f"num_{i}" for i in range(count)])
    categorical = config.get("categorical", [f"cat_{i}.bin" for i in range(len(tables))])
    return PreparedValues(numerical, categorical, tables, config.get("hotness"))


def check_same_tables(data: Path, prepared: Path, config: dict[str, Any]) -> None:
    """For models of an earlier version, which do not say more about their dataset, and for those
    that somebody edited.

    Args:
        data: the dataset, for the message.
        prepared: it, or rows that were prepared by its vocabularies.
    """
    spec = feature_spec.read(prepared)
    found = (len(spec.numerical), list(spec.cardinalities))
    if found != (config["numerical_features"], _feature_rows(config)):
        raise InputError(
            f"{data} is not what the model was trained on: it has {found[0]} numerical features "
            f"and tables of {found[1]} rows, the model {config['numerical_features']} and "
            f"{_feature_rows(config)}."
        )


def _feature_rows(config: dict[str, Any]) -> list[int]:
    """Rows of the tables that are a feature's own."""
    rows: list[int] = config["table_rows"]
    return rows[: len(rows) - len(config.get("crosses", []))]
