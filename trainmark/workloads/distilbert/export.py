"""A trained classifier as one file that runs without Trainmark and without `transformers`.

`transformers` builds the network once more, from the names that it has for our weights, and PyTorch
writes down what it computes. For `transformers` itself nothing is to be exported: a run's folder
`model` is in its layout.
"""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, cast

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from trainmark.checkpoint.run_tensors import read_weights
from trainmark.errors import require
from trainmark.interop.programs import save_program
from trainmark.workloads.distilbert import layouts, weights
from trainmark.workloads.distilbert.runs import DistilbertRun

INPUTS = ("input_ids", "attention_mask")

ONNX_README = """A sentence classifier that Trainmark trained, for ONNX runtimes:

    import onnxruntime
    session = onnxruntime.InferenceSession("model.onnx")
    (logits,) = session.run(None, {"input_ids": input_ids, "attention_mask": attention_mask})
"""
TORCH_README = """A sentence classifier that Trainmark trained, as a program that PyTorch loads:

    import torch
    model = torch.export.load("model.pt2").module()
    logits = model(input_ids, attention_mask)

For a GPU, torch.export.passes.move_to_device_pass(torch.export.load("model.pt2"), "cuda").module().
"""
SHAPES = """
input_ids       int64 [batch, length]: tokens as its tokenizer gives them, filled up with 0
attention_mask  int64 [batch, length]: 1 for a token, 0 for what fills up
logits          float32 [batch, {labels}]: of the classes

Any batch will do, and any length up to {positions}. Tokenizer files lie here if the run had any.
"""


def export_onnx(cfg: DistilbertRun, checkpoint_path: Path, folder: Path) -> None:
    """An ONNX model."""
    # PyTorch's fused attention becomes twice as many operators as the plain one.
    program = _program(cfg, checkpoint_path, attention="eager")
    named = {0: "batch", 1: "length"}
    with _quietly():
        made = torch.onnx.export(
            program,
            dynamo=True,
            input_names=INPUTS,
            output_names=["logits"],
            dynamic_shapes=(named, named),
            verbose=False,
        )
    cast(torch.onnx.ONNXProgram, made).save(folder / "model.onnx")
    _describe(cfg, folder, ONNX_README)


def export_torch(cfg: DistilbertRun, checkpoint_path: Path, folder: Path) -> None:
    """A `torch.export` program."""
    program = _program(cfg, checkpoint_path, attention="sdpa")
    save_program(program, folder / "model.pt2")
    _describe(cfg, folder, TORCH_README)


LAYOUTS = {"onnx": export_onnx, "torch": export_torch}


class Logits(nn.Module):
    """A classifier of `transformers` that gives nothing else."""

    def __init__(self, classifier: nn.Module) -> None:
        super().__init__()
        self.classifier = classifier

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.classifier(input_ids=input_ids, attention_mask=attention_mask).logits


def _program(
    cfg: DistilbertRun, checkpoint_path: Path, attention: Literal["eager", "sdpa"]
) -> ExportedProgram:
    require(f"Exporting {cfg.name}", "transformers", extra="text")
    from transformers import AutoConfig, AutoModelForSequenceClassification

    described = AutoConfig.for_model(**layouts.config_json(cfg.model))
    classifier = AutoModelForSequenceClassification.from_config(
        described, attn_implementation=attention
    )
    classifier.load_state_dict(weights.renamed(cfg.model, read_weights(checkpoint_path)))
    tokens = torch.zeros(2, min(8, cfg.model.positions), dtype=torch.int64)
    free = {0: Dim("batch"), 1: Dim("length", max=cfg.model.positions)}
    model = Logits(classifier).eval().requires_grad_(False)
    return torch.export.export(model, (tokens, tokens + 1), dynamic_shapes=(free, free))


def _describe(cfg: DistilbertRun, folder: Path, how_to_run: str) -> None:
    weights.save_description(folder, cfg.model, weights.tokenizer_folders(cfg))
    shapes = SHAPES.format(labels=cfg.model.labels, positions=cfg.model.positions)
    (folder / "README.txt").write_text(how_to_run + shapes)


@contextmanager
def _quietly() -> Iterator[None]:
    """Silence PyTorch's remarks, which are for people who write exporters."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logger.setLevel(level)
