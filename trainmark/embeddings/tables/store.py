"""The rows that one device holds: parts of tables joined in one tensor, with their optimiser state.

A step's cost depends on the rows that it touches, never on the rows of a table.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trainmark.checkpoint.local_shards import LocalShard, LocalShards
from trainmark.embeddings.tables import row_update
from trainmark.embeddings.tables.row_update import Plan, Settings
from trainmark.embeddings.tables.update import State, UpdateRule
from trainmark.hardware.allocator import use_huge_pages
from trainmark.kernels.table_formats import Rows
from trainmark.training.seeding import drawing_device, generator

# Rows that share one random stream. Values depend on (seed, table, row) only, so that a rank that
# owns part of a table can draw just the blocks it needs, and get what a single process has.
INIT_BLOCK_ROWS = 65536


@dataclass(frozen=True, kw_only=True)
class TablePart:
    """A rectangle of a table."""

    name: str
    """The table's global name."""
    shape: tuple[int, int]
    """Rows and columns of the whole table."""
    rows: tuple[int, int]
    """First row, and the one after the last."""
    columns: tuple[int, int]
    """First column, and the one after the last."""

    @property
    def num_rows(self) -> int:
        return self.rows[1] - self.rows[0]

    @property
    def width(self) -> int:
        return self.columns[1] - self.columns[0]


PartRows = tuple[TablePart, str, Tensor]
"""A part, which tensor of it (such as `weight`), and that tensor's rows."""


def table_names(count: int) -> list[str]:
    """The global names of `count` tables; table i belongs to categorical feature i."""
    return [f"tables.{i}" for i in range(count)]


def whole_table(name: str, rows: int, dim: int) -> TablePart:
    return TablePart(name=name, shape=(rows, dim), rows=(0, rows), columns=(0, dim))


@dataclass(frozen=True, kw_only=True)
class TableBytes:
    """What tables take of a device's memory."""

    weights: int
    optimizer: int

    @property
    def total(self) -> int:
        return self.weights + self.optimizer


class TableStore(nn.Module):
    """Parts of equal width, one below the other in one tensor.

    Args:
        parts: what it holds; row r of part i is row `starts[i] + r` of the store.
        rule: how rows are updated.
    """

    weight: Tensor

    def __init__(self, parts: Sequence[TablePart], width: int, rule: UpdateRule) -> None:
        super().__init__()
        self.parts, self.width, self.rule = list(parts), width, rule
        self.starts = list(itertools.accumulate((p.num_rows for p in parts), initial=0))
        # A buffer, not a parameter: autograd and the dense optimiser never see the tables.
        weight = torch.empty(self.starts[-1], width, device="meta")
        self.register_buffer("weight", weight, persistent=False)
        self.optimizer_state: State = {}

    @property
    def rows(self) -> Rows:
        return Rows(self.weight)

    def gather(self, ids: Tensor) -> Tensor:
        """[n] rows of the store -> [n, width]."""
        return self.weight.index_select(0, ids)

    def plan_update(self, ids: Tensor, places: Tensor | None = None) -> Plan:
        """What an update of the rows `ids` needs; ahead of the step."""
        return row_update.plan_update(self.rule, ids, places)

    def update(self, plan: Plan, grads: Tensor, settings: Settings) -> None:
        """Change rows, duplicates included. Overwrites `grads`."""
        row_update.update(self.rule, self.weight, self.optimizer_state, plan, grads, settings)

    def in_store(self, rows: Tensor) -> Tensor:
        """Which rows of the store these are: `host.py` has others that are not the same."""
        return rows

    def update_summed(
        self, rows: Tensor, grads: Tensor, mean_square: Tensor, settings: Settings
    ) -> None:
        """Row-wise Adagrad on rows whose gradients are summed, and whose mean(g^2) is known."""
        state = self.optimizer_state
        row_update.update_summed(self.rule, self.weight, state, rows, grads, mean_square, settings)

    # --- state

    @torch.no_grad()
    def init_weights(self, seed: int, bound: float | None = None) -> None:
        """Fill each part with its table's values."""
        use_huge_pages(self.weight)
        for part, weight in zip(self.parts, self._split(self.weight), strict=True):
            init_part(part, weight, seed, bound=bound)

    def create_state(self) -> None:
        """Allocate the optimiser's state for all rows."""
        self.optimizer_state = self.rule.new_state(self.weight)

    def part_weights(self) -> Iterator[PartRows]:
        """Each part with its rows."""
        for part, rows in zip(self.parts, self._split(self.weight), strict=True):
            yield part, "weight", rows

    def part_state(self) -> Iterator[PartRows]:
        """Each part with each kind of the optimiser's state that has rows."""
        for kind, tensor in self.optimizer_state.items():
            if tensor.dim() > 0:
                for part, rows in zip(self.parts, self._split(tensor), strict=True):
                    yield part, kind, rows

    def scalar_state(self) -> State:
        """The optimiser's state that all rows share."""
        return {k: tensor for k, tensor in self.optimizer_state.items() if tensor.dim() == 0}

    def _split(self, tensor: Tensor) -> list[Tensor]:
        return [tensor[a:b] for a, b in itertools.pairwise(self.starts)]


def init_part(
    part: TablePart,
    weight: Tensor,
    seed: int,
    *,
    bound: float | None = None,
    draw_on: torch.device | None = None,
) -> None:
    """Fill a part with its table's values, uniform within +-`bound`: sqrt(1 / rows of the table).

    `draw_on` is the device to draw a large table with, by default that of `weight`.
    """
    rows, columns = part.shape
    device = drawing_device(rows * columns, draw_on or weight.device)
    bound = rows**-0.5 if bound is None else bound
    first, last = part.rows
    for block in range(first // INIT_BLOCK_ROWS, -(-last // INIT_BLOCK_ROWS)):
        block_first = block * INIT_BLOCK_ROWS
        block_last = min(block_first + INIT_BLOCK_ROWS, rows)
        mine = weight[max(block_first - first, 0) : block_last - first]
        random = generator(device, seed, part.name, block)
        if device == weight.device and mine.shape == (block_last - block_first, columns):
            mine.uniform_(-bound, bound, generator=random)
            continue
        drawn = torch.empty(block_last - block_first, columns, device=device)
        drawn.uniform_(-bound, bound, generator=random)
        inside = slice(max(first - block_first, 0), min(last, block_last) - block_first)
        mine.copy_(drawn[inside, slice(*part.columns)])


def whole_tables(of_parts: Iterable[PartRows]) -> dict[str, Tensor]:
    """By the names of tensors in a checkpoint, of parts that are whole tables."""
    return {f"{part.name}.{kind}": rows for part, kind, rows in of_parts}


def table_shards(of_parts: Iterable[PartRows]) -> dict[str, LocalShards]:
    """What this rank holds of each tensor, likewise.

    Of column slices, all of which have the state that a row has once, the first writes it.
    """
    shards: dict[str, list[LocalShard]] = {}
    shapes = {}
    for part, kind, rows in of_parts:
        name = f"{part.name}.{kind}"
        offsets = (part.rows[0], part.columns[0])[: rows.dim()]
        is_copy = rows.dim() == 1 and part.columns[0] > 0
        shards.setdefault(name, []).append(
            LocalShard(offsets=offsets, tensor=rows, is_copy=is_copy)
        )
        shapes[name] = part.shape[: rows.dim()]
    return {name: LocalShards(shapes[name], found) for name, found in shards.items()}
