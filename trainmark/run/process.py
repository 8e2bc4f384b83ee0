"""This process: its device, its place among the ranks, and what holds for all of it."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from trainmark import workloads
from trainmark.config import AnyRun, Run
from trainmark.distributed import launched
from trainmark.distributed import mesh as meshes
from trainmark.distributed.heartbeat import Heartbeat
from trainmark.distributed.mesh import Mesh
from trainmark.hardware import backends
from trainmark.hardware.allocator import keep_freed_memory
from trainmark.run.memory import this_cluster
from trainmark.training.precision import set_matmul_precision


@contextmanager
def joined(cfg: Run) -> Iterator[Mesh]:
    """This process's device, and its ranks where a launcher started several.

    The ranks part after a success only: one that failed does not wait for the others.
    """
    kind = backends.chosen(cfg.device)
    device = meshes.local_device(kind)
    if kind != "cpu":
        backends.make_current(device)
    ranks = meshes.launched_ranks()
    heartbeat, begins = None, not dist.is_initialized()
    if begins and ranks > 1:
        launched.join(backends.collectives(device))
        heartbeat = Heartbeat()
    yield meshes.build(device, workloads.definition(cfg).mesh_axes(cfg, ranks))
    if heartbeat is not None:
        heartbeat.stop()
    if begins and dist.is_initialized():  # by the lines above, or by an engine for itself alone
        dist.destroy_process_group()


def resolved_here(cfg: AnyRun, mesh: Mesh) -> AnyRun:
    """Resolve for the machine that this process runs on."""
    kind = backends.kind_of(mesh.device)
    return workloads.resolve(dataclasses.replace(cfg, device=kind or "cpu"), this_cluster(mesh))


def set_process_options(cfg: Run, mesh: Mesh) -> None:
    """Set what holds for the whole process."""
    set_matmul_precision(cfg.precision)
    if mesh.device.type == "cpu":
        keep_freed_memory()
