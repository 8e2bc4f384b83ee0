"""A trained Llama as a folder that Hugging Face's `transformers` loads."""

from pathlib import Path

from trainmark.checkpoint.run_tensors import read_weights
from trainmark.workloads.llama3 import huggingface
from trainmark.workloads.llama3.runs import LlamaRun


def export_safetensors(cfg: LlamaRun, checkpoint_path: Path, folder: Path) -> None:
    """Write a checkpoint, whatever ranks wrote it, for `transformers`."""
    huggingface.save(folder, cfg.model, cfg.sequence, read_weights(checkpoint_path))


LAYOUTS = {"safetensors": export_safetensors}
