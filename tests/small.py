"""A DLRM so small that a whole run takes a fraction of a second, and what tests do with it."""

import csv
import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainmark import workloads
from trainmark.checkpoint import folders
from trainmark.cli import main
from trainmark.clickdata import feature_spec
from trainmark.distributed.mesh import single
from trainmark.hardware.devices import Cluster
from trainmark.run import run_folder
from trainmark.run.loop import build_trainer
from trainmark.workloads import resolve
from trainmark.workloads.dlrm.data import build_data
from trainmark.workloads.dlrm.runs import DlrmRun, Model, Optimizer
from trainmark.workloads.dlrm.step import DlrmTrainer

CPU = torch.device("cpu")
ONE_CPU = Cluster("cpu", 1, 1)
TABLE_ROWS = (50, 7, 3)
STEPS = 8  # 4000 rows in batches of 512, the last one of 416

FLAGS = (
    *("--synthetic-ids", "uniform", "--synthetic-rows", "4000", "--global-batch", "512"),
    *("--model.embedding-dim", "8", "--model.bottom-mlp", "16", "8"),
    *("--model.bottom-output", "relu", "--lr", "0.1"),  # as `config` has them
    *("--model.top-mlp", "16", "1", "--model.table-rows", "50", "7", "3"),
    *("--device", "cpu", "--warmup-clock", "2", "--evals-per-epoch", "1"),
)


def train(output: Path, *flags: str) -> int:
    """`trainmark train` of the small run, in this process; the exit code."""
    return main(["train", "dlrm-demo", *FLAGS, "--output", str(output), *flags])


def config(**changes: Any) -> DlrmRun:
    """The small run, resolved. Its tables are those of the dataset, if it has one."""
    on_disk = changes.get("data", "synthetic") != "synthetic"
    model = Model(
        numerical_features=13,
        table_rows=workloads.named_run("dlrm-demo").model.table_rows if on_disk else TABLE_ROWS,
        embedding_dim=8,
        bottom_mlp=(16, 8),
        top_mlp=(16, 1),
    )
    run = DlrmRun(
        name="dlrm-demo",
        data="synthetic",
        device="cpu",
        model=model,
        optimizer=Optimizer(name="adagrad"),
        lr=0.1,
        global_batch=512,
        synthetic_rows=4000,
    )
    return resolve(dataclasses.replace(run, **changes), ONE_CPU)


def trainer(cfg: DlrmRun) -> DlrmTrainer:
    """What trains `cfg` on this CPU."""
    built = build_trainer(cfg, workloads.load("dlrm"), single(CPU))
    assert isinstance(built, DlrmTrainer)
    return built


def copies(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def same_bits(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(
        torch.equal(a[name].reshape(-1).view(torch.uint8), b[name].reshape(-1).view(torch.uint8))
        for name in a
    )


def newest(output: Path) -> Path:
    """The newest checkpoint of a run."""
    path = folders.latest(output / "checkpoints")
    assert path is not None
    return path


def saved(path: Path) -> dict[str, bytes]:
    """Every tensor of a checkpoint that one process wrote, as bytes."""
    from safetensors import safe_open

    with safe_open(path / "rank-00000.safetensors", "pt") as file:
        names = file.keys()
        return {name: file.get_tensor(name).numpy().tobytes() for name in names}


def result(output: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((output / "result.json").read_text())
    return data


def curve(output: Path) -> list[tuple[int, int, float]]:
    """(step, samples, loss) of every step."""
    with open(output / "loss.csv", newline="") as file:
        return [(int(r["step"]), int(r["samples"]), float(r["loss"])) for r in csv.DictReader(file)]


def snapshot(folder: Path) -> dict[str, bytes]:
    """Every file under `folder`."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def click_samples(run: Path) -> tuple[Tensor, Tensor, Tensor]:
    """Labels, numerical features and ids of the run's test split."""
    batches = list(build_data(run_folder.read_config(run), "test", 0, 1))
    labels = torch.cat([batch.labels for batch in batches])
    numerical = torch.cat([batch.numerical for batch in batches]).float()
    ids = torch.empty(len(labels), len(TABLE_ROWS), dtype=torch.int64)
    for group in range(len(batches[0].groups)):
        features = batches[0].groups[group].features
        ids[:, features] = torch.cat([b.groups[group].ids.t().long() for b in batches])
    return labels, numerical, ids


# --- a dataset on disk


def write_dataset(
    folder: Path,
    *,
    train_rows: int = 1000,
    test_rows: int = 300,
    validation_rows: int = 0,
    cardinalities: tuple[int, ...] = TABLE_ROWS,
    num_numerical: int = 3,
    numerical_dtype: str = "float16",
) -> Path:
    """Random rows in the `split_binary` layout. `cat_0.bin` numbers the rows where it can."""
    spec = feature_spec.default_spec(cardinalities, num_numerical, numerical_dtype=numerical_dtype)
    folder.mkdir(parents=True, exist_ok=True)
    feature_spec.write(spec, folder / "feature_spec.yaml")
    _write_split(folder, "train", train_rows, spec)
    _write_split(folder, "test", test_rows, spec)
    if validation_rows:
        alone = feature_spec.of_mappings(spec, ["validation"])
        feature_spec.write(alone, folder / "feature_spec_validation.yaml")
        _write_split(folder, "validation", validation_rows, alone)
    return folder


def _write_split(folder: Path, split: str, rows: int, spec: feature_spec.FeatureSpec) -> None:
    random = np.random.default_rng(rows)
    (folder / split).mkdir()
    numerical = random.standard_normal((rows, len(spec.numerical))).astype(np.float16)
    numerical = numerical.astype(spec.numerical_dtype)
    columns: dict[str, NDArray[Any]] = {spec.label: random.random(rows) < 0.3}
    for name, cardinality in zip(spec.categorical, spec.cardinalities, strict=True):
        dtype = str(spec.feature_spec[name].dtype)
        columns[name] = (np.arange(rows) % cardinality).astype(dtype)
    if spec.numerical:
        numerical.tofile(folder / split / "numerical.bin")
    files = spec.files(split)
    for name, column in columns.items():
        column.tofile(folder / files[name])
