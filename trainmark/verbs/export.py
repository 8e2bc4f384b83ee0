"""`trainmark export`: a checkpoint in the layout of other software."""

import shutil
from pathlib import Path

import psutil

from trainmark import checksums, workloads
from trainmark.checkpoint.manifest import MANIFEST
from trainmark.checkpoint.run_tensors import weight_shapes
from trainmark.contract import MODEL_FOLDER
from trainmark.errors import InputError, require
from trainmark.files import building
from trainmark.formatting import readable_size
from trainmark.progress import say
from trainmark.run import run_folder

PACKAGES = ("onnx", "onnxscript")  # of the extra, for --format onnx


def export(folder: Path, layout: str, output: Path | None, checkpoint: str | None = None) -> Path:
    """Write a checkpoint of a run (see `find_checkpoint`). Returns the folder that was written.

    The workload knows the layouts (`contract.Definition.exporters`). What is there already is left
    as it is: whoever was killed as an export ended may start it again.
    """
    cfg = run_folder.read_config(folder)
    layouts = workloads.definition(cfg).exporters()
    if layout not in layouts:
        raise _not_offered(cfg.name, layout, list(layouts), trained=folder / MODEL_FOLDER)
    if layout == "onnx":
        require("--format onnx", *PACKAGES, extra="export")
    target = output or folder / ("export" if layout == "safetensors" else f"export-{layout}")
    if target.exists() and not target.is_dir():
        raise InputError(f"{target} is a file; expected a folder to write to.")
    path = run_folder.find_checkpoint(folder, checkpoint)
    made_of = {"format": layout, "manifest": checksums.of_file(path / MANIFEST)}
    if target.exists() and any(target.iterdir()):
        if checksums.is_made_of(target, made_of):
            say(f"{target} is an export of {path} already; nothing was done.")
            return target
        raise InputError(f"{target} is not empty. Give another --output.")
    sizes = [tensor.nbytes for tensor in weight_shapes(path).values()]
    if layout == "torch":
        _check_memory(cfg.name, sizes)
    with building(target, made_of) as partial:
        _check_disk(partial, sum(sizes))
        layouts[layout](cfg, path, partial)
    say(f"Exported {path} ({run_folder.role(path)}).")
    return target


def _not_offered(run: str, layout: str, offered: list[str], trained: Path) -> InputError:
    if layout == "safetensors" and trained.is_dir():
        return InputError(f"{run} needs no export: {trained} is its trained model.")
    if not offered:
        return InputError(f"{run} has no {layout} layout to export to in this version.")
    ways = " or ".join(f"--format {name}" for name in offered)
    return InputError(f"{run} cannot be exported with --format {layout}. Use {ways}.")


def _check_memory(run: str, sizes: list[int]) -> None:
    """torch.export.save has the whole model in memory, and two copies of the tensor it writes."""
    needed, free = sum(sizes) + 2 * max(sizes), psutil.virtual_memory().available
    if needed > free:
        raise InputError(
            f"{run} is too large for --format torch here: PyTorch holds such a program in memory, "
            f"which takes {readable_size(needed)}, and {readable_size(free)} are free. Use "
            "--format onnx or safetensors, which write one tensor at a time, or a larger machine."
        )


def _check_disk(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise InputError(
            f"The exported model needs {readable_size(needed)} and the disk has "
            f"{readable_size(free)} free. Free some space, or give an --output on another disk."
        )
