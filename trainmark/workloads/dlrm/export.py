"""A trained DLRM as a folder that plain PyTorch loads: weights, their description, and a loader."""

import json
import shutil
from pathlib import Path
from typing import Any

from torch import Tensor

from trainmark import checkpoint, feature_spec
from trainmark.config import SYNTHETIC
from trainmark.errors import InputError
from trainmark.shards import write_shards
from trainmark.workloads.dlrm import standalone
from trainmark.workloads.dlrm.runs import DlrmRun

PREFIX = "model."


def export(cfg: DlrmRun, checkpoint_path: Path, folder: Path) -> None:
    """Of a checkpoint, whatever ranks wrote it; tables in the types that they were trained in.

    Never more than one file's tensors are in memory, or one table, if that is larger.
    """
    sizes = {
        name.removeprefix(PREFIX): tensor.nbytes
        for name, tensor in checkpoint.shapes(checkpoint_path).items()
        if name.startswith(PREFIX)
    }

    def load(names: list[str]) -> dict[str, Tensor]:
        tensors = checkpoint.read(checkpoint_path, [PREFIX + name for name in names])
        return {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()}

    write_shards(folder, sizes, load)
    (folder / "config.json").write_text(json.dumps(description(cfg), indent=2) + "\n")
    shutil.copyfile(standalone.__file__, folder / "model.py")


def description(cfg: DlrmRun) -> dict[str, Any]:
    """The network, and its features in the order in which it takes them."""
    model = cfg.model
    return {
        "model_type": "dlrm",
        "numerical_features": model.numerical_features,
        "table_rows": list(model.table_rows),
        "embedding_dim": model.embedding_dim,
        "bottom_mlp": list(model.bottom_mlp),
        "top_mlp": list(model.top_mlp),
    } | _names(cfg)


def _names(cfg: DlrmRun) -> dict[str, Any]:
    """Of the features, if the dataset is still there to tell."""
    if cfg.data is None or cfg.data == SYNTHETIC:
        return {}
    try:
        spec = feature_spec.read(feature_spec.path_of(Path(cfg.data), "train"))
    except InputError:
        return {}
    return {"numerical": list(spec.numerical), "categorical": list(spec.categorical)}
