"""Dot interaction in NVIDIA's layout: [bottom MLP output, lower triangle of dot products, zeros].

Shapes: B samples, F embedding rows per sample, D their width, V = F + 1 vectors per sample.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

PAD_TO = 8  # widths that tensor cores like


def output_width(num_rows: int, dim: int) -> int:
    """Width of the interaction of `num_rows` embedding rows and one dense vector of width `dim`."""
    dots = num_rows * (num_rows + 1) // 2
    return -(-(dim + dots) // PAD_TO) * PAD_TO


def dot_interaction(x_BD: Tensor, rows_BFD: Tensor) -> Tensor:
    """[B, D] and [B, F, D] -> [B, output_width(F, D)], plain torch."""
    vectors_BVD = torch.cat([x_BD.unsqueeze(1), rows_BFD], dim=1)
    dots_BVV = torch.bmm(vectors_BVD, vectors_BVD.transpose(1, 2))
    num_vectors = vectors_BVD.shape[1]
    lower = _lower_triangle(num_vectors, x_BD.device)
    dots_BP = dots_BVV.flatten(1).index_select(1, lower)
    joined = torch.cat([x_BD, dots_BP.to(x_BD.dtype)], dim=1)
    width = output_width(num_vectors - 1, x_BD.shape[1])
    return pad(joined, (0, width - joined.shape[1]))


def _lower_triangle(size: int, device: torch.device) -> Tensor:
    """Positions, in a flattened [size, size] matrix, of its strictly lower triangle by rows."""
    row, column = torch.tril_indices(size, size, offset=-1, device=device)
    return row * size + column
