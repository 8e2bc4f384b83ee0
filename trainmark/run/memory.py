"""How much memory a run needs, counted on the meta device, and whether this machine has it."""

import dataclasses
import os
from collections.abc import Iterable
from functools import partial

import psutil
import torch
from torch import Tensor

from trainmark import workloads
from trainmark.config import Run, or_synthetic
from trainmark.contract import AnyWorkload, DeviceBytes
from trainmark.distributed import mesh as meshes
from trainmark.distributed.mesh import Mesh
from trainmark.hardware import backends, devices
from trainmark.hardware.devices import Cluster
from trainmark.hardware.memory import (
    MemoryPlan,
    check_fits,
    check_host_fits,
    sum_of,
    what_fits,
)

_SHARE_FOR_COPIES = 0.75  # the rest is for readers, and for the kernel's cache of files


def plan_memory(cfg: Run, workload: AnyWorkload, mesh: Mesh) -> MemoryPlan:
    """Build this rank's share of the model without memory, and count."""
    shapes_only = Mesh(torch.device("meta"), mesh.axes, mesh.device_mesh)
    parts = workload.parallelize(workload.build_model(cfg), shapes_only, cfg)
    trainer = workload.build_trainer(parts, shapes_only, cfg)
    held = (
        workload.device_bytes(trainer)
        if workload.device_bytes
        else DeviceBytes(
            weights=_bytes(trainer.weights().values()),
            gradients=_bytes(p for part in parts for p in part.parameters()),
            optimizer=_bytes(trainer.state_dict().values()),
        )
    )
    activations = workload.activation_bytes(cfg)
    return MemoryPlan(**dataclasses.asdict(held), activations=activations)


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def dry_run(cfg: Run, cluster: Cluster) -> tuple[Run, MemoryPlan]:
    """Resolve and build on the meta device; needs no device."""
    cfg = workloads.resolve(or_synthetic(cfg), cluster)
    axes = workloads.definition(cfg).mesh_axes(cfg, cluster.world)
    with meshes.fake(axes) as mesh:
        return cfg, plan_memory(cfg, workloads.load(cfg.workload), mesh)


def advice(cfg: Run, cluster: Cluster, available: float) -> str:
    """A sentence, after a space, with flags that make a run fit; empty if there are none."""
    smaller = workloads.definition(cfg).smaller(cfg)
    return what_fits(smaller, lambda run: dry_run(run, cluster)[1], available)


# --- on this machine


def this_cluster(mesh: Mesh) -> Cluster:
    """The machines that the ranks of this run are on."""
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", str(mesh.world_size)))
    key = devices.identify(mesh.device).key
    return Cluster(key, mesh.world_size // per_node, per_node)


def _ranks_here(mesh: Mesh) -> slice:
    """The ranks of this machine."""
    per_node = this_cluster(mesh).devices
    first = mesh.rank // per_node * per_node
    return slice(first, first + per_node)


def check_memory(
    cfg: Run, workload: AnyWorkload, mesh: Mesh, *, training: bool = True
) -> tuple[MemoryPlan, int]:
    """Refuse, before anything is allocated, a run that cannot fit the devices or their host.

    Returns:
        What this rank needs, and the bytes that are left of this machine's host memory.
    """

    def needed(plan: MemoryPlan) -> MemoryPlan:
        """Prediction needs hardly any activations: none outlives its layer."""
        return plan if training else dataclasses.replace(plan, activations=0)

    plan = needed(plan_memory(cfg, workload, mesh))
    # Before the ranks compare their plans: none of them has allocated anything yet.
    on_host = min(psutil.virtual_memory().available, devices.host_memory_bytes())
    here = _ranks_here(mesh)
    hint = partial(_advice_here, cfg, workload, mesh) if training else lambda available: ""
    if mesh.device.type == "cpu":  # whose memory all ranks of a machine share
        plans = workload.plan_devices(cfg)
        own = needed(plans[mesh.rank]) if plans else plan
        of_machine = sum_of(meshes.of_all_ranks(own)[here])
        ranks = here.stop - here.start
        check_fits(of_machine, on_host, cfg.name, "this machine", ranks=ranks, advice=hint)
        on_host -= of_machine.total
    else:
        available = backends.free_bytes(mesh.device)
        check_fits(plan, available, cfg.name, devices.identify(mesh.device).name, advice=hint)
    kept = sum(workload.host_bytes(cfg)[here])
    check_host_fits(kept, on_host, cfg.name)
    return plan, on_host - kept


def has_room_for_copies(own_bytes: int, bytes_left: int, mesh: Mesh) -> bool:
    """Whether every machine can keep a copy of what its ranks save; all ranks must call this.

    Args:
        own_bytes: size of this rank's copy.
        bytes_left: unused host memory of this machine.
    """
    of_machine = sum(meshes.of_all_ranks(own_bytes)[_ranks_here(mesh)])
    return not mesh.any(of_machine > _SHARE_FOR_COPIES * bytes_left)


def _advice_here(cfg: Run, workload: AnyWorkload, mesh: Mesh, available: float) -> str:
    if mesh.device.type == "cpu" and mesh.world_size > 1:
        return ""  # what all ranks of a machine need, no rank knows alone
    cluster = this_cluster(mesh)

    def needed(run: Run) -> MemoryPlan:
        return plan_memory(workloads.resolve(run, cluster), workload, mesh)

    return what_fits(workloads.definition(cfg).smaller(cfg), needed, available)
