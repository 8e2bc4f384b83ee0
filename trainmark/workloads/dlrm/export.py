"""A trained DLRM as a folder that other software loads: the model, and a description of it."""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from trainmark.checkpoint.run_tensors import read_weights, weight_shapes
from trainmark.clicklog import preparation
from trainmark.interop.model_folder import write_shards
from trainmark.interop.programs import save_program
from trainmark.progress import rate_bar, say
from trainmark.workloads.dlrm import standalone
from trainmark.workloads.dlrm.description import description
from trainmark.workloads.dlrm.runs import DlrmRun, is_generated

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
    num_bytes = sum(tensor.nbytes for tensor in shapes.values())
    with rate_bar("exporting", num_bytes, "MB") as advance:

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
