"""Linear layers whose three GEMMs run in fp8, with one scale per tensor.

Inputs and weights are e4m3 (more digits), output gradients e5m2 (more range), as in the published
`hybrid` format. A scale is computed from the tensor itself: no history, nothing to save or resume.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Shard

from trainmark.kernels.triton_here import tl, triton

INPUT, GRADIENT = torch.float8_e4m3fn, torch.float8_e5m2
_SMALLEST = 1e-12  # a tensor of zeros must not give an infinite scale


class Fp8Linear(nn.Linear):
    """`nn.Linear` without bias, in fp8; weights stay in their own type."""

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.weight, DTensor):
            return _sharded_gemm(x, self.weight)
        return _gemm(x, self.weight)


def use_fp8(module: nn.Module) -> None:
    """Turn the linear layers inside `module` into fp8 ones, in place."""
    for child in module.modules():
        if type(child) is nn.Linear and child.bias is None:
            child.__class__ = Fp8Linear


def _gemm(x: Tensor, w_NK: Tensor) -> Tensor:
    y_MN: Tensor = _Fp8Gemm.apply(x.reshape(-1, x.shape[-1]), w_NK)
    return y_MN.view(*x.shape[:-1], -1)


def _sharded_gemm(x: Any, weight: DTensor) -> Tensor:
    """The same with a weight that tensor-parallel ranks share out; each scales its own part."""
    (placement,) = weight.placements
    by_rows = placement.is_shard(0)
    # By rows of the weight: all of x, a part of y. By columns: a part of x, a term of y.
    x_here = x.to_local(grad_placements=[Partial()]) if by_rows else x.to_local()
    y_here = _gemm(x_here, weight.to_local())
    kind = Shard(y_here.dim() - 1) if by_rows else Partial()
    return DTensor.from_local(y_here, weight.device_mesh, [kind], run_check=False)


class _Fp8Gemm(torch.autograd.Function):
    """y[M, N] = x[M, K] w[N, K]^T. Only fp8 copies are kept for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x_MK: Tensor, w_NK: Tensor) -> Tensor:
        x8_MK, x_scale = _quantize(x_MK, INPUT)
        w8_NK, w_scale = _quantize(w_NK, INPUT)
        ctx.save_for_backward(x8_MK, x_scale, w8_NK, w_scale)
        ctx.dtype = x_MK.dtype
        return _multiply(x8_MK, w8_NK.t(), x_scale, w_scale, x_MK.dtype, fast=True)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x8_MK, x_scale, w8_NK, w_scale = ctx.saved_tensors
        g8_MN, g_scale = _quantize(grads[0], GRADIENT)
        # fp8 tensor cores take the first factor in rows and the second in columns.
        w8_KN, x8_KM, g8_NM = transpose(w8_NK), transpose(x8_MK), transpose(g8_MN)
        grad_x = _multiply(g8_MN, w8_KN.t(), g_scale, w_scale, ctx.dtype, fast=True)
        # Summed over all tokens: too many for the tensor cores' short accumulators.
        grad_w = _multiply(g8_NM, x8_KM.t(), g_scale, x_scale, ctx.dtype, fast=False)
        return grad_x, grad_w


def _quantize(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """fp8 values, and the scale that turns them back."""
    largest = torch.finfo(dtype).max
    scale = x.abs().amax().float().clamp(min=_SMALLEST) / largest
    return (x.float() / scale).clamp(-largest, largest).to(dtype), scale


def _multiply(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, dtype: torch.dtype, fast: bool
) -> Tensor:
    if a.is_cuda:
        return torch._scaled_mm(
            a, b, scale_a=a_scale, scale_b=b_scale, out_dtype=dtype, use_fast_accum=fast
        )
    # Elsewhere: the same numbers by an ordinary GEMM, for tests of the numerics.
    return ((a.float() @ b.float()) * (a_scale * b_scale)).to(dtype)


# --- transposing bytes
#
# An operation of its own, which torch.compile leaves alone: fused into the kernel that normalises
# or rotates, it would write single bytes far apart, ten times as slow as that kernel.


@torch.library.custom_op("trainmark::transpose_bytes", mutates_args=())
def _transpose_bytes(x_MN: Tensor) -> Tensor:
    if not x_MN.is_cuda:
        return x_MN.t().clone(memory_format=torch.contiguous_format)
    rows, columns = x_MN.shape
    y_NM = x_MN.new_empty(columns, rows)
    grid = (-(-rows // TILE), -(-columns // TILE))
    _transpose_kernel[grid](x_MN, y_NM, rows, columns, TILE=TILE)
    return y_NM


@_transpose_bytes.register_fake
def _(x_MN: Tensor) -> Tensor:
    return x_MN.new_empty(x_MN.shape[1], x_MN.shape[0])


def transpose(x_MN: Tensor) -> Tensor:
    """A contiguous transpose of one-byte numbers."""
    flipped: Tensor = _transpose_bytes(x_MN.view(torch.uint8))
    return flipped.view(x_MN.dtype)


TILE = 128


if triton is not None:

    @triton.jit
    def _transpose_kernel(x, y, rows, columns, TILE: tl.constexpr):
        row = tl.program_id(0) * TILE + tl.arange(0, TILE)
        column = tl.program_id(1) * TILE + tl.arange(0, TILE)
        inside = (row[:, None] < rows) & (column[None, :] < columns)
        tile = tl.load(x + row[:, None] * columns + column[None, :], inside)
        tl.store(y + column[:, None] * rows + row[None, :], tl.trans(tile), tl.trans(inside))
