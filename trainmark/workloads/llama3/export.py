"""A trained Llama as a folder that Hugging Face's `transformers` loads."""

from pathlib import Path

from trainmark.checkpoint import checkpoints
from trainmark.workloads.llama3 import huggingface
from trainmark.workloads.llama3.runs import LlamaRun


def export_safetensors(cfg: LlamaRun, checkpoint_path: Path, folder: Path) -> None:
    """Of a checkpoint, whatever ranks wrote it."""
    names = [name for name in checkpoints.names(checkpoint_path) if name.startswith("model.")]
    tensors = checkpoints.read(checkpoint_path, names)
    ours = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    huggingface.save(folder, cfg.model, cfg.sequence, ours)


LAYOUTS = {"safetensors": export_safetensors}
