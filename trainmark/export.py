"""`trainmark export`: a checkpoint in the layout of other software."""

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from trainmark import runner
from trainmark.errors import InputError


def export(folder: Path, layout: str, output: Path | None) -> Path:
    """Write the newest checkpoint of a run. Returns the folder that was written.

    A workload that can be exported has a module `huggingface` with
    `export(cfg, checkpoint_path, folder)`.
    """
    cfg = runner.read_config(folder)
    target = output or folder / "export"
    name = f"trainmark.workloads.{cfg.workload}.huggingface"
    if find_spec(name) is None:
        raise InputError(f"{cfg.name} has no {layout} layout to export to in this version.")
    if target.exists() and any(target.iterdir()):
        raise InputError(f"{target} is not empty. Give another --output.")
    import_module(name).export(cfg, runner.find_checkpoint(folder), target)
    return target
