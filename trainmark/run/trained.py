"""A trained run, loaded to predict: its weights on the devices of this machine."""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainmark import workloads
from trainmark.checkpoint import checkpoints
from trainmark.checkpoint.run_tensors import stored_weights
from trainmark.contract import AnyWorkload, Trainer
from trainmark.distributed.mesh import Mesh
from trainmark.hardware import backends
from trainmark.hardware.devices import Precision
from trainmark.run.loop import build_trainer
from trainmark.run.memory import check_memory
from trainmark.run.process import joined, resolved_here, set_process_options
from trainmark.run.run_folder import find_checkpoint, read_config


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A checkpoint of a run on the devices of this machine, ready to predict."""

    cfg: Any
    """The run's configuration, resolved for these devices."""
    workload: AnyWorkload
    mesh: Mesh
    trainer: Trainer[Any, Any]
    path: Path
    """The checkpoint's folder."""
    step: int
    samples: int
    """How many it was trained on."""


@contextmanager
def loaded(
    folder: Path,
    *,
    checkpoint: str | None = None,
    device: str = "auto",
    data: str | None = None,
    precision: Precision | None = None,
    check: Callable[[Any, AnyWorkload], None] = lambda cfg, workload: None,
) -> Iterator[Loaded]:
    """Load a run's weights, whatever devices they were trained on.

    Args:
        folder: the run's output folder.
        checkpoint: which of the run's (see `find_checkpoint`).
        device: as `--device` names it.
        data: another dataset than the run's own.
        precision: another than the run's own.
        check: refuses the resolved configuration before anything is read or allocated.
    """
    cfg = read_config(folder)
    definition = workloads.definition(cfg)
    if data or cfg.data:
        definition.check_data(cfg, data or cfg.data)
    cfg = definition.for_prediction(cfg)
    trained_on = cfg.device
    cfg = dataclasses.replace(
        cfg,
        device=device,
        data=data or cfg.data,
        precision=precision or cfg.precision,
        accumulate=None,
    )
    with joined(cfg) as mesh:
        if cfg.global_batch % (cfg.micro_batch * mesh.dp_size):  # its share may not divide
            cfg = dataclasses.replace(cfg, micro_batch=None)
        if backends.kind_of(mesh.device) != trained_on:  # whether compiling pays differs by device
            cfg = dataclasses.replace(cfg, compile=None)
        cfg = resolved_here(cfg, mesh)
        workload = workloads.load(cfg.workload)
        check(cfg, workload)
        path = find_checkpoint(folder, checkpoint)
        check_memory(cfg, workload, mesh, training=False)
        set_process_options(cfg, mesh)
        trainer = build_trainer(cfg, workload, mesh)
        state = checkpoints.load(path, stored_weights(trainer))
        yield Loaded(
            cfg=cfg,
            workload=workload,
            mesh=mesh,
            trainer=trainer,
            path=path,
            step=state["progress"]["step"],
            samples=state["data"]["samples"],
        )
