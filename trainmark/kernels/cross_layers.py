"""DCNv2's cross layers, forward and backward, with little besides the GEMMs.

In each layer, x <- x + (first x) * (W V x + b), by element. What is between the GEMMs is one pass
in the forward direction, and one back, which also takes the bias's gradient along. All layers add
to the gradient of first x: the last pass does, from what the others kept.

Shapes: B samples, N width of x, R rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from trainmark.kernels import cublaslt
from trainmark.kernels.cublaslt import Gemm
from trainmark.kernels.fp8_codes import Codes
from trainmark.kernels.relu_mlp import cast_together, column_sums, weight_gradient
from trainmark.kernels.triton_here import tl, triton

# --- plain torch


def cross_layers_reference(
    first_BN: Tensor, downs: Sequence[Tensor], ups: Sequence[Tensor], biases: Sequence[Tensor]
) -> Tensor:
    """Layers in order, differentiated by autograd; see `cross_layers`."""
    x_BN = first_BN
    for layer, (up_NR, bias_N) in enumerate(zip(ups, biases, strict=True)):
        low_BR = linear(x_BN, downs[layer].to(x_BN.dtype)) if downs else x_BN
        up_BN = linear(low_BR, up_NR.to(x_BN.dtype), bias_N.to(x_BN.dtype))
        x_BN = torch.addcmul(x_BN, first_BN, up_BN)
    return x_BN


# --- dispatch


def has_kernel(x: Tensor) -> bool:
    return x.is_cuda and triton is not None


def cross_layers(
    first_BN: Tensor, downs: Sequence[Tensor], ups: Sequence[Tensor], biases: Sequence[Tensor]
) -> Tensor:
    """[B, N], once differentiable, in the type of `first_BN`.

    Args:
        first_BN: the input of the first layer.
        downs: V of each layer, [R, N]; none if the layers are of full rank.
        ups: W of each layer, [N, R] or [N, N].
        biases: b of each layer.
    """
    if not has_kernel(first_BN):
        return cross_layers_reference(first_BN, downs, ups, biases)
    if not torch.is_grad_enabled():
        return _forward(first_BN, len(ups), [*ups, *biases, *downs])[0]
    result: Tensor = CrossLayers.apply(first_BN, len(ups), *ups, *biases, *downs)
    return result


class CrossLayers(torch.autograd.Function):
    """Parameters are all W, then all b, then all V."""

    @staticmethod
    def forward(ctx: Any, first_BN: Tensor, layers: int, *parameters: Tensor) -> Tensor:
        x_BN, kept, matrices = _forward(first_BN, layers, parameters)
        ctx.layers = layers
        ctx.save_for_backward(*kept, *matrices)
        return x_BN

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        layers, saved = ctx.layers, list(ctx.saved_tensors)
        inputs, lows, outputs, ups, downs = _in_turn(saved, layers)
        of_outputs = [grads[0].contiguous()]  # of those layers that have one already
        of_ups, of_biases, of_downs = [], [], []
        for layer in reversed(range(layers)):
            found = gradients_of_layer(layer, of_outputs, inputs[0], outputs)
            of_biases.append(found.of_bias_N)
            of_ups.append(weight_gradient(found.of_up_BN, lows[layer] if downs else inputs[layer]))
            of_low_BR = found.of_up_BN @ ups[layer]
            if downs:
                of_downs.append(weight_gradient(of_low_BR, inputs[layer]))
                of_outputs.insert(0, _product_and_sum(of_low_BR, downs[layer], found.of_x_BN))
            else:
                of_outputs.insert(0, of_low_BR.add_(found.of_x_BN))
        of_first_BN = of_outputs[0]
        return (of_first_BN, None, *reversed(of_ups), *reversed(of_biases), *reversed(of_downs))


def _product_and_sum(left_BR: Tensor, right_RN: Tensor, summand_BN: Tensor) -> Tensor:
    """left right + summand, which stays as it is."""
    # Of 32 bits, torch knows whether TF32 will do; and a rank may have no samples, which only torch
    # takes for factors.
    if summand_BN.element_size() == 2 and len(left_BR):
        result_BN = torch.empty_like(summand_BN)
        gemm = Gemm(left=left_BR, right=right_RN.t(), result=result_BN, summand=summand_BN)
        if cublaslt.run(gemm):
            return result_BN
    return torch.addmm(summand_BN, left_BR, right_RN)


def _forward(
    first_BN: Tensor, layers: int, parameters: Sequence[Tensor]
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """The result; every layer's inputs, V x and W V x + b; W and V as the GEMMs took them."""
    cast = cast_together(parameters, first_BN.dtype)
    ups, biases, downs = cast[:layers], cast[layers : 2 * layers], cast[2 * layers :]
    x_BN, inputs, lows, outputs = first_BN, [], [], []
    for layer in range(layers):
        low_BR = x_BN @ downs[layer].t() if downs else x_BN
        up_BN = torch.addmm(biases[layer], low_BR, ups[layer].t())
        inputs.append(x_BN)
        outputs.append(up_BN)
        if downs:
            lows.append(low_BR)
        x_BN = crossed(x_BN, first_BN, up_BN)
    return x_BN, [*inputs, *lows, *outputs], [*ups, *downs]


