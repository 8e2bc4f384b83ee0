"""Embedding engines: tables looked up and updated sparsely.

`EmbeddingEngine` is what all of them offer.

`LocalEngine` is that of one device. A sharded exchange (`sharded.py`), host-memory tables or
another library's tables are other engines, not other models.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from trainmark.embeddings.tables.batch import IdGroup, gradient, joined
from trainmark.embeddings.tables.row_update import Plan, Settings
from trainmark.embeddings.tables.store import (
    TableBytes,
    TableStore,
    table_names,
    whole_table,
    whole_tables,
)
from trainmark.embeddings.tables.update import UpdateRule
from trainmark.kernels.compiled import has_compiled
from trainmark.kernels.gather_interaction import gather_interaction
from trainmark.kernels.interaction import dot_interaction
from trainmark.kernels.table_formats import Tables
from trainmark.training.transfer import used_here

Interaction = Callable[[Tensor, Tensor], Tensor]
"""([B, D] dense vectors, [B, F, D] rows) -> what the top MLP reads."""


def side_by_side(x_BD: Tensor, rows_BFD: Tensor) -> Tensor:
    """[B, (F + 1) D]: the dense vector, then the rows in the order of the tables."""
    return torch.cat([x_BD, rows_BFD.to(x_BD.dtype).flatten(1)], dim=1)


class EmbeddingEngine(Protocol):
    """Tables, wherever they lie. The model looks up and decides what follows; the trainer calls the
    rest.

    What `prepare` returns is the engine's own; everybody else hands it on unread. Ranks call the
    methods in the same order, those without samples too: an engine may talk to its like in each.
    Those that have a body here are what most engines do.
    """

    sent_bytes: Any
    """{kind: bytes} sent to other ranks in training so far, by what they were."""
    works_in_graphs: bool = False
    """Whether CUDA graphs may hold `prepare` and the step: the host decides nothing in them."""

    def prepare(self, groups: Sequence[IdGroup], samples: Sequence[int]) -> Any:
        """Ahead of the step: make of a micro-batch's ids what a lookup needs.

        Where gradients are off, no update follows, and none is planned.

        Args:
            groups: the ids of this rank's samples.
            samples: how many samples each rank has.
        """
        ...

    def begin_step(self, lr: float) -> None:
        """The rate of the coming update, which some kernels bind to the rows they look up."""
        return

    def begin(self, prepared: Any) -> None:
        """Start to gather rows, which goes on while the caller computes something else."""
        return

    def lookup(self, prepared: Any) -> Tensor:
        """[B, F, D] rows of ids that were begun. In training, they collect the gradient."""
        ...

    def lookup_and_interact(
        self, prepared: Any, x_BD: Tensor, plain: Interaction = dot_interaction
    ) -> Tensor:
        """The dot interaction of dense vectors and rows, in the type of `x_BD`.

        In one kernel with the lookup where the engine has one, else by `plain` after it.
        """
        return plain(x_BD, self.lookup(prepared).to(x_BD.dtype))

    def lookup_beside(self, prepared: Any, x_BD: Tensor) -> Tensor:
        """[B, (F + 1) D]: dense vectors, and beside them the rows of `lookup`, in their type."""
        return side_by_side(x_BD, self.lookup(prepared))

    def gradients(self) -> list[Tensor]:
        """Gradient rows of this rank's samples since the last update: are they all finite?"""
        ...

    def rows_in_use(self, prepared: Any) -> list[Tensor]:
        """What this rank's tables hold of the rows that a lookup will read, or has read."""
        ...

    def row_gradients(self) -> list[Tensor]:
        """What the next update will apply to this rank's tables."""
        ...

    def forget(self) -> None:
        """All lookups since the last update: as if there had been none."""
        ...

    def apply_gradients(self, lr: float, gate: Tensor, unscale: Tensor | None = None) -> None:
        """Update the rows that were looked up, if `gate` is 1, and forget the lookups.

        Args:
            lr: the learning rate.
            gate: the same on all ranks.
            unscale: what to multiply gradients by, where the loss was scaled.
        """
        ...

    def init_weights(self, seed: int, bound: float | None = None) -> None:
        """Fill the tables, each from its own random streams, whoever holds which part.

        Args:
            seed: of all streams.
            bound: of the values, uniform on both sides of 0; by default sqrt(1 / rows of a table).
        """
        ...

    def create_state(self) -> None:
        """Allocate the optimiser's state for all rows, unless it is there already."""
        return

    def table_weights(self) -> dict[str, Any]:
        """What this rank holds of each table, by the table's global name, for checkpoints."""
        ...

    def table_state(self) -> dict[str, Any]:
        """The optimiser's state, per table where it has rows."""
        ...

    def state_loaded(self) -> None:
        """A checkpoint has filled all tensors in place: renew copies of them, if there are any."""
        return

    def device_bytes(self) -> TableBytes:
        """Bytes of tables on the device that has most of them."""

        def size(tensors: dict[str, Any]) -> int:
            return sum(t.numel() * t.element_size() for t in tensors.values())

        return TableBytes(weights=size(self.table_weights()), optimizer=size(self.table_state()))


