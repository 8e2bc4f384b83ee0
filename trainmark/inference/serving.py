"""`trainmark serve`: finds out what a folder holds, has it loaded, and serves it."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from trainmark import checksums, workloads
from trainmark.config import Run
from trainmark.contract import Definition, Scorer, Served
from trainmark.errors import InputError
from trainmark.files import read_json
from trainmark.hardware import backends
from trainmark.inference.options import ServeOptions
from trainmark.run import run_folder

PACKAGES = ("fastapi", "uvicorn")


def serve(options: ServeOptions) -> None:
    """Serve until the process is told to stop."""
    if missing := [name for name in PACKAGES if find_spec(name) is None]:
        raise InputError(f"serve needs {' and '.join(missing)}: pip install 'trainmark[serve]'.")
    from trainmark.inference import server

    server.serve(load(options), options.host, options.port)


def load(options: ServeOptions) -> Scorer:
    """The model in a folder: a checkpoint of a run, or what `trainmark export` wrote."""
    workload, run = identify(options.folder)
    if options.checkpoint and run is None:
        raise InputError(
            f"--checkpoint chooses among those of a run; {options.folder} is an exported model."
        )
    if workload.load_scorer is None:
        raise InputError(
            f"{options.folder} holds a {workload.name} model, which is no model to score rows "
            "with; trainmark export makes a folder of it that text generation servers load."
        )
    path = run_folder.find_checkpoint(options.folder, options.checkpoint) if run else None
    if run is None:
        checksums.check(options.folder)
    scorer = workload.load_scorer(
        Served(
            folder=options.folder,
            run=run,
            checkpoint=path,
            device=device(options.device),
            data=options.data,
            values=options.values,
        )
    )
    if path:
        scorer.facts["checkpoint"] = f"{path.name}, {run_folder.role(path)}"
    return scorer


def identify(folder: Path) -> tuple[Definition[Any], Run | None]:
    """The workload, and the run's configuration if the folder is a run's."""
    described = read_json(folder / "config.json")
    if described.get("workload") in workloads.DEFINITIONS:
        run = run_folder.read_config(folder)
        return workloads.definition(run), run
    for workload in workloads.DEFINITIONS.values():
        if described.get("model_type") in workload.exported_types:
            return workload, None
    raise InputError(
        f"{folder} holds no model: expected the output folder of a run, or one that "
        "trainmark export wrote."
    )


def device(kind: str) -> str:
    """`--device` as PyTorch names it."""
    return backends.BACKENDS[backends.chosen(kind)].torch_type
