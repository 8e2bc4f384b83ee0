"""What an exported model's config.json says, and what a server of a run goes by."""

from pathlib import Path
from typing import Any

from trainmark.clickdata import feature_spec, identity
from trainmark.clicklog.sources import criteo_format
from trainmark.errors import InputError
from trainmark.workloads.dlrm.crosses import cross_features
from trainmark.workloads.dlrm.runs import DlrmRun, Model, is_generated, score_offset


def description(cfg: DlrmRun) -> dict[str, Any]:
    """The network, its features in the order in which it takes them, and what they stand for."""
    model = cfg.model
    return {
        "model_type": "dlrm",
        "numerical_features": model.numerical_features,
        "table_rows": list(model.table_rows),
        "embedding_dim": model.embedding_dim,
        "table_widths": list(model.widths),
        **_crosses(model),
        **_bags(model),
        "bottom_mlp": list(model.bottom_mlp),
        "bottom_output": model.bottom_output,
        "top_mlp": list(model.top_mlp),
        **_interaction(model),
        "logit_offset": score_offset(cfg),
        "dataset": list(cfg.dataset),
    } | _names(cfg)


def _crosses(model: Model) -> dict[str, Any]:
    """The features of each cross, whose tables lie behind those of the features."""
    return {"crosses": list(map(cross_features, model.crosses))} if model.crosses else {}


def _bags(model: Model) -> dict[str, Any]:
    """How many ids a sample has of each feature, and what becomes of their rows; nothing if it has
    one of each."""
    if not model.has_bags:
        return {}
    return {"hotness": list(model.bag_sizes), "pooling": model.pooling}


def _interaction(model: Model) -> dict[str, Any]:
    """Which one, and the sizes that it has of its own."""
    sizes: dict[str, Any] = {}
    if model.interaction == "dcn":
        sizes["cross_layers"], sizes["cross_rank"] = model.cross_shape
    if model.interaction == "projection":
        branch1, branch2 = model.branches
        sizes = {"branch1_mlp": list(branch1), "branch2_mlp": list(branch2)}
    return {"interaction": model.interaction} | sizes


def _names(cfg: DlrmRun) -> dict[str, Any]:
    """The names of the features, if the dataset is still there."""
    if cfg.data is None or is_generated(cfg.data):
        return {}
    try:
        spec = feature_spec.read(feature_spec.path_of(Path(cfg.data), "train"))
    except InputError:
        return {}
    return {
        "numerical": list(spec.numerical),
        "categorical": list(spec.categorical),
        "columns": _columns(cfg),
    }


def _columns(cfg: DlrmRun) -> dict[str, list[str]]:
    """The names that the features have in the log, in the same order."""
    found = identity.columns(cfg.dataset)
    names = {
        kind: [column.name for column in found if column.kind == kind]
        for kind in ("numerical", "categorical")
    }
    if tuple(names["categorical"]) == criteo_format.NAMES:
        names["numerical"] = [f"I{i + 1}" for i in range(len(names["numerical"]))]
    return names
