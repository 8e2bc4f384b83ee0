"""The rows of tables in one stored format, of 8, 16 or 32 bits, each written once in an update."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trainmark.embeddings.tables.row_update import Plan, Settings, plan_sorted
from trainmark.embeddings.tables.store import INIT_BLOCK_ROWS, PartRows, TablePart, init_part
from trainmark.embeddings.tables.update import State
from trainmark.kernels.sparse_update import Rule, SortedRows, update_rows
from trainmark.kernels.table_formats import FORMATS, Rows, encode, new_rows
from trainmark.training.seeding import stream_seed

LARGEST_INT32 = 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class Formats:
    """How the tables of a model are stored."""

    of_tables: Sequence[str]
    """Of each; see `table_formats`."""
    state_dtype: torch.dtype = torch.float32
    """Of the optimiser's state of tables that are not fp32."""
    seed: int | None = None
    """Of stochastic rounding; None: to nearest."""

    @property
    def rounds(self) -> bool:
        return any(kind != "fp32" for kind in self.of_tables)

    def rounding(self, store: int, stores: int) -> "Rounding | None":
        """Of one of a model's stores."""
        if self.seed is None:
            return None
        return Rounding(stream_seed(self.seed, "rounding") % LARGEST_INT32 + store, stores)


@dataclass(frozen=True)
class Rounding:
    """The random bits that a store rounds with: in each update others, and other than a model's
    other stores."""

    key: int
    stores: int
    """Of the model."""

    def bits_of(self, updates: Tensor) -> Tensor:
        return updates * self.stores + self.key


class FormatStore(nn.Module):
    """Parts of equal width, one below the other.

    Args:
        parts: what it holds; row r of part i is row `starts[i] + r` of the store.
        width: of a row.
        rule: how rows are updated.
        table_format: of the rows; see `table_formats`.
        state_dtype: of the rows' optimiser state; that of fp32 rows is fp32.
        rounding: by chance; None: to nearest.
    """

    codes: Tensor
    scales: Tensor | None
    state: Tensor | None

    def __init__(
        self,
        parts: Sequence[TablePart],
        width: int,
        rule: Rule,
        table_format: str,
        state_dtype: torch.dtype = torch.float32,
        rounding: Rounding | None = None,
    ) -> None:
        super().__init__()
        self._rounding = rounding
        self._state_dtype = torch.float32 if table_format == "fp32" else state_dtype
        self.parts, self.rule = list(parts), rule
        self.starts = list(itertools.accumulate((p.num_rows for p in parts), initial=0))
        rows = new_rows(self.starts[-1], width, FORMATS[table_format], "meta")
        # Buffers, not parameters: autograd and the dense optimiser never see the tables.
        self.register_buffer("codes", rows.codes, persistent=False)
        self.register_buffer("scales", rows.scales, persistent=False)
        self.register_buffer("state", None, persistent=False)

    @property
    def rows(self) -> Rows:
        return Rows(self.codes, self.scales)

    def plan_update(self, ids: Tensor, places: Tensor | None = None) -> SortedRows:
        """What an update of the rows `ids` needs; ahead of the step."""
        return plan_sorted(ids, places)

    def update(self, plan: Plan, grads: Tensor, settings: Settings) -> None:
        """Apply the rule; see `update_rows`."""
        if not isinstance(plan, SortedRows):
            raise TypeError("Rows of any format are updated in order: `plan_update` sorts them.")
        rounding, updates = self._rounding, settings.updates
        key = None if rounding is None or updates is None else rounding.bits_of(updates)
        grads = grads.contiguous()
        update_rows(self.rows, self.state, plan, grads, self.rule, settings.scalars, key)

    # --- state

    @torch.no_grad()
    def init_weights(self, seed: int, bound: float | None = None) -> None:
        """Fill each part with its table's values, a block at a time, rounded to nearest."""
        for part, first in zip(self.parts, self.starts, strict=False):
            for start in range(0, part.num_rows, INIT_BLOCK_ROWS):
                stop = min(start + INIT_BLOCK_ROWS, part.num_rows)
                block = dataclasses.replace(part, rows=(part.rows[0] + start, part.rows[0] + stop))
                self._init_block(block, slice(first + start, first + stop), seed, bound)

    def _init_block(self, block: TablePart, place: slice, seed: int, bound: float | None) -> None:
        if self.codes.dtype == torch.float32:
            return init_part(block, self.codes[place], seed, bound=bound)
        values = torch.empty(block.num_rows, block.width, device=self.codes.device)
        init_part(block, values, seed, bound=bound)
        new = encode(values, self.codes.dtype)
        self.codes[place] = new.codes
        if self.scales is not None and new.scales is not None:
            self.scales[place] = new.scales

    def create_state(self) -> None:
        """Allocate the optimiser's state for all rows."""
        num_rows, width = self.codes.shape
        shapes: dict[str, tuple[int, ...] | None] = {
            "sgd": None,
            "rowwise_adagrad": (num_rows,),
            "adagrad": (num_rows, width),
        }
        shape = shapes[self.rule.name]
        if shape is not None:
            # One number a row takes little memory, and a sum over many rounds.
            dtype = self._state_dtype if len(shape) > 1 else torch.float32
            self.state = torch.zeros(shape, dtype=dtype, device=self.codes.device)

    def part_weights(self) -> Iterator[PartRows]:
        """Each part with its rows: weights, or codes and scales."""
        if self.scales is None:
            yield from self._of_parts("weight", self.codes)
        else:
            yield from self._of_parts("codes", self.codes)
            yield from self._of_parts("scales", self.scales)

    def part_state(self) -> Iterator[PartRows]:
        """Each part with its optimiser state."""
        if self.state is not None:
            yield from self._of_parts("sum", self.state)

    def scalar_state(self) -> State:
        """None: who updates all stores counts the updates."""
        return {}

    def _of_parts(self, kind: str, tensor: Tensor) -> Iterator[PartRows]:
        bounds = itertools.pairwise(self.starts)
        for part, (first, last) in zip(self.parts, bounds, strict=True):
            yield part, kind, tensor[first:last]
