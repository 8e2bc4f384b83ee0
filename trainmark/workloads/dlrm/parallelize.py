"""Which parts of DLRM a rank owns. For now one device owns all of it."""

from torch import nn

from trainmark.distributed.mesh import Mesh
from trainmark.errors import InputError
from trainmark.workloads.dlrm.runs import DlrmRun


def parallelize(model: nn.Module, mesh: Mesh, cfg: DlrmRun) -> list[nn.Module]:
    """The whole model on one device."""
    if mesh.world_size > 1:
        raise InputError(
            f"{cfg.name} trains on one device in this version. Received: {mesh.world_size} ranks. "
            "Start one process."
        )
    return [model]
