"""A trained DLRM, loaded for `trainmark serve`: its weights, and what encodes its features."""

from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from trainmark.checkpoint import checkpoints
from trainmark.checkpoint.run_tensors import read_weights, weight_shapes
from trainmark.clickdata import feature_spec, identity
from trainmark.clicklog.preparation import FOLDER
from trainmark.clicklog.raw_values import RawValues, open_dataset
from trainmark.config import filled
from trainmark.errors import InputError
from trainmark.files import read_json
from trainmark.formatting import readable_size
from trainmark.hardware import backends
from trainmark.scoring import Served
from trainmark.workloads.dlrm import export, standalone
from trainmark.workloads.dlrm.prepared_values import PreparedValues
from trainmark.workloads.dlrm.requests import ClickScorer
from trainmark.workloads.dlrm.runs import DlrmRun, is_generated


def load(served: Served[DlrmRun]) -> ClickScorer:
    """The model of a run or of an export, and what encodes its features."""
    facts: dict[str, Any] = {"name": served.folder.name, "workload": "dlrm", "step": None}
    if served.run is None:
        config = read_json(served.folder / "config.json")
        values = _values(served, config, None)
        model = of_export(served.folder, served.device)
    else:
        config = export.description(served.run)
        values = _values(served, config, served.run.data)
        path = filled(served.checkpoint)
        state = checkpoints.read_state(path)
        facts |= {"name": served.run.name, "step": state["progress"]["step"]}
        facts["samples"] = state["data"]["samples"]
        model = standalone.Dlrm(config, _of_checkpoint(path, served.device)).eval()
    return ClickScorer(model, values, facts, served.device)


# --- weights


def of_export(folder: Path, device: str) -> standalone.Dlrm:
    """The model in a folder that `trainmark export` wrote."""
    files = list(folder.glob("model*.safetensors"))
    if not files:
        raise InputError(
            f"{folder} holds no model*.safetensors. Serve the folder of the run, or one that "
            "trainmark export --format safetensors wrote."
        )
    _check_memory(sum(path.stat().st_size for path in files), device)
    return standalone.load(folder, device)


def _of_checkpoint(path: Path, device: str) -> dict[str, Tensor]:
    """Its weights, table by table: of those for a GPU, one at a time is in the host's memory."""
    shapes = weight_shapes(path)
    _check_memory(sum(tensor.nbytes for tensor in shapes.values()), device)
    return {name: read_weights(path, [name])[name].to(device) for name in shapes}


def _check_memory(needed: int, device: str) -> None:
    on_gpu = device != "cpu"
    here = torch.device(device)
    free = backends.free_bytes(here) if on_gpu else psutil.virtual_memory().available
    if needed > free:
        where, instead = ("the GPU", "--device cpu, or ") if on_gpu else ("this machine", "")
        raise InputError(
            f"The model takes {readable_size(needed)}, and {where} has {readable_size(free)} free. "
            f"Use {instead}a larger one."
        )


# --- features


def _values(served: Served[DlrmRun], config: dict[str, Any], run_data: str | None) -> RawValues:
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
    _check_same_tables(Path(data), config)
    return values


def _prepared(config: dict[str, Any]) -> PreparedValues:
    count, tables = config["numerical_features"], _feature_rows(config)
    numerical = config.get("numerical", [f"num_{i}" for i in range(count)])
    categorical = config.get("categorical", [f"cat_{i}.bin" for i in range(len(tables))])
    return PreparedValues(numerical, categorical, tables, config.get("hotness"))


def _check_same_tables(data: Path, config: dict[str, Any]) -> None:
    """For models of an earlier version, which do not say more about their dataset."""
    spec = feature_spec.read(data)
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
