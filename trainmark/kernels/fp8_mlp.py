"""The large layers of a perceptron with their GEMMs in fp8, forward and backward.

Inputs and weights are e4m3 (more digits), gradients e5m2 (more range). What the layers pass on to
one another is written in fp8 by the GEMMs themselves, never in 16 bits. In the backward pass one
pass between two GEMMs masks a gradient, sums it for the bias, and transposes it: fp8 tensor cores
multiply rows by rows, and the weight's gradient sums over the batch.

Scales hold nothing from step to step, so there is nothing to save or to resume:
- a weight's comes from its largest number;
- the input's and the gradients' from the largest of some rows, with room above, where numbers are
  cut off. e5m2 has so much range that the gradients of all layers share one;
- between layers it is 1: behind a ReLU, e4m3 holds 0.002 to 448.

e5m2 rounds a gradient by up to an eighth, and always the same number in the same direction: errors
that pushed activations up, and killed ReLUs, step by step. So the gradients' scale has a factor
that differs from step to step. What is rounded up in one is rounded down in another, and on average
all numbers are off by the same small share, which is but another learning rate.

Shapes: B samples, M inputs and N outputs of a layer.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from trainmark.kernels import cublaslt
from trainmark.kernels.cublaslt import Gemm
from trainmark.kernels.fp8_codes import (
    CODES,
    GRADIENTS,
    WIDTH_STEP,
    cut_off,
    mask_codes,
    quantize,
    quantize_masked,
)

SMALL_LAYER = 2**17  # weights: with fewer, 16-bit GEMMs take as long
SAMPLED_ROWS = 1024
INPUT_ROOM, GRADIENT_ROOM = 4.0, 64.0  # how far above the sampled largest numbers may lie
_MIN_SCALED = 1e-30  # zeros must not give an infinite scale
_LAST_BITS = 2**12 - 1  # of fp32's 23: those that any other gradient changes


def is_large(weight: Tensor) -> bool:
    return weight.numel() >= SMALL_LAYER


def fp8_layers(weights: Sequence[Tensor]) -> int:
    """How many of the first layers, a ReLU behind each, are worth it: large, in whole steps."""
    count = 0
    for w_NM in weights:
        if not is_large(w_NM) or len(w_NM) % WIDTH_STEP:
            break
        count += 1
    return count


def fp8_relu_layers(
    x_BM: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    encoded: Sequence["Fp8Weight"] | None = None,
) -> Tensor:
    """Layers in order, a ReLU behind each; once differentiable. The result is of x's type.

    Their widths are whole steps. That of the input may be any: zeros fill it up.

    Args:
        encoded: what `encode_weights` made of these weights, if it was called already.
    """
    x_BM = _filled_up(x_BM)
    factors = encoded or encode_weights(weights)
    result: Tensor = _Fp8Layers.apply(x_BM, factors, *weights, *biases)
    return result


class Fp8Weight:
    """A weight in fp8, in rows and in columns."""

    def __init__(self, w_NM: Tensor, largest: Tensor) -> None:
        self.scale = largest.float().clamp(min=_MIN_SCALED) / torch.finfo(CODES).max
        self.w8_NM, self.w8_MN = quantize(_filled_up(w_NM), self.scale, CODES)


@torch.no_grad()
def encode_weights(weights: Sequence[Tensor]) -> list[Fp8Weight]:
    """The weights of consecutive layers."""
    largest = torch._foreach_norm(list(weights), ord=float("inf"))
    return [Fp8Weight(w_NM, most) for w_NM, most in zip(weights, largest, strict=True)]


def _filled_up(x_BM: Tensor) -> Tensor:
    missing = -x_BM.shape[1] % WIDTH_STEP
    return pad(x_BM, (0, missing)) if missing else x_BM


class _Fp8Layers(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_BM: Tensor, factors: Sequence[Fp8Weight], *parameters: Tensor
    ) -> Tensor:
        biases, ctx.width = parameters[len(factors) :], parameters[0].shape[1]
        x_scale = sampled_scale(x_BM, CODES, INPUT_ROOM)
        x8_BM, x8_MB = quantize(x_BM, x_scale, CODES)
        y_BN: Tensor = x8_BM
        scale: Tensor | None = x_scale
        outputs = []
        for layer, (factor, b_N) in enumerate(zip(factors, biases, strict=True)):
            dtype = x_BM.dtype if layer == len(factors) - 1 else CODES
            y_BN = gemm(y_BN, factor.w8_NM, (scale, factor.scale), dtype, bias=b_N.to(x_BM.dtype))
            scale = None
            outputs.append(y_BN)
        ctx.save_for_backward(
            x_scale, x8_MB, *outputs, *(f.w8_MN for f in factors), *(f.scale for f in factors)
        )
        return outputs[-1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_scale, x8_MB, *saved = ctx.saved_tensors
        count = len(saved) // 3
        outputs, weights, scales = saved[:count], saved[count : 2 * count], saved[2 * count :]
        scale = sampled_scale(grads[0], GRADIENTS, GRADIENT_ROOM) * random_factor(grads[0])
        g8_BN, g8_NB, sums_N = quantize_masked(grads[0], outputs[-1], scale)
        weight_grads, bias_grads = [], [sums_N]
        for layer in range(count - 1, 0, -1):
            # Codes of both gradients have the same scale, so only the weight's is left.
            codes_BM = gemm(g8_BN, weights[layer], (None, scales[layer]), GRADIENTS)
            # This also copies the layer's input in columns, which it reads as the ReLU's mask.
            flipped = mask_codes(codes_BM, outputs[layer - 1], scale)
            weight_grads.append(_weight_gradient(g8_NB, flipped.output_NB, (scale, None)))
            bias_grads.append(flipped.sums_N)
            g8_BN, g8_NB = codes_BM, flipped.codes_NB
        weight_grads.append(_weight_gradient(g8_NB, x8_MB, (scale, x_scale))[:, : ctx.width])
        x_grad = None
        if ctx.needs_input_grad[0]:
            x_grad = gemm(g8_BN, weights[0], (scale, scales[0]), grads[0].dtype)
        return (x_grad, None, *reversed(weight_grads), *reversed(bias_grads))


def sampled_scale(x_BM: Tensor, dtype: torch.dtype, room: float) -> Tensor:
    rows = sampled(x_BM)
    if not rows.numel():
        return torch.ones((), device=x_BM.device)
    largest: Tensor = torch.linalg.vector_norm(rows, ord=float("inf"), dtype=torch.float32)
    # One sample that is not finite must not make all others so: then nobody could name it.
    largest.nan_to_num_(nan=1.0, posinf=1.0)
    return largest.clamp(min=_MIN_SCALED) * (room / torch.finfo(dtype).max)


def random_factor(x_BM: Tensor) -> Tensor:
    """1 to 2, uniform on a log scale. The random bits are the last ones of a sum of the numbers
    themselves, so that a step is repeatable."""
    bits = sampled(x_BM).sum(dtype=torch.float32).view(torch.int32)
    return torch.exp2((bits & _LAST_BITS) / (_LAST_BITS + 1))


def sampled(x_BM: Tensor) -> Tensor:
    return x_BM[:: max(len(x_BM) // SAMPLED_ROWS, 1)]


def _weight_gradient(
    left_NB: Tensor, right_MB: Tensor, scales: tuple[Tensor | None, Tensor | None]
) -> Tensor:
    """Summed over all samples: too many for the tensor cores' short accumulators."""
    return gemm(left_NB, right_MB, scales, torch.float32, fast=False)


