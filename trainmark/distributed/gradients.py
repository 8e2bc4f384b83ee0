"""Data-parallel gradients in one flat buffer: one collective adds up what all ranks learned."""

from collections.abc import Iterable

import torch
from torch import nn

from trainmark.distributed.mesh import Mesh


class FlatGradients:
    """The gradients of `parameters` as views of one buffer, with the loss in its last element.

    Each rank's loss must be divided by the samples of all ranks already: the sum over ranks is
    then the mean over the global batch, whatever the ranks' shares.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], mesh: Mesh) -> None:
        self._mesh, parameters = mesh, list(parameters)
        sizes = [parameter.numel() for parameter in parameters]
        self.buffer = torch.zeros(sum(sizes) + 1, device=mesh.device)
        self.loss = self.buffer[-1]
        for parameter, part in zip(parameters, self.buffer[:-1].split(sizes), strict=True):
            parameter.grad = part.view_as(parameter)

    def zero(self) -> None:
        self.buffer.zero_()

    def reduce(self) -> None:
        """Replace gradients and loss by their sums over the data-parallel ranks."""
        self._mesh.add_over_dp(self.buffer)
