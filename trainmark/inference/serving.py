"""`trainmark serve`: finds out what folders hold, has them loaded, and serves them."""

import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainmark import checksums, workloads
from trainmark.config import Run, filled
from trainmark.contract import Definition
from trainmark.errors import InputError, require
from trainmark.files import read_json
from trainmark.hardware import backends
from trainmark.inference.options import ServeOptions
from trainmark.run import run_folder
from trainmark.scoring import Scorer, Served

if TYPE_CHECKING:  # it needs the extra
    from trainmark.inference.server.models import Source

PACKAGES = ("uvicorn", "httptools", "prometheus_client")
NAME = re.compile(r"[\w.-]+", re.ASCII)


def serve(options: ServeOptions) -> None:
    """Serve until the process is told to stop."""
    needed = PACKAGES if options.grpc_port is None else (*PACKAGES, "grpc")
    require("serve", *needed, extra="serve")
    from trainmark.inference.server import keys, process
    from trainmark.inference.server.listening import Listening

    if (options.tls_certificate is None) != (options.tls_key is None):
        raise InputError("--tls-certificate and --tls-key belong together: give both.")
    listening = Listening(
        host=options.host,
        port=options.port,
        grpc_port=options.grpc_port,
        api_keys=keys.read_keys(options.api_key) if options.api_key else (),
        certificate=options.tls_certificate,
        private_key=options.tls_key,
    )
    process.serve(sources(options), listening, options.limits, options.reload_every)


def sources(options: ServeOptions) -> "list[Source]":
    """The models that are to be served, each under its name."""
    from trainmark.inference.server.models import Source

    found: dict[str, Source] = {}
    for word in options.folders:
        given, _, path = ("", "", word) if Path(word).is_dir() else word.partition("=")
        folder = Path(path or word)
        workload, run = identify(folder)
        _check_scores(folder, workload, run, options.checkpoint)
        name = given or (run.name if run else folder.resolve().name)
        if not NAME.fullmatch(name):
            raise InputError(
                f"A model cannot be called {name!r}: a name has letters, digits and _.- only. "
                "Give NAME=DIR."
            )
        if name in found:
            raise InputError(f"Two models are called {name}. Give one another name: NAME=DIR.")
        found[name] = Source(
            name=name,
            newest=partial(_newest, folder, run, options),
            load=partial(_load, folder, workload, run, options),
        )
    if not found:
        raise InputError("serve needs a folder: that of a run, or one that trainmark export wrote.")
    return list(found.values())


def _check_scores(
    folder: Path, workload: Definition[Any], run: Run | None, checkpoint: str | None
) -> None:
    if workload.load_scorer is None:
        raise InputError(
            f"{folder} holds a {workload.name} model, which is no model to score rows "
            "with; trainmark export makes a folder of it that text generation servers load."
        )
    if run is None and checkpoint:
        raise InputError(
            f"--checkpoint chooses among those of a run; {folder} is an exported model."
        )


@dataclass(frozen=True)
class Found:
    """What a folder holds now."""

    checkpoint: Path | None
    """The checkpoint; None for an exported model."""
    written: tuple[tuple[int, int, int], ...]
    """Inode, size and time of each file, which tell a newer model."""


def _newest(folder: Path, run: Run | None, options: ServeOptions) -> Found:
    path = run_folder.find_checkpoint(folder, options.checkpoint) if run else None
    # Of what is half written, the first files do not change any more; so all of them count.
    files = (file for file in sorted((path or folder).rglob("*")) if file.is_file())
    seen = [file.stat() for file in (path or folder / "config.json", *files)]
    return Found(path, tuple((one.st_ino, one.st_size, one.st_mtime_ns) for one in seen))


def _load(
    folder: Path,
    workload: Definition[Any],
    run: Run | None,
    options: ServeOptions,
    found: Found,
) -> Scorer:
    """The model in a folder: a checkpoint of a run, or what `trainmark export` wrote."""
    if run is None:
        checksums.check(folder)
    scorer = filled(workload.load_scorer)(
        Served(
            folder=folder,
            run=run,
            checkpoint=found.checkpoint,
            device=device(options.device),
            data=options.data,
            values=options.values,
        )
    )
    scorer.score(
        [scorer.read(scorer.example)]
    )  # what is compiled at first use, no client waits for
    if path := found.checkpoint:
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
