"""A multi-layer perceptron: layer by layer in plain torch, or by kernels that take them together.

Shapes: B samples, M inputs and N outputs of a layer.
"""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from trainmark.kernels.fp8_mlp import Fp8Weight, encode_weights, fp8_layers, fp8_relu_layers
from trainmark.kernels.relu_mlp import relu_mlp
from trainmark.training.dropout import Dropout


class Mlp(nn.Sequential):
    """Linear layers with ReLUs between them."""

    def __init__(self, widths: Sequence[int], *, last_relu: bool) -> None:
        layers: list[nn.Module] = []
        for fan_in, fan_out in itertools.pairwise(widths):
            layers += [nn.Linear(fan_in, fan_out), nn.ReLU()]
        super().__init__(*(layers if last_relu else layers[:-1]))
        self.fused_dtype: torch.dtype | None = None
        """Compute with the kernel, in this type; None: layer by layer, as autocast says."""
        self.fp8 = False
        """The kernel's large layers in fp8."""
        self.dropout = Dropout(0.0)
        """Dropout of the hidden layers' outputs."""
        self._kept_codes: list[Fp8Weight] = []
        """For prediction, the result of `fp8_weights`, computed once."""

    @property
    def has_fused_loss(self) -> bool:
        """Whether `hidden` and `click_loss` can take the place of `forward` in training."""
        return self.fused_dtype is not None and len(self) > 1

    def forward(self, x_BM: Tensor) -> Tensor:
        if self.fused_dtype is not None:
            return self._fused(x_BM, self._linears(), last_relu=isinstance(self[-1], nn.ReLU))
        if not self.dropout.is_on:
            y_BN: Tensor = super().forward(x_BM)
            return y_BN
        for place, layer in enumerate(self):
            x_BM = layer(x_BM)
            if isinstance(layer, nn.ReLU) and place < len(self) - 1:
                x_BM = self.dropout(x_BM, place // 2)
        return x_BM

    def hidden(self, x_BM: Tensor, codes: list[Fp8Weight] | None = None) -> Tensor:
        """What the last layer is given. What comes back must be masked as its ReLU is.

        `codes` are what `fp8_weights` gave, if it was called already.
        """
        linears = self._linears()[:-1]
        return self._fused(x_BM, linears, last_relu=True, comes_masked=True, codes=codes)

    def fp8_weights(self) -> list[Fp8Weight]:
        """The weights of the layers that are computed in fp8."""
        large = self._linears()[: self._fp8_layers()]
        return encode_weights([linear.weight for linear in large]) if large else []

    @torch.no_grad()
    def settle(self, dtype: torch.dtype) -> None:
        """For prediction: keep weights in the types that every call would cast them to."""
        self._kept_codes = self._kept_codes or self.fp8_weights()
        self.to(dtype)

    @torch.no_grad()
    def fill_up_inputs(self, step: int) -> None:
        """For prediction: pad the inputs with zero columns to a multiple of `step`."""
        first = self._linears()[0]
        missing = -first.weight.shape[1] % step
        if missing:
            first.weight = nn.Parameter(pad(first.weight, (0, missing)))

    @property
    def inputs(self) -> int:
        """Columns that it takes."""
        return int(self._linears()[0].weight.shape[1])

    def _fused(
        self,
        x_BM: Tensor,
        linears: list[nn.Linear],
        *,
        last_relu: bool,
        comes_masked: bool = False,
        codes: list[Fp8Weight] | None = None,
    ) -> Tensor:
        weights = [linear.weight for linear in linears]
        biases = [linear.bias for linear in linears]
        x_BM = x_BM.to(self.fused_dtype)
        large = self._fp8_layers()
        codes = codes or self._kept_codes or (self.fp8_weights() if large else [])
        for begin, end in self._pieces(len(linears), large):
            if begin < large:
                x_BM = fp8_relu_layers(
                    x_BM, weights[begin:end], biases[begin:end], codes[begin:end]
                )
            else:
                is_last = end == len(linears)
                x_BM = relu_mlp(
                    x_BM,
                    weights[begin:end],
                    biases[begin:end],
                    last_relu or not is_last,
                    comes_masked=comes_masked and is_last,
                )
            if end < len(self._linears()):
                x_BM = self.dropout(x_BM, end - 1)
        return x_BM

    def _pieces(self, layers: int, large: int) -> list[tuple[int, int]]:
        """Layers that a kernel takes together: the large ones and the others; with dropout behind
        each of them, one by one."""
        ends = range(1, layers + 1) if self.dropout.is_on else sorted({large, layers})
        return [(a, b) for a, b in itertools.pairwise([0, *ends]) if a < b]

    def _fp8_layers(self) -> int:
        """How many of the first layers are computed in fp8, the same for `forward` and `hidden`."""
        return fp8_layers([linear.weight for linear in self._linears()[:-1]]) if self.fp8 else 0

    def _linears(self) -> list[nn.Linear]:
        return [layer for layer in self if isinstance(layer, nn.Linear)]