class LocalEngine(nn.Module, EmbeddingEngine):
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
        self._features: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}
        self.sent_bytes: dict[str, int] = {}
        self._looked_up: list[tuple[Any, Tensor]] = []
        """Ids, and the rows that collect the gradient."""
        self._finite = torch.ones((), device="cpu")
        """Of the gradients that compiled kernels, which are a CPU's, have computed: 1 or 0."""

    # --- forward

    def prepare(self, groups: Sequence[IdGroup], samples: Sequence[int]) -> Any:
        """[B, F] rows of the joined tables; in memory, those of a table lie together."""
        (own_samples,) = samples
        num_features = len(self.store.parts)
        device = self.store.weight.device
        ids_FB = torch.empty(num_features, own_samples, dtype=torch.int64, device=device)
        for group in groups:
            features, starts = self._features_of(group)
            ids_FB.index_copy_(0, features, group.ids + starts[:, None])
        return ids_FB.t()

    def _features_of(self, group: IdGroup) -> tuple[Tensor, Tensor]:
        """A group's features and their tables' first rows, copied to the device only once."""
        key = tuple(group.features)
        if key not in self._features:
            starts = [self.store.starts[feature] for feature in group.features]
            self._features[key] = (
                torch.tensor(group.features, device=group.ids.device),
                torch.tensor(starts, device=group.ids.device),
            )
        return self._features[key]

    def lookup(self, prepared: Any) -> Tensor:
        """[B, F] prepared ids -> [B, F, D]. In training, the result collects the gradient."""
        ids_BF: Tensor = prepared
        used_here([ids_BF])
        ids = ids_BF.reshape(-1)
        rows_BFD = self.store.gather(ids).view(*ids_BF.shape, self.store.width)
        if torch.is_grad_enabled():
            rows_BFD = rows_BFD.detach().requires_grad_()
            self._looked_up.append((ids, rows_BFD))
        return rows_BFD

    def lookup_and_interact(
        self, prepared: Any, x_BD: Tensor, plain: Interaction = dot_interaction
    ) -> Tensor:
        if has_compiled(self.store.weight, x_BD):
            return self._in_one_kernel(prepared, x_BD)
        return super().lookup_and_interact(prepared, x_BD, plain)

    def _in_one_kernel(self, ids_BF: Tensor, x_BD: Tensor) -> Tensor:
        tables = Tables(self.store.rows)
        if not torch.is_grad_enabled():
            return gather_interaction(x_BD, ids_BF, tables)
        ids_FB = ids_BF.t()
        rows_FBD = x_BD.new_empty(*ids_FB.shape, self.store.width)
        self._looked_up.append((ids_FB.reshape(-1), rows_FBD))

        def note_gradient(_: Tensor) -> None:
            rows_FBD.grad = rows_FBD.detach()  # it has taken the place of the rows

        x_BD.register_hook(note_gradient)
        return gather_interaction(x_BD, ids_BF, tables, rows_FBD.transpose(0, 1), self._finite)

    # --- update

    def gradients(self) -> list[Tensor]:
        """Of rows that a kernel has looked up, 0 or infinite: it has looked at their gradients."""
        rows = [rows for _, rows in self._looked_up]
        if rows and not rows[0].requires_grad:
            return [1 / self._finite - 1]
        return [of_micro.grad for of_micro in rows if of_micro.grad is not None]

    def rows_in_use(self, ids_BF: Tensor) -> list[Tensor]:
        return [self.store.gather(ids_BF.reshape(-1))]

    def row_gradients(self) -> list[Tensor]:
        return [gradient(rows) for _, rows in self._looked_up]

    def forget(self) -> None:
        self._looked_up = []
        self._finite.fill_(1)

    def apply_gradients(self, lr: float, gate: Tensor, unscale: Tensor | None = None) -> None:
        looked_up = self._looked_up
        self.forget()
        if looked_up:
            grads = joined([gradient(rows).flatten(0, 1) for _, rows in looked_up])
            settings = Settings(lr=lr, gate=gate, unscale=unscale)
            self.store.update(self._plan([ids for ids, _ in looked_up]), grads, settings)

    def _plan(self, looked_up: list[Any]) -> Plan:
        """Of all lookups since the last update."""
        return self.store.plan_update(joined(looked_up))

    # --- state

    def init_weights(self, seed: int, bound: float | None = None) -> None:
        self.store.init_weights(seed, bound)

    def create_state(self) -> None:
        self.store.create_state()

    def table_weights(self) -> dict[str, Tensor]:
        return whole_tables(self.store.part_weights())

    def table_state(self) -> dict[str, Tensor]:
        state = whole_tables(self.store.part_state())
        return state | {f"tables.{k}": tensor for k, tensor in self.store.scalar_state().items()}
