"""Data-parallel gradients in one flat buffer, which one collective adds up over all ranks."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from trainmark.distributed.mesh import Mesh, all_reduce_sent_bytes


class FlatGradients:
    """The gradients of `parameters` as views of one buffer, with room for the loss behind them.

    Divide each rank's loss by the samples of all ranks first: then the sum over ranks is the mean
    over the global batch, whatever the ranks' shares.

    Args:
        extra: elements behind the gradients that are added up with them; the last is the loss.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], mesh: Mesh, extra: int = 1) -> None:
        self._mesh, self._parameters = mesh, list(parameters)
        sizes = [parameter.numel() for parameter in self._parameters]
        self.buffer = torch.zeros(sum(sizes) + extra, device=mesh.device)
        self.gradients: Tensor
        self.extra: Tensor
        self.gradients, self.extra = self.buffer.split([sum(sizes), extra])
        self._work: Any = None
        self._started = False
        self._parts = [
            part.view_as(parameter)
            for parameter, part in zip(self._parameters, self.gradients.split(sizes), strict=True)
        ]
        self._in_buffer = False
        self._put_into_buffer()

    @property
    def loss(self) -> Tensor:
        """The last of the extra elements; without any there is no loss, and asking is an error."""
        loss: Tensor = self.extra[-1]
        return loss

    def zero(self) -> None:
        """Begin a step: the backward passes add to zeros."""
        if not self._in_buffer:
            self._put_into_buffer()
        self.buffer.zero_()

    def leave_where_made(self) -> None:
        """Begin a step of one rank and one backward pass, where nothing needs to be added up.

        Gradients then stay in the tensors that autograd makes for them.
        """
        for parameter in self._parameters:
            parameter.grad = None
        self._in_buffer = False
        self.extra.zero_()

    def _put_into_buffer(self) -> None:
        for parameter, part in zip(self._parameters, self._parts, strict=True):
            parameter.grad = part
        self._in_buffer = True

    def tensors(self) -> list[Tensor]:
        """The gradients, in as few pieces as there are."""
        if self._in_buffer:
            return [self.gradients]
        return [p.grad for p in self._parameters if p.grad is not None]

    def reduce(self) -> None:
        """Replace gradients and loss by their sums over the data-parallel ranks."""
        self.start()
        self.wait()

    def start(self) -> None:
        """Begin to reduce; the buffer must be left alone until `wait`."""
        self._work, self._started = self._mesh.start_sum_over_dp(self.buffer), True

    def wait(self) -> None:
        """Wait for the sums; on a GPU the current stream waits, not the host."""
        if not self._started and self._mesh.dp_size > 1:
            raise RuntimeError("Sums over the ranks were waited for, but nothing began them.")
        if self._work is not None:
            self._work.wait()
        self._work, self._started = None, False

    @property
    def sent_bytes(self) -> int:
        """What a rank sends in one reduction."""
        return all_reduce_sent_bytes(self.buffer.nbytes, self._mesh.dp_size)
