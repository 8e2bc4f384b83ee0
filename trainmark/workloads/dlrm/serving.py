"""A trained DLRM for `trainmark serve`: rows of features in, click probabilities out."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from trainmark.checkpoint import checkpoints
from trainmark.clickdata import feature_spec, identity
from trainmark.clicklog.preparation import FOLDER
from trainmark.clicklog.raw_values import RawValues, open_dataset
from trainmark.config import filled
from trainmark.contract import Served
from trainmark.errors import InputError, unknown
from trainmark.files import read_json
from trainmark.formatting import readable_size
from trainmark.hardware import backends
from trainmark.workloads.dlrm import export, standalone
from trainmark.workloads.dlrm.prepared_values import PreparedValues
from trainmark.workloads.dlrm.runs import DlrmRun, is_generated


def load(served: Served[DlrmRun]) -> "ClickScorer":
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
    weights = {
        name: tensor
        for name, tensor in checkpoints.shapes(path).items()
        if name.startswith(export.PREFIX)
    }
    _check_memory(sum(tensor.nbytes for tensor in weights.values()), device)
    return {
        name.removeprefix(export.PREFIX): checkpoints.read(path, [name])[name].to(device)
        for name in weights
    }


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
    count, tables = config["numerical_features"], config["table_rows"]
    numerical = config.get("numerical", [f"num_{i}" for i in range(count)])
    categorical = config.get("categorical", [f"cat_{i}.bin" for i in range(len(tables))])
    return PreparedValues(numerical, categorical, tables, config.get("hotness"))


def _check_same_tables(data: Path, config: dict[str, Any]) -> None:
    """For models of an earlier version, which do not say more about their dataset."""
    spec = feature_spec.read(data)
    found = (len(spec.numerical), list(spec.cardinalities))
    if found != (config["numerical_features"], config["table_rows"]):
        raise InputError(
            f"{data} is not what the model was trained on: it has {found[0]} numerical features "
            f"and tables of {found[1]} rows, the model {config['numerical_features']} and "
            f"{config['table_rows']}."
        )


# --- requests


class ClickScorer:
    """Scores rows of features; see `contract.Scorer`.

    Args:
        model: on `device`.
        values: encodes a row's values.
        facts: what is known of the model.
        device: as PyTorch names it.
    """

    answer = "scores"

    def __init__(
        self, model: standalone.Dlrm, values: RawValues, facts: dict[str, Any], device: str
    ) -> None:
        self._model, self._values, self._device = model, values, device
        self._names = [*values.numerical, *values.categorical]
        prepared = isinstance(values, PreparedValues)
        self.facts = facts | {
            "values": "prepared" if prepared else "raw",
            "requests": "Rows of prepared values: numbers and ids, as in the dataset."
            if prepared
            else "Rows of raw values, as in the log that was prepared.",
            "numerical": list(values.numerical),
            "categorical": list(values.categorical),
            "expects": dict(values.expects),
            "table_rows": dict(zip(values.tables, model.config["table_rows"], strict=True)),
            "embedding_dim": model.config["embedding_dim"],
        }
        numerical, categorical = values.example()
        self.example = {"rows": [dict(zip(self._names, numerical + categorical, strict=True))]}

    def score(self, rows: list[Any]) -> list[float]:
        numerical, categorical = zip(*rows, strict=True)
        numbers, ids = self._values.encode(numerical, categorical)
        clicks = self._model(
            torch.from_numpy(numbers).to(self._device), torch.from_numpy(ids).to(self._device)
        )
        scores: list[float] = clicks.cpu().tolist()
        return scores

    def read(self, body: dict[str, Any]) -> list[Any]:
        """Each row as its numerical values and its categorical ones, in order."""
        if body.keys() == {"rows"}:
            return self._records(body["rows"])
        names = {"numerical": self._values.numerical, "categorical": self._values.categorical}
        lacks_ids = "categorical" not in body and names["categorical"]
        if not body or not body.keys() <= names.keys() or lacks_ids:
            received = ", ".join(map(repr, body)) or "nothing"
            raise InputError(
                f"The body has {received}; expected 'rows', or 'numerical' and 'categorical'."
            )
        given = {key: self._matrix(body[key], key, names[key]) for key in names if key in body}
        rows = max(map(len, given.values()))
        numerical, categorical = (
            given[key] if key in given else self._matrix([[]] * rows, key, names[key])
            for key in names
        )
        if len(numerical) != len(categorical):
            raise InputError(
                f"'numerical' has {len(numerical)} rows and 'categorical' has {len(categorical)}, "
                "expected as many."
            )
        return list(zip(numerical, categorical, strict=True))

    def _matrix(self, rows: Any, key: str, names: Sequence[str]) -> list[list[Any]]:
        if not isinstance(rows, list):
            raise InputError(f"{key!r} is {_kind(rows)}, expected a list of rows.")
        for number, row in enumerate(rows):
            if not isinstance(row, list) or len(row) != len(names):
                found = f"{len(row)} values" if isinstance(row, list) else _kind(row)
                raise InputError(
                    f"Row {number}: {key!r} has {found}, expected a list of {len(names)}"
                    f"{_listing(names)}."
                )
        return rows

    def _records(self, rows: Any) -> list[Any]:
        if not isinstance(rows, list):
            raise InputError(f"'rows' is {_kind(rows)}, expected a list of objects.")
        split = len(self._values.numerical)
        found = []
        for number, row in enumerate(rows):
            try:
                values = [row[name] for name in self._names]
            except (KeyError, TypeError, IndexError):
                raise self._bad_record(number, row) from None
            if len(row) != len(self._names):
                raise self._bad_record(number, row)
            found.append((values[:split], values[split:]))
        return found

    def _bad_record(self, number: int, row: Any) -> InputError:
        if not isinstance(row, dict):
            return InputError(f"Row {number} is {_kind(row)}, expected an object of features.")
        missing = [name for name in self._names if name not in row]
        if missing:
            return InputError(
                f"Row {number} has no {missing[0]!r}, expected all {len(self._names)} features; "
                "null stands for a missing value."
            )
        surplus = next(name for name in row if name not in self._names)
        return InputError(f"Row {number}: {unknown('feature', surplus, self._names)}")


def _kind(value: Any) -> str:
    return "null" if value is None else f"a {type(value).__name__}"


def _listing(names: Iterable[str]) -> str:
    shown = ", ".join(names)
    return f" ({shown})" if shown and len(shown) <= 200 else ""
