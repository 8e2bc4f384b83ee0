"""The embedding engine of one device: tables looked up and updated sparsely.

An engine offers `prepare`, `lookup`, `lookup_and_interact`, `apply_gradients` and its tensors by
global name; the model calls only `lookup_and_interact`. A fused kernel, a sharded exchange or
host-memory tables are other engines, not other models. What `prepare` returns is the engine's own:
the model hands it on unread.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trainmark.embeddings.store import TableStore, whole_table
from trainmark.embeddings.update import UpdateRule
from trainmark.kernels.interaction import dot_interaction


@dataclass(frozen=True)
class IdGroup:
    """The ids of the categorical features that are stored in one integer type."""

    features: list[int]
    """Which features, in table order."""
    ids: Tensor
    """[features, B]: rows of each feature's own table."""

    def part(self, samples: slice) -> "IdGroup":
        """The ids of some of the samples."""
        return IdGroup(self.features, self.ids[:, samples])


def table_names(count: int) -> list[str]:
    """The global names of `count` tables; table i belongs to categorical feature i."""
    return [f"tables.{i}" for i in range(count)]


class LocalEngine(nn.Module):
    """Whole tables of one width on one device.

    Args:
        table_rows: rows of each table; categorical feature i looks up table i.
        dim: width of a row.
        rule: how rows are updated.
    """

    def __init__(self, table_rows: Sequence[int], dim: int, rule: UpdateRule) -> None:
        super().__init__()
        names = table_names(len(table_rows))
        parts = [whole_table(n, rows, dim) for n, rows in zip(names, table_rows, strict=True)]
        self.store = TableStore(parts, dim, rule)
        self.interaction = dot_interaction
        self._columns: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}
        self._looked_up: list[tuple[Tensor, Tensor]] = []

    # --- forward

    def prepare(self, groups: Sequence[IdGroup], samples: int) -> Tensor:
        """[B, F] rows of the joined tables, ahead of the step."""
        num_features = len(self.store.parts)
        device = self.store.weight.device
        ids_BF = torch.empty(samples, num_features, dtype=torch.int64, device=device)
        for group in groups:
            columns, starts = self._columns_of(group)
            ids_BF[:, columns] = (group.ids + starts[:, None]).t()
        return ids_BF

    def _columns_of(self, group: IdGroup) -> tuple[Tensor, Tensor]:
        """A group's features and their tables' first rows, copied to the device only once."""
        key = tuple(group.features)
        if key not in self._columns:
            starts = [self.store.starts[feature] for feature in group.features]
            self._columns[key] = (
                torch.tensor(group.features, device=group.ids.device),
                torch.tensor(starts, device=group.ids.device),
            )
        return self._columns[key]

    def lookup(self, ids_BF: Tensor) -> Tensor:
        """[B, F] prepared ids -> [B, F, D]. In training, the result collects the gradient."""
        if ids_BF.device.type not in ("cpu", "meta"):  # it was made on another stream
            ids_BF.record_stream(torch.accelerator.current_stream())
        ids = ids_BF.reshape(-1)
        rows_BFD = self.store.gather(ids).view(*ids_BF.shape, self.store.width)
        if torch.is_grad_enabled():
            rows_BFD = rows_BFD.detach().requires_grad_()
            self._looked_up.append((ids, rows_BFD))
        return rows_BFD

    def lookup_and_interact(self, ids_BF: Tensor, x_BD: Tensor) -> Tensor:
        """The interaction of the dense vector with the looked-up rows, in the compute dtype."""
        return self.interaction(x_BD, self.lookup(ids_BF).to(x_BD.dtype))

    # --- update

    def gradients(self) -> list[Tensor]:
        """Gradient rows of the lookups since the last update."""
        return [rows.grad for _, rows in self._looked_up if rows.grad is not None]

    def apply_gradients(self, lr: float, gate: Tensor) -> None:
        """Update the rows that were looked up, if `gate` is 1, and forget the lookups."""
        looked_up, self._looked_up = self._looked_up, []
        if looked_up:
            ids = joined([ids for ids, _ in looked_up])
            grads = joined([gradient(rows).flatten(0, 1) for _, rows in looked_up])
            self.store.update(ids, grads, lr, gate)

    # --- state

    def init_weights(self, seed: int) -> None:
        """Fill the tables, each from its own random streams."""
        self.store.init_weights(seed)

    def create_state(self) -> None:
        """Allocate the optimiser's state for all rows."""
        self.store.create_state()

    def table_weights(self) -> dict[str, Tensor]:
        """Each table's rows, by its global name."""
        return {f"{part.name}.weight": rows for part, rows in self.store.part_weights()}

    def table_state(self) -> dict[str, Tensor]:
        """The optimiser's state, per table where it has rows."""
        state = {f"{part.name}.{kind}": rows for part, kind, rows in self.store.part_state()}
        return state | {f"tables.{k}": tensor for k, tensor in self.store.scalar_state().items()}


def gradient(rows: Tensor) -> Tensor:
    """What the backward pass left for looked-up rows."""
    if rows.grad is None:
        raise RuntimeError("Rows were looked up in training, but no backward pass reached them.")
    return rows.grad


def joined(tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)
