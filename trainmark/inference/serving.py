"""`trainmark serve`: finds out what a folder holds, has it loaded, and serves it."""

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from trainmark import workloads
from trainmark.errors import InputError
from trainmark.files import read_json
from trainmark.inference.options import ServeOptions
from trainmark.inference.scorer import Scorer, Served

PACKAGES = ("fastapi", "uvicorn")
EXPORTED = {"dlrm": "dlrm", "distilbert": "distilbert", "bert": "distilbert", "llama": "llama3"}
"""What config.json of an exported model calls it -> the workload."""


def serve(options: ServeOptions) -> None:
    """Serve until the process is told to stop."""
    if missing := [name for name in PACKAGES if find_spec(name) is None]:
        raise InputError(f"serve needs {' and '.join(missing)}: pip install 'trainmark[serve]'.")
    from trainmark.inference import server

    server.serve(load(options), options.host, options.port)


def load(options: ServeOptions) -> Scorer:
    """The model in a folder: a run's newest checkpoint, or what `trainmark export` wrote."""
    workload, run = _identify(options.folder)
    module = f"trainmark.workloads.{workload}.serving"
    if find_spec(module) is None:
        raise InputError(
            f"{options.folder} holds a {workload} model, which is no model to score rows with; "
            "trainmark export makes a folder of it that text generation servers load."
        )
    return import_module(module).load(
        Served(
            folder=options.folder,
            run=run,
            device=_device(options.device),
            data=options.data,
            values=options.values,
        )
    )


def _identify(folder: Path) -> tuple[str, object]:
    """The workload, and the run's configuration if the folder is a run's."""
    described = read_json(folder / "config.json")
    if described.get("workload") in workloads.NAMES:
        from trainmark.run import run_folder

        return described["workload"], run_folder.read_config(folder)
    if described.get("model_type") in EXPORTED:
        return EXPORTED[described["model_type"]], None
    raise InputError(
        f"{folder} holds no model: expected the output folder of a run, or one that "
        "trainmark export wrote."
    )


def _device(kind: str) -> str:
    import torch

    available = torch.cuda.is_available()
    if kind == "cuda" and not available:
        raise InputError("--device cuda: PyTorch finds no CUDA device here. Use --device cpu.")
    return "cuda" if kind != "cpu" and available else "cpu"