def _in_turn(saved: list[Tensor], layers: int) -> list[list[Tensor]]:
    """Inputs, V x, outputs, W, V; without the second and the last for layers of full rank."""
    if len(saved) == 5 * layers:
        return [saved[i * layers : (i + 1) * layers] for i in range(5)]
    inputs, outputs, ups = (saved[i * layers : (i + 1) * layers] for i in range(3))
    return [inputs, [], outputs, ups, []]


# --- Triton

TILE, SUM_ROWS, SUM_COLUMNS, SUM_PROGRAMS = 8192, 16, 128, 512


def crossed(x_BN: Tensor, first_BN: Tensor, up_BN: Tensor, codes: Codes | None = None) -> Tensor:
    """x + first * up; fills its codes, too."""
    if not has_kernel(x_BN):
        result_BN = torch.addcmul(x_BN, first_BN, up_BN)
        if codes is not None:
            codes.fill(result_BN)
        return result_BN
    result_BN, count = torch.empty_like(x_BN), x_BN.numel()
    tile = TILE if codes is None else TILE // 2  # more does not fit the registers
    _crossed_kernel[(-(-count // tile),)](
        x_BN, first_BN, up_BN, result_BN, *_code_arguments(codes, x_BN), count,
        LARGEST=_largest(codes), TILE=tile, num_warps=8,
    )  # fmt: skip
    return result_BN


@dataclass(frozen=True)
class LayerGradients:
    """Of x + first * up."""

    of_up_BN: Tensor
    of_bias_N: Tensor
    """That of `up` summed over the batch, in fp32."""
    of_x_BN: Tensor
    """In the first layer x is `first`, too: all of that of `first`, but for what comes through this
    layer's `up`."""


def gradients_of_layer(
    layer: int,
    of_outputs: Sequence[Tensor],
    first_BN: Tensor,
    ups: Sequence[Tensor],
    codes: Codes | None = None,
) -> LayerGradients:
    """What a layer's elementwise part passes back.

    Args:
        layer: its place.
        of_outputs: gradients of what this layer and all later ones give.
        ups: of all layers.
        codes: to fill, of the gradient of `up`.
    """
    is_first = layer == 0
    of_outputs, ups = (of_outputs, ups) if is_first else (of_outputs[:1], ())
    if not has_kernel(first_BN):
        return _gradients_reference(of_outputs, first_BN, ups, codes)
    of_up_BN, sums = torch.empty_like(first_BN), _new_sums(first_BN)
    of_x_BN = torch.empty_like(first_BN) if is_first else of_outputs[0]
    _cross_gradients_kernel[(len(sums), -(-sums.shape[1] // SUM_COLUMNS))](
        tuple(of_outputs), tuple(ups or of_outputs), first_BN, of_up_BN, of_x_BN,
        *_code_arguments(codes, first_BN), sums, *first_BN.shape,
        LAYERS=len(ups), LARGEST=_largest(codes), ROWS=SUM_ROWS, COLUMNS=SUM_COLUMNS,
    )  # fmt: skip
    return LayerGradients(of_up_BN, column_sums(sums), of_x_BN)


def _gradients_reference(
    of_outputs: Sequence[Tensor], first_BN: Tensor, ups: Sequence[Tensor], codes: Codes | None
) -> LayerGradients:
    of_up_BN = of_outputs[0] * first_BN
    if codes is not None:
        codes.fill(of_up_BN)
    of_x_BN = of_outputs[0].float()
    for of_output_BN, up_BN in zip(of_outputs, ups, strict=False):
        of_x_BN = of_x_BN + of_output_BN.float() * up_BN
    return LayerGradients(
        of_up_BN, of_up_BN.sum(0, dtype=torch.float32), of_x_BN.to(first_BN.dtype)
    )


def _code_arguments(codes: Codes | None, any_BN: Tensor) -> tuple[Tensor, Tensor]:
    """Without codes, what is not looked at."""
    return (any_BN, any_BN) if codes is None else (codes.codes, codes.scale)


def _largest(codes: Codes | None) -> float:
    """The largest code; 0: there are none."""
    return 0.0 if codes is None else torch.finfo(codes.codes.dtype).max


def _new_sums(x_BN: Tensor) -> Tensor:
    """[programs, N], each of every so many-th tile of rows."""
    programs = min(-(-len(x_BN) // SUM_ROWS), SUM_PROGRAMS)
    return x_BN.new_empty(programs, x_BN.shape[1], dtype=torch.float32)


if triton is not None:
    from trainmark.kernels.fp8_codes import to_fp8

    @triton.jit
    def _crossed_kernel(
        x, first, up, result, codes, scale, count, LARGEST: tl.constexpr, TILE: tl.constexpr
    ):
        place = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
        inside = place < count
        added = tl.load(first + place, inside).to(tl.float32) * tl.load(up + place, inside)
        value = tl.load(x + place, inside).to(tl.float32) + added
        tl.store(result + place, value.to(result.dtype.element_ty), inside)
        if LARGEST > 0:
            code = to_fp8(value, tl.load(scale), LARGEST, codes.dtype.element_ty)
            tl.store(codes + place, code, inside)

    @triton.jit
    def _cross_gradients_kernel(
        of_outputs, ups, first, of_up, of_first, codes, scale, sums, B, N,
        LAYERS: tl.constexpr, LARGEST: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    ):  # fmt: skip
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for tile in range(tl.program_id(0), tl.cdiv(B, ROWS), tl.num_programs(0)):
            row = tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS)
            inside = (row[:, None] < B) & (column[None, :] < N)
            place = row[:, None] * N + column[None, :]
            of_x = tl.load(of_outputs[0] + place, inside, other=0.0).to(tl.float32)
            value = of_x * tl.load(first + place, inside, other=0.0)
            tl.store(of_up + place, value.to(of_up.dtype.element_ty), inside)
            total += value
            if LARGEST > 0:
                code = to_fp8(value, tl.load(scale), LARGEST, codes.dtype.element_ty)
                tl.store(codes + place, code, inside)
            if LAYERS > 0:  # all of them, since this is the first
                together = of_x + of_x * tl.load(ups[0] + place, inside, other=0.0)
                for layer in tl.static_range(1, LAYERS):
                    of_x = tl.load(of_outputs[layer] + place, inside, other=0.0).to(tl.float32)
                    together += of_x * tl.load(ups[layer] + place, inside, other=0.0)
                tl.store(of_first + place, together.to(of_first.dtype.element_ty), inside)
        sums += tl.program_id(0) * N
        tl.store(sums + column, tl.sum(total, axis=0), column < N)
