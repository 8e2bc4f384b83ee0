"""Interactions: how a sample's dense vector and embedding rows are combined for the top MLP.

To add one, write the function that an `InteractionLayer` is given, or a layer of its own, and add
it to `_BUILDERS`; its sizes are in `network.py`.

Shapes: B samples, F tables, D embedding width, N = (F + 1) D, all vectors of a sample side by side.
"""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from trainmark.config import filled
from trainmark.embeddings.engine import EmbeddingEngine, Interaction, side_by_side
from trainmark.kernels.cross_layers import cross_layers as kernel_layers
from trainmark.kernels.cross_layers import has_kernel
from trainmark.kernels.fp8_cross import fp8_cross_layers, has_fp8
from trainmark.kernels.fp8_mlp import encode_weights
from trainmark.kernels.graph import Beside
from trainmark.kernels.interaction import dot_interaction
from trainmark.training.dropout import Dropout
from trainmark.workloads.dlrm.mlp import Mlp
from trainmark.workloads.dlrm.runs import DlrmRun


class InteractionLayer(nn.Module):
    """Looks rows up and combines them with the dense vectors."""

    mlps: Sequence[Mlp] = ()
    """MLPs that are part of the interaction."""

    def __init__(self, plain: Interaction) -> None:
        super().__init__()
        self.plain = plain
        """The combination alone, in torch operations; `torch.compile` may take its place."""

    def forward(self, tables: EmbeddingEngine, prepared: Any, x_BD: Tensor) -> Tensor:
        return self.plain(x_BD, tables.lookup(prepared).to(x_BD.dtype))


class DotInteraction(InteractionLayer):
    """Dot products of all pairs of vectors, fused with the lookup where the engine has a kernel."""

    def forward(self, tables: EmbeddingEngine, prepared: Any, x_BD: Tensor) -> Tensor:
        return tables.lookup_and_interact(prepared, x_BD, self.plain)


def _products_and_rows(x_BD: Tensor, rows_BFD: Tensor) -> Tensor:
    """Dot products without their padding, then the rows; the model adds the numbers."""
    _, F, D = rows_BFD.shape
    products = dot_interaction(x_BD, rows_BFD)[:, : D + F * (F + 1) // 2]
    return torch.cat([products, rows_BFD.flatten(1)], dim=1)


class CrossNetwork(InteractionLayer):
    """DCNv2's, over all vectors side by side: in each layer, by element,

        x <- (first x) * (W V x + b) + x

    Args:
        width: N.
        layers: how many.
        rank: rows of V; `full`: one square matrix in the place of W V.
    """

    def __init__(self, width: int, layers: int, rank: int | Literal["full"]) -> None:
        super().__init__(self._crossed)
        self.cross = nn.ModuleList(CrossLayer(width, rank) for _ in range(layers))
        self.fp8 = False
        """In training, large layers in fp8."""

    def forward(self, tables: EmbeddingEngine, prepared: Any, x_BD: Tensor) -> Tensor:
        layers = [layer for layer in self.cross if isinstance(layer, CrossLayer)]
        downs = [layer.down.weight for layer in layers if isinstance(layer.down, nn.Linear)]
        ups, biases = [layer.up.weight for layer in layers], [layer.up.bias for layer in layers]
        in_fp8 = self.fp8 and torch.is_grad_enabled() and has_fp8(downs)
        if not (in_fp8 or has_kernel(x_BD)):
            return super().forward(tables, prepared, x_BD)
        if not in_fp8:
            return kernel_layers(tables.lookup_beside(prepared, x_BD), downs, ups, biases)
        encoded = Beside(lambda: encode_weights([*ups, *downs]), x_BD.device)
        first_BN = tables.lookup_beside(prepared, x_BD)
        return fp8_cross_layers(first_BN, biases, encoded.result(), *ups, *downs)

    def _crossed(self, x_BD: Tensor, rows_BFD: Tensor) -> Tensor:
        first_BN = x_BN = side_by_side(x_BD, rows_BFD)
        for layer in self.cross:
            x_BN = torch.addcmul(x_BN, first_BN, layer(x_BN))
        return x_BN


class CrossLayer(nn.Module):
    """`W V x + b` of a cross network: `down` is V, `up` is W with b."""

    def __init__(self, width: int, rank: int | Literal["full"]) -> None:
        super().__init__()
        self.down = nn.Identity() if rank == "full" else CrossLinear(width, rank, bias=False)
        self.up = CrossLinear(width if rank == "full" else rank, width)

    def forward(self, x_BN: Tensor) -> Tensor:
        y_BN: Tensor = self.up(self.down(x_BN))
        return y_BN


class CrossLinear(nn.Linear):
    """A matrix of a cross layer. It begins as TorchRec's and MLPerf's, whatever the MLPs do: Glorot
    normal, with a bias of 0."""

    def init_weights(self, random: torch.Generator) -> None:
        nn.init.xavier_normal_(self.weight, generator=random)
        if self.bias is not None:
            self.bias.zero_()


class ProjectionInteraction(InteractionLayer):
    """TorchRec's: two MLPs make a few vectors each of all of them; the dot products of the ones
    with the others follow the dense vector.

    Args:
        width: N.
        widths: of the layers of each MLP; the last are multiples of D.
        dropout: of each MLP's hidden layers.
    """

    def __init__(
        self, width: int, widths: Sequence[Sequence[int]], dropout: Sequence[Dropout]
    ) -> None:
        super().__init__(self._projected)
        self.branch1, self.branch2 = (Mlp([width, *own], last_relu=True) for own in widths)
        self.branch1.dropout, self.branch2.dropout = dropout
        self.mlps = (self.branch1, self.branch2)

    def _projected(self, x_BD: Tensor, rows_BFD: Tensor) -> Tensor:
        all_BN = side_by_side(x_BD, rows_BFD)
        dim = x_BD.shape[1]
        left_BPD = self.branch1(all_BN).unflatten(1, (-1, dim))
        right_BDQ = self.branch2(all_BN).unflatten(1, (dim, -1))
        products_BPQ = torch.bmm(left_BPD, right_BDQ)
        return torch.cat([x_BD, products_BPQ.flatten(1).to(x_BD.dtype)], dim=1)


# --- the interaction of a run


def make_interaction(cfg: DlrmRun) -> InteractionLayer:
    return _BUILDERS[cfg.model.interaction](cfg)


def _cross_network(cfg: DlrmRun) -> InteractionLayer:
    model = cfg.model
    return CrossNetwork(model.joined_width, *model.cross_shape)


def _projection(cfg: DlrmRun) -> InteractionLayer:
    model = cfg.model
    dropout = [Dropout(filled(model.dropout), cfg.seed, "dropout", f"branch{i}") for i in (1, 2)]
    return ProjectionInteraction(model.joined_width, model.branches, dropout)


_BUILDERS = {
    "dot": lambda cfg: DotInteraction(dot_interaction),
    "cat": lambda cfg: InteractionLayer(side_by_side),
    "dot_and_inputs": lambda cfg: InteractionLayer(_products_and_rows),
    "dcn": _cross_network,
    "projection": _projection,
}
