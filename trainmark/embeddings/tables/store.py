"""The rows that one device holds: parts of tables joined in one tensor, with their optimiser state.

A step's cost depends on the rows that it touches, never on the rows of a table.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from trainmark.checkpoint.local_shards import LocalShard, LocalShards
from trainmark.embeddings.tables import row_update
from trainmark.embeddings.tables.batch import joined
from trainmark.embeddings.tables.formats import Rounding
from trainmark.embeddings.tables.row_update import LookedUpRows, Plan, Settings
from trainmark.embeddings.tables.update import State, UpdateRule
from trainmark.hardware.allocator import use_huge_pages
from trainmark.kernels.table_formats import FORMATS, Rows, encode, new_rows
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


class RowHolder(Protocol):
    """What rows are read from and updated in: a store, or the copy that it makes for a batch."""

    @property
    def rows(self) -> Rows: ...

    def update(self, plan: Plan, grads: Tensor, settings: Settings) -> None:
        """Change rows, duplicates included. Overwrites `grads`."""

    def update_summed(
        self, rows: Tensor, grads: Tensor, mean_square: Tensor, settings: Settings
    ) -> None:
        """Row-wise Adagrad on rows whose gradients are summed, and whose mean(g^2) is known."""

    def in_store(self, rows: Tensor) -> Tensor:
        """Which rows of the store these are."""


@dataclass(frozen=True, kw_only=True)
class RequestedRows:
    """Rows that a batch looks up."""

    rows: Tensor
    """Of the holder."""
    plan: Plan
    """The same for the update."""
    holder: RowHolder


class TableStore(nn.Module):
    """Parts of equal width, one below the other in one tensor.

    Args:
        parts: what it holds; row r of part i is row `starts[i] + r` of the store.
        rule: how rows are updated; of other formats than fp32, by a kernel.
        table_format: of the rows; see `table_formats`.
        state_dtype: of an optimiser's state as wide as the rows; that of fp32 rows is fp32.
        rounding: by chance; None: to nearest.
    """

    weight: Tensor
    """Of 8-bit rows, their codes."""
    scales: Tensor | None

    def __init__(
        self,
        parts: Sequence[TablePart],
        width: int,
        rule: UpdateRule,
        table_format: str = "fp32",
        state_dtype: torch.dtype = torch.float32,
        rounding: Rounding | None = None,
    ) -> None:
        super().__init__()
        self.parts, self.width, self.rule = list(parts), width, rule
        self.starts = list(itertools.accumulate((p.num_rows for p in parts), initial=0))
        self._rounding = rounding
        self._state_dtype = torch.float32 if table_format == "fp32" else state_dtype
        rows = new_rows(self.starts[-1], width, FORMATS[table_format], "meta")
        # Buffers, not parameters: autograd and the dense optimiser never see the tables.
        self.register_buffer("weight", rows.codes, persistent=False)
        self.register_buffer("scales", rows.scales, persistent=False)
        self.optimizer_state: State = {}

    @property
    def rows(self) -> Rows:
        return Rows(self.weight, self.scales)

    @property
    def _is_fp32(self) -> bool:
        return self.weight.dtype == torch.float32

    def gather(self, ids: Tensor) -> Tensor:
        """[n] rows of the store -> [n, width]."""
        return self.weight.index_select(0, ids)

    # What a batch looks up: requested ahead of its step, taken for it, written back after it.

    def request(self, ids: Tensor, places: Tensor | None = None) -> RequestedRows:
        """The rows `ids`; with `places`, -1 for none, and where the gradient of each is."""
        learns = torch.is_grad_enabled()
        plan = self.plan_update(ids, places) if learns else LookedUpRows(ids)
        return RequestedRows(rows=ids, plan=plan, holder=self)

    def take(self, requested: RequestedRows) -> None:
        """Bring requested rows up to date: after all updates so far. Once is enough."""

    def joined(
        self, requests: Sequence[RequestedRows], places: Tensor | None = None
    ) -> RequestedRows:
        """Those of several micro-batches as one, to update them."""
        rows = joined([requested.rows for requested in requests])
        return RequestedRows(rows=rows, plan=self.plan_update(rows, places), holder=self)

    def write_back(self, holder: RowHolder) -> None:
        """Keep what was updated."""

    def plan_update(self, ids: Tensor, places: Tensor | None = None) -> Plan:
        """What an update of the rows `ids` needs; ahead of the step."""
        if self._is_fp32:
            return row_update.plan_update(self.rule, ids, places)
        return row_update.plan_sorted(ids, places)

    def update(self, plan: Plan, grads: Tensor, settings: Settings) -> None:
        rounding, updates, state = self._rounding, settings.updates, self.optimizer_state
        key = None if rounding is None or updates is None else rounding.bits_of(updates)
        row_update.update(self.rule, self.rows, state, plan, grads, settings, key)

    def in_store(self, rows: Tensor) -> Tensor:
        return rows

    def update_summed(
        self, rows: Tensor, grads: Tensor, mean_square: Tensor, settings: Settings
    ) -> None:
        state = self.optimizer_state
        row_update.update_summed(self.rule, self.weight, state, rows, grads, mean_square, settings)

    # --- state

    @torch.no_grad()
    def init_weights(self, seed: int, bound: float | None = None) -> None:
        """Fill each part with its table's values, rounded to nearest."""
        use_huge_pages(self.weight)
        for part, first in zip(self.parts, self.starts, strict=False):
            if self._is_fp32:
                init_part(part, self.weight[first : first + part.num_rows], seed, bound=bound)
            else:
                self._init_rounded(part, first, seed, bound)

    def _init_rounded(self, part: TablePart, first: int, seed: int, bound: float | None) -> None:
        """A block at a time, so that there is never a whole table in fp32."""
        for start in range(0, part.num_rows, INIT_BLOCK_ROWS):
            stop = min(start + INIT_BLOCK_ROWS, part.num_rows)
            block = dataclasses.replace(part, rows=(part.rows[0] + start, part.rows[0] + stop))
            values = torch.empty(block.num_rows, block.width, device=self.weight.device)
            init_part(block, values, seed, bound=bound)
            place, new = slice(first + start, first + stop), encode(values, self.weight.dtype)
            self.weight[place] = new.codes
            if self.scales is not None and new.scales is not None:
                self.scales[place] = new.scales

    def create_state(self) -> None:
        """Allocate the optimiser's state for all rows."""
        self.optimizer_state = self.rule.new_state(self.weight, self._state_dtype)

    def part_weights(self) -> Iterator[PartRows]:
        """Each part with its rows: weights, or codes and scales."""
        if self.scales is None:
            yield from self._of_parts("weight", self.weight)
        else:
            yield from self._of_parts("codes", self.weight)
            yield from self._of_parts("scales", self.scales)

    def part_state(self) -> Iterator[PartRows]:
        """Each part with each kind of the optimiser's state that has rows."""
        for kind, tensor in self.optimizer_state.items():
            if tensor.dim() > 0:
                yield from self._of_parts(kind, tensor)

    def scalar_state(self) -> State:
        """The optimiser's state that all rows share."""
        return {k: tensor for k, tensor in self.optimizer_state.items() if tensor.dim() == 0}

    def _of_parts(self, kind: str, tensor: Tensor) -> Iterator[PartRows]:
        bounds = itertools.pairwise(self.starts)
        for part, (first, last) in zip(self.parts, bounds, strict=True):
            yield part, kind, tensor[first:last]


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
