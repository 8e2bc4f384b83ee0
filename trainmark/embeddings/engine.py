"""The embedding engine of one device: all tables in one tensor, looked up and updated sparsely.

An engine offers `lookup`, `lookup_and_interact`, `apply` and `state_dict`; the model calls only
the second. A fused kernel, a sharded exchange or host-memory tables are other engines, not other
models.

A step's cost depends on the rows that it touches, never on the rows of a table: the gradient of a
lookup is kept as (ids, gradient rows), and `apply` updates exactly those rows.
"""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from trainmark.embeddings.update import State, UpdateRule
from trainmark.kernels.interaction import dot_interaction
from trainmark.seeding import generator

# Rows that share one random stream. Values depend on (seed, table, row) only, so that a rank that
# owns part of a table can draw just the blocks it needs, and get what a single process has.
INIT_BLOCK_ROWS = 65536


class LocalEngine(nn.Module):
    """Tables of one width on one device.

    Args:
        table_rows: rows of each table; categorical feature i looks up table i.
        dim: width of a row.
        rule: how rows are updated.
    """

    weight: Tensor

    def __init__(self, table_rows: Sequence[int], dim: int, rule: UpdateRule) -> None:
        super().__init__()
        self.dim = dim
        self.rule = rule
        self.starts = list(itertools.accumulate(table_rows, initial=0))
        # A buffer, not a parameter: autograd and the dense optimiser never see the tables.
        weight = torch.empty(self.starts[-1], dim, device="meta")
        self.register_buffer("weight", weight, persistent=False)
        self.interaction = dot_interaction
        self.optimizer_state: State = {}
        self._looked_up: list[tuple[Tensor, Tensor]] = []

    # --- forward

    def lookup(self, ids_BF: Tensor) -> Tensor:
        """[B, F] rows of `weight` -> [B, F, D]. In training, the result collects the gradient."""
        B, F = ids_BF.shape
        ids = ids_BF.reshape(-1)
        rows_BFD = self.weight.index_select(0, ids).view(B, F, self.dim)
        if torch.is_grad_enabled():
            rows_BFD = rows_BFD.detach().requires_grad_()
            self._looked_up.append((ids, rows_BFD))
        return rows_BFD

    def lookup_and_interact(self, ids_BF: Tensor, x_BD: Tensor) -> Tensor:
        """The interaction of the dense vector with the looked-up rows, in the compute dtype."""
        return self.interaction(x_BD, self.lookup(ids_BF).to(x_BD.dtype))

    # --- update

    def gradients(self) -> list[Tensor]:
        """Gradient rows of the lookups since the last `apply`."""
        return [rows.grad for _, rows in self._looked_up if rows.grad is not None]

    def apply_gradients(self, lr: float, gate: Tensor) -> None:
        """Update the rows that were looked up, if `gate` is 1, and forget the lookups."""
        looked_up, self._looked_up = self._looked_up, []
        if not looked_up:
            return
        ids = _joined([ids for ids, _ in looked_up])
        grads = _joined([_gradient(rows).view(-1, self.dim) for _, rows in looked_up])
        if gate.device.type == "cpu":
            if not gate:  # here asking costs nothing
                return
        else:
            grads = torch.where(gate > 0, grads, torch.zeros_like(grads))
        self.rule.update(self.weight, self.optimizer_state, ids, grads, lr, gate)

    # --- state

    @torch.no_grad()
    def init_weights(self, seed: int, names: Sequence[str]) -> None:
        """Fill each table with uniform values within +-sqrt(1 / rows)."""
        for name, table in self._tables(self.weight, names).items():
            bound = table.shape[0] ** -0.5
            for block, rows in enumerate(table.split(INIT_BLOCK_ROWS)):
                rows.uniform_(-bound, bound, generator=generator(rows.device, seed, name, block))

    def create_state(self) -> None:
        """Allocate the optimiser's state for all rows."""
        self.optimizer_state = self.rule.new_state(self.weight)

    def table_weights(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Each table's rows, by its global name."""
        return {f"{name}.weight": t for name, t in self._tables(self.weight, names).items()}

    def table_state(self, names: Sequence[str]) -> dict[str, Tensor]:
        """The optimiser's state, per table where it has rows."""
        state: dict[str, Tensor] = {}
        for kind, tensor in self.optimizer_state.items():
            if tensor.dim() == 0:
                state[f"tables.{kind}"] = tensor
            else:
                state |= {f"{n}.{kind}": t for n, t in self._tables(tensor, names).items()}
        return state

    def _tables(self, tensor: Tensor, names: Sequence[str]) -> dict[str, Tensor]:
        bounds = itertools.pairwise(self.starts)
        return {name: tensor[a:b] for name, (a, b) in zip(names, bounds, strict=True)}


def _gradient(rows: Tensor) -> Tensor:
    if rows.grad is None:
        raise RuntimeError("Rows were looked up in training, but no backward pass reached them.")
    return rows.grad


def _joined(tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)
