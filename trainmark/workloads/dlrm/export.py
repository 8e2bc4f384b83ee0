"""A trained DLRM as a folder that other software loads: the model, and a description of it."""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainmark.checkpoint.run_tensors import read_weights, weight_shapes
from trainmark.clickdata import feature_spec, identity
from trainmark.clicklog import preparation
from trainmark.clicklog.sources import criteo_format
from trainmark.errors import InputError
from trainmark.interop.programs import save_program
from trainmark.interop.shards import write_shards
from trainmark.progress import bytes_bar, say
from trainmark.workloads.dlrm import standalone
from trainmark.workloads.dlrm.runs import DlrmRun, Model, is_generated, score_offset
from trainmark.workloads.dlrm.sizes import (
    branches,
    cross_features,
    cross_layers,
    cross_rank,
    has_bags,
    hotness,
    widths,
)

Load = Callable[[list[str]], dict[str, Tensor]]

ONNX_README = """A DLRM that Trainmark trained, for ONNX runtimes:

    import onnxruntime
    session = onnxruntime.InferenceSession("model.onnx")
    (clicks,) = session.run(None, {"numerical": numerical, "categorical": categorical})

Of a large model, model.onnx.data holds the weights; it has to lie beside model.onnx.
"""
SAFETENSORS_README = """A DLRM that Trainmark trained, with plain PyTorch that loads it:

    import model
    dlrm = model.load(".")
    clicks = dlrm(numerical, categorical)

It needs torch and safetensors. For a GPU, model.load(".", "cuda").
"""
TORCH_README = """A DLRM that Trainmark trained, as a program that PyTorch loads:

    import torch
    model = torch.export.load("model.pt2").module()
    clicks = model(numerical, categorical)

For a GPU, torch.export.passes.move_to_device_pass(torch.export.load("model.pt2"), "cuda").module().
"""
INPUTS = """
numerical    float32 [batch, features]: as in the prepared dataset
categorical  int64 [batch, features]: the numbers that its vocabularies give, from 0. Of a feature
             that has several, as many columns as config.json says (hotness), -1 where there is none
clicks       float32 [batch]: the probability of a click

Any batch will do. config.json has the order of the features, their names in the log that was
prepared (columns), and the rows of the tables.
"""
RAW_VALUES = """
preparation/ has what turns raw values into these inputs: the vocabularies (value, id and count as
Parquet; a null is a missing value), and how each column is read (vocabulary.json). With it, of the
safetensors layout,

    trainmark serve . --host ...                           takes raw values over HTTP
    trainmark predict . --input FILES --output FILE        scores raw files

and of any layout, where Trainmark is installed, rows of values in the order of encoder.numerical
and encoder.categorical, None where one is missing, become inputs by

    from pathlib import Path
    from trainmark.clicklog.raw_values import open_dataset
    encoder = open_dataset(Path("preparation"))
    numbers, categorical = encoder.encode(raw_numbers, raw_categories)
    numerical = numbers.astype("float32")
"""

# --- the layouts; tables keep the types that they were trained in


def export_safetensors(cfg: DlrmRun, checkpoint_path: Path, folder: Path) -> None:
    """Weights, and plain PyTorch that loads them.

    Never more than one file's tensors are in memory, or one table, if that is larger.
    """
    with _reading(checkpoint_path) as (shapes, load):
        write_shards(folder, {name: tensor.nbytes for name, tensor in shapes.items()}, load)
    _describe(cfg, folder, SAFETENSORS_README)
    shutil.copyfile(standalone.__file__, folder / "model.py")


def export_onnx(cfg: DlrmRun, checkpoint_path: Path, folder: Path) -> None:
    """An ONNX model. Never more than one table is in memory, unless the model is small."""
    from trainmark.interop.onnx_files import write_model
    from trainmark.workloads.dlrm import onnx_graph

    config = description(cfg)
    with _reading(checkpoint_path) as (shapes, load):
        graph = onnx_graph.build(config, shapes)
        ends = onnx_graph.inputs(config), onnx_graph.outputs()
        write_model(folder / "model.onnx", graph, *ends, load, told=config.get("columns", {}))
    _describe(cfg, folder, ONNX_README)


def export_torch(cfg: DlrmRun, checkpoint_path: Path, folder: Path) -> None:
    """A `torch.export` program. The whole model is in memory."""
    with _reading(checkpoint_path) as (shapes, load):
        model = standalone.Dlrm(description(cfg), load(list(shapes))).eval()
    numerical = torch.zeros(2, cfg.model.numerical_features)
    ids = torch.zeros(2, standalone.num_ids(model.config), dtype=torch.int64)
    batch = {0: torch.export.Dim("batch")}
    program = torch.export.export(model, (numerical, ids), dynamic_shapes=(batch, batch))
    save_program(program, folder / "model.pt2")
    _describe(cfg, folder, TORCH_README)


LAYOUTS = {"safetensors": export_safetensors, "onnx": export_onnx, "torch": export_torch}


# --- what they share


@contextmanager
def _reading(checkpoint_path: Path) -> Iterator[tuple[dict[str, Tensor], Load]]:
    """The model's tensors by name, on the meta device, and what loads some of them.

    A bar shows how much was loaded.
    """
    shapes = weight_shapes(checkpoint_path)
    with bytes_bar("exporting", sum(tensor.nbytes for tensor in shapes.values())) as advance:

        def load(names: list[str]) -> dict[str, Tensor]:
            tensors = read_weights(checkpoint_path, names)
            advance(sum(tensor.nbytes for tensor in tensors.values()))
            return tensors

        yield shapes, load


def _describe(cfg: DlrmRun, folder: Path, how_to_run: str) -> None:
    described = description(cfg)
    (folder / "config.json").write_text(json.dumps(described, indent=2) + "\n")
    named = "numerical" in described
    complete = named and preparation.carry(Path(str(cfg.data)), folder / preparation.FOLDER)
    (folder / "README.txt").write_text(how_to_run + INPUTS + (RAW_VALUES if complete else ""))
    if "numerical" not in described and cfg.data is not None and not is_generated(cfg.data):
        say(
            f"{cfg.data} cannot be read here, so that config.json does not name the features in "
            "their order. Export where the dataset is to have them."
        )


def description(cfg: DlrmRun) -> dict[str, Any]:
    """The network, its features in the order in which it takes them, and what they stand for."""
    model = cfg.model
    return {
        "model_type": "dlrm",
        "numerical_features": model.numerical_features,
        "table_rows": list(model.table_rows),
        "embedding_dim": model.embedding_dim,
        "table_widths": list(widths(model)),
        **_crosses(model),
        **_bags(model),
        "bottom_mlp": list(model.bottom_mlp),
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
    if not has_bags(model):
        return {}
    return {"hotness": list(hotness(model)), "pooling": model.pooling}


def _interaction(model: Model) -> dict[str, Any]:
    """Which one, and the sizes that it has of its own."""
    sizes: dict[str, Any] = {}
    if model.interaction == "dcn":
        sizes = {"cross_layers": cross_layers(model), "cross_rank": cross_rank(model)}
    if model.interaction == "projection":
        branch1, branch2 = branches(model)
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
