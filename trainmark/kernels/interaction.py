"""Dot interaction in NVIDIA's layout: [bottom MLP output, lower triangle of dot products, zeros].

Shapes: B samples, F embedding rows per sample, D their width, V = F + 1 vectors per sample.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

PAD_TO = 8  # widths that tensor cores like


def output_width(num_rows: int, dim: int) -> int:
    """Width of the interaction of `num_rows` embedding rows and one dense vector of width `dim`."""
    dots = num_rows * (num_rows + 1) // 2
    return -(-(dim + dots) // PAD_TO) * PAD_TO


def dot_interaction_reference(x_BD: Tensor, rows_BFD: Tensor) -> Tensor:
    """[B, D] and [B, F, D] -> [B, output_width(F, D)], differentiated by autograd."""
    vectors_BVD = torch.cat([x_BD.unsqueeze(1), rows_BFD], dim=1)
    dots_BVV = torch.bmm(vectors_BVD, vectors_BVD.transpose(1, 2))
    num_vectors = vectors_BVD.shape[1]
    lower = _lower_triangle(num_vectors, x_BD.device)
    dots_BP = dots_BVV.flatten(1).index_select(1, lower)
    joined = torch.cat([x_BD, dots_BP.to(x_BD.dtype)], dim=1)
    width = output_width(num_vectors - 1, x_BD.shape[1])
    return pad(joined, (0, width - joined.shape[1]))


def dot_interaction(x_BD: Tensor, rows_BFD: Tensor) -> Tensor:
    """The same with half the work in the backward pass; once differentiable."""
    return _DotInteraction.apply(x_BD, rows_BFD)


class _DotInteraction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BD: Tensor, rows_BFD: Tensor) -> Tensor:
        vectors_BVD = torch.cat([x_BD.unsqueeze(1), rows_BFD], dim=1)
        ctx.save_for_backward(vectors_BVD)
        B, V, D = vectors_BVD.shape
        dots_BVV = torch.bmm(vectors_BVD, vectors_BVD.transpose(1, 2))
        dots_BP = dots_BVV.flatten(1).index_select(1, _lower_triangle(V, x_BD.device))
        width = output_width(V - 1, D)
        zeros = x_BD.new_zeros(B, width - D - dots_BP.shape[1])
        return torch.cat([x_BD, dots_BP.to(x_BD.dtype), zeros], dim=1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BW: Tensor) -> tuple[Tensor, Tensor]:
        (vectors_BVD,) = ctx.saved_tensors
        B, V, D = vectors_BVD.shape
        # The product of vectors i and j has its gradient at (i, j) and at (j, i): the matrix is
        # symmetric, so one product serves both of bmm's arguments, which are the same vectors.
        grad_BVV = grad_BW.index_select(1, D + _pair_of(V, grad_BW.device)).view(B, V, V)
        grad_BVV.diagonal(dim1=1, dim2=2).zero_()
        grad_x_BD = torch.bmm(grad_BVV[:, :1], vectors_BVD).squeeze(1).add_(grad_BW[:, :D])
        return grad_x_BD, torch.bmm(grad_BVV[:, 1:], vectors_BVD)


def _lower_triangle(size: int, device: torch.device) -> Tensor:
    """Positions, in a flattened [size, size] matrix, of its strictly lower triangle by rows."""
    row, column = torch.tril_indices(size, size, offset=-1, device=device)
    return row * size + column


def _pair_of(size: int, device: torch.device) -> Tensor:
    """For each (i, j) of a flattened [size, size] matrix: the place of its pair among the dots.

    The pair {i, j} with i > j has place i (i - 1) / 2 + j. The diagonal, which has none, gets -1.
    """
    i = torch.arange(size, device=device)
    high, low = torch.maximum(i[:, None], i), torch.minimum(i[:, None], i)
    return torch.where(high == low, -1, high * (high - 1) // 2 + low).flatten()
