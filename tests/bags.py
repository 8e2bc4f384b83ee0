"""Datasets with several ids per feature, for tests; their batches as plain PyTorch reads them."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tests.small import TABLE_ROWS, config
from trainmark.clickdata import feature_spec
from trainmark.clickdata.feature_spec import Feature, FeatureSpec
from trainmark.workloads.dlrm.data import ClickBatch
from trainmark.workloads.dlrm.runs import DlrmRun, Model, Optimizer

HOTNESS = (4, 1, 9)


def write_dataset(
    folder: Path,
    *,
    varies: bool = True,
    rows: int = 3300,
    hotness: tuple[int, ...] = HOTNESS,
    table_rows: tuple[int, ...] = TABLE_ROWS,
    numerical: int = 3,
) -> Path:
    """Random rows. Where it varies, a bag has from none to all of its ids, at its beginning."""
    folder.mkdir(parents=True, exist_ok=True)
    spec = _spec(hotness, table_rows, numerical, varies)
    feature_spec.write(spec, folder / feature_spec.FILE_NAME)
    for split, count in (("train", rows), ("test", 200)):
        (folder / split).mkdir()
        random = np.random.default_rng(count)
        columns: dict[str, NDArray[Any]] = {
            "numerical.bin": random.standard_normal((count, numerical)).astype(np.float16),
            "label.bin": random.random(count) < 0.3,
        }
        for name, most, size in zip(spec.categorical, hotness, table_rows, strict=True):
            ids = random.integers(0, size, (count, most))
            if varies:
                ids[np.arange(most) >= random.integers(0, most + 1, (count, 1))] = -1
            columns[name] = ids.astype(str(spec.feature_spec[name].dtype))
        for name, column in columns.items():
            column.tofile(folder / split / name)
    return folder


def _spec(
    hotness: tuple[int, ...], table_rows: tuple[int, ...], numerical: int, varies: bool
) -> FeatureSpec:
    spec = feature_spec.default_spec(table_rows, numerical, hotness=hotness)
    features: dict[str, Feature] = {
        name: dataclasses.replace(feature, varies=varies and name in spec.categorical)
        for name, feature in spec.feature_spec.items()
    }
    return dataclasses.replace(spec, feature_spec=features)


def run(folder: Path, *, optimizer: Any = "adagrad", **changes: Any) -> DlrmRun:
    """The small run on such a dataset; changes of the model by its field's name."""
    fields = {f.name for f in dataclasses.fields(Model)}
    of_model = {name: changes.pop(name) for name in list(changes) if name in fields}
    settings = {"global_batch": 64, "lr": 0.05, "optimizer": Optimizer(name=optimizer)} | changes
    base = config(data=str(folder), **settings)
    return config(
        data=str(folder), **settings, model=dataclasses.replace(base.model, **of_model)
    ) if of_model else base  # fmt: skip


def ids_of(batch: ClickBatch) -> list[Tensor]:
    """[B, hotness] int64 of each feature, as the batch has them."""
    found = {f: ids for g in batch.groups for f, ids in zip(g.features, g.ids, strict=True)}
    return [found[f].long().view(batch.samples, -1) for f in range(len(found))]


def jagged(ids_BH: Tensor) -> tuple[Tensor, Tensor]:
    """The ids that are there, and how many each sample has."""
    there = ids_BH >= 0
    return ids_BH[there], there.sum(1)


def offsets(lengths: Tensor) -> Tensor:
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)[:-1]])