def gemm(
    left8: Tensor,
    right8: Tensor,
    scales: tuple[Tensor | None, Tensor | None],
    dtype: torch.dtype,
    *,
    summand: Tensor | None = None,
    bias: Tensor | None = None,
    relu: bool = True,
    fast: bool = True,
) -> Tensor:
    """left right^T, both in rows, as in `cublaslt.Gemm`."""
    if not (left8.numel() and right8.numel()):  # no samples: libraries refuse such factors
        return left8.new_zeros(len(left8), len(right8), dtype=dtype)
    if left8.is_cuda:
        result = left8.new_empty(len(left8), len(right8), dtype=dtype)
        wanted = Gemm(
            left=left8, right=right8, result=result, summand=summand, bias=bias, relu=relu,
            scales=scales, fast=fast,
        )  # fmt: skip
        if cublaslt.run(wanted):
            return result
    exact = _plain_gemm(left8, right8, scales, fast)
    exact = exact if summand is None else exact + summand
    exact = exact if bias is None else exact + bias
    exact = exact.relu() if bias is not None and relu else exact
    return cut_off(exact, dtype) if dtype in (CODES, GRADIENTS) else exact.to(dtype)


def _plain_gemm(
    left8: Tensor, right8: Tensor, scales: tuple[Tensor | None, Tensor | None], fast: bool
) -> Tensor:
    """In fp32: torch's on a GPU; elsewhere the same numbers by an ordinary GEMM."""
    one = torch.ones((), device=left8.device)
    of_left, of_right = (one if scale is None else scale for scale in scales)
    if not left8.is_cuda:
        return (left8.float() @ right8.float().t()) * of_left * of_right
    return torch._scaled_mm(
        left8,
        right8.t(),
        scale_a=of_left,
        scale_b=of_right,
        out_dtype=torch.float32,
        use_fast_accum=fast,
    )
