"""DCNv2's cross layers with four of their six GEMMs in fp8: those whose factors lie in rows.

Forward, x and V x are e4m3, back the gradients of W V x + b and of V x are e5m2; their codes are
written by the elementwise passes that make the numbers, beside those of 16 bits. Of these are the
gradients of V and W: sums over the batch, for which fp8 tensor cores would want everything
transposed. The chain of the x, and that of their gradients, is of 16 bits, too.

Scales are as in `fp8_mlp`: from some rows, anew in every step, with room above.

Shapes: B samples, N width of x, R rank.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from trainmark.kernels.cross_layers import crossed, gradients_of_layer
from trainmark.kernels.fp8_codes import CODES, GRADIENTS, WIDTH_STEP, Codes
from trainmark.kernels.fp8_mlp import (
    GRADIENT_ROOM,
    INPUT_ROOM,
    Fp8Weight,
    gemm,
    is_large,
    random_factor,
    sampled,
    sampled_scale,
)
from trainmark.kernels.relu_mlp import weight_gradient


def has_fp8(downs: Sequence[Tensor]) -> bool:
    """Whether it is worth it: layers of low rank, large, in whole steps."""
    return bool(downs) and all(
        is_large(down) and not any(size % WIDTH_STEP for size in down.shape) for down in downs
    )


def fp8_cross_layers(
    first_BN: Tensor, biases: Sequence[Tensor], encoded: Sequence[Fp8Weight], *weights: Tensor
) -> Tensor:
    """`cross_layers`, in training.

    Args:
        first_BN: of 16 bits.
        biases: b of each layer.
        encoded: of each of the weights.
        weights: W of all layers, then V of all.
    """
    result: Tensor = _Fp8CrossLayers.apply(first_BN, encoded, *biases, *weights)
    return result


class _Fp8CrossLayers(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, first_BN: Tensor, encoded: Sequence[Fp8Weight], *parameters: Tensor
    ) -> Tensor:
        layers, dtype = len(encoded) // 2, first_BN.dtype
        ups, downs, biases = encoded[:layers], encoded[layers:], parameters[:layers]
        x_BN, x8 = first_BN, _input_codes(first_BN, first_BN)
        x8.fill(first_BN)
        inputs, lows, outputs = [], [], []
        for layer, (up, down, bias_N) in enumerate(zip(ups, downs, biases, strict=True)):
            low_BR = gemm(x8.codes, down.w8_NM, (x8.scale, down.scale), dtype)
            low8 = _input_codes(low_BR, low_BR)
            low8.fill(low_BR)
            up_BN = gemm(
                low8.codes, up.w8_NM, (low8.scale, up.scale), dtype,
                bias=bias_N.to(dtype), relu=False,
            )  # fmt: skip
            inputs.append(x_BN)
            lows.append(low_BR)
            outputs.append(up_BN)
            if layer < layers - 1:
                some = torch.addcmul(sampled(x_BN), sampled(first_BN), sampled(up_BN))
                x8 = _input_codes(some, first_BN)
                x_BN = crossed(x_BN, first_BN, up_BN, x8)
            else:
                x_BN = crossed(x_BN, first_BN, up_BN)
        ctx.layers = layers
        factors = [tensor for weight in encoded for tensor in (weight.w8_MN, weight.scale)]
        ctx.save_for_backward(*inputs, *lows, *outputs, *factors)
        return x_BN

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        layers, saved = ctx.layers, ctx.saved_tensors
        inputs, lows, outputs = (saved[i * layers : (i + 1) * layers] for i in range(3))
        factors = list(zip(saved[3 * layers :: 2], saved[3 * layers + 1 :: 2], strict=True))
        of_outputs = [grads[0].contiguous()]  # of those layers that have one already
        of_ups, of_biases, of_downs = [], [], []
        for layer in reversed(range(layers)):
            (up8_RN, up_scale), (down8_NR, down_scale) = factors[layer], factors[layers + layer]
            of_up8 = _gradient_codes(sampled(of_outputs[0]) * sampled(inputs[0]), inputs[0])
            found = gradients_of_layer(layer, of_outputs, inputs[0], outputs, of_up8)
            of_biases.append(found.of_bias_N)
            of_ups.append(weight_gradient(found.of_up_BN, lows[layer]))
            dtype = found.of_up_BN.dtype
            of_low_BR = gemm(of_up8.codes, up8_RN, (of_up8.scale, up_scale), dtype)
            of_downs.append(weight_gradient(of_low_BR, inputs[layer]))
            of_low8 = _gradient_codes(of_low_BR, of_low_BR)
            of_low8.fill(of_low_BR)
            scales = (of_low8.scale, down_scale)
            of_x_BN = gemm(of_low8.codes, down8_NR, scales, dtype, summand=found.of_x_BN)
            of_outputs.insert(0, of_x_BN)
        of_weights = (*reversed(of_ups), *reversed(of_downs))
        return (of_outputs[0], None, *reversed(of_biases), *of_weights)


def _input_codes(some: Tensor, like: Tensor) -> Codes:
    """Room for the codes of as many numbers as there are in `like`, of which these are some."""
    scale = sampled_scale(some, CODES, INPUT_ROOM)
    return Codes(torch.empty_like(like, dtype=CODES), scale)


def _gradient_codes(some: Tensor, like: Tensor) -> Codes:
    scale = sampled_scale(some, GRADIENTS, GRADIENT_ROOM) * random_factor(some)
    return Codes(torch.empty_like(like, dtype=GRADIENTS), scale)
