"""Dropout whose choice is a hash of the seed, the layer and the sample.

No generator has a state that could differ: neither ranks, micro-batches nor CUDA graphs change what
is dropped of a sample, and a run that is continued drops what it would have dropped.

Shapes: B samples, N outputs of a layer.
"""

import torch
from torch import Tensor

from trainmark.kernels.compiled import has_compiled
from trainmark.kernels.rounding import random_bits
from trainmark.training.seeding import stream_seed

_CHOICES = 2**16  # each number has 16 random bits; a hash has 32


class Dropout:
    """Replaces a share of a layer's outputs by zeros, and scales the rest up to keep the mean. Does
    nothing where gradients are off, as in prediction.

    Args:
        share: what part is dropped, below 1; the nearest multiple of 1 / 65536.
        key: what the choice depends on besides the sample, such as a seed and a layer's name.
    """

    samples_B: Tensor
    """int64: the numbers of the samples in the run. The trainer sets them for each batch."""

    def __init__(self, share: float, *key: int | str) -> None:
        self.dropped = round(share * _CHOICES)
        """How many of the 65536 values of the random bits are dropped."""
        self._key = key

    @property
    def is_on(self) -> bool:
        return self.dropped > 0 and torch.is_grad_enabled()

    @torch.compiler.disable  # every batch brings other sample numbers
    def __call__(self, x_BN: Tensor, layer: int = 0) -> Tensor:
        if not self.is_on:
            return x_BN
        if has_compiled(x_BN):
            return x_BN * self._factors(x_BN.shape[1], layer)
        # A product: on a CPU torch.where takes several times as long.
        return x_BN * self._scale * self.kept(x_BN.shape[1], layer).to(x_BN.dtype)

    def kept(self, width: int, layer: int = 0) -> Tensor:
        """[B, N] whether a number is passed on."""
        # Filled in: no CUDA graph can hold a copy from the host.
        key = torch.full((), self._seed(layer), dtype=torch.int32, device=self.samples_B.device)
        bits = random_bits(key, self.samples_B, -(-width // 2)).view(torch.int16)
        return bits[:, :width] >= self._first_kept

    def _factors(self, width: int, layer: int) -> Tensor:
        """[B, N] the same as factors, by a kernel."""
        from trainmark.kernels import cpu_dropout

        seed = self._seed(layer)
        return cpu_dropout.factors(seed, self.samples_B, width, self._first_kept, self._scale)

    def _seed(self, layer: int) -> int:
        return stream_seed(*self._key, layer) % 2**31

    @property
    def _scale(self) -> float:
        return _CHOICES / (_CHOICES - self.dropped)

    @property
    def _first_kept(self) -> int:
        """The first value of the random bits, read as a signed number, that is kept."""
        return self.dropped - _CHOICES // 2
