"""`trainmark export`: a checkpoint in the layout of other software."""

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from trainmark import runner
from trainmark.clicklog.folder import building
from trainmark.errors import InputError


def export(folder: Path, layout: str, output: Path | None) -> Path:
    """Write the newest checkpoint of a run. Returns the folder that was written.

    A workload that can be exported has a module `export` with a function of that name:
    `export(cfg, checkpoint_path, folder)`.
    """
    cfg = runner.read_config(folder)
    target = output or folder / "export"
    name = f"trainmark.workloads.{cfg.workload}.export"
    if find_spec(name) is None:
        trained = folder / "model"
        if trained.is_dir():
            raise InputError(f"{cfg.name} needs no export: {trained} is its trained model.")
        raise InputError(f"{cfg.name} has no {layout} layout to export to in this version.")
    if target.exists() and not target.is_dir():
        raise InputError(f"{target} is a file; expected a folder to write to.")
    if target.exists() and any(target.iterdir()):
        raise InputError(f"{target} is not empty. Give another --output.")
    checkpoint = runner.find_checkpoint(folder)
    with building(target) as partial:
        import_module(name).export(cfg, checkpoint, partial)
    return target
