"""The rows of tables in one stored format, of 8, 16 or 32 bits, each written once in an update."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trainmark.embeddings.tables.store import INIT_BLOCK_ROWS, TablePart, init_part
from trainmark.kernels.sparse_update import Rule, SortedRows, update_rows
from trainmark.kernels.table_formats import FORMATS, Rows, encode, new_rows


class FormatStore(nn.Module):
    """Parts of equal width, one below the other.

    Args:
        parts: what it holds; row r of part i is row `starts[i] + r` of the store.
        width: of a row.
        rule: how rows are updated.
        table_format: of the rows; see `table_formats`.
        state_dtype: of the rows' optimiser state; that of fp32 rows is fp32.
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
    ) -> None:
        super().__init__()
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

    def update(self, batch: SortedRows, grads: Tensor, scalars: Tensor, key: Tensor | None) -> None:
        """Apply the rule; see `update_rows`."""
        update_rows(self.rows, self.state, batch, grads, self.rule, scalars, key)

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

    def part_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Each part's rows by name: weights, or codes and scales."""
        if self.scales is None:
            yield from self._named("weight", self.codes)
        else:
            yield from self._named("codes", self.codes)
            yield from self._named("scales", self.scales)

    def part_state(self) -> Iterator[tuple[str, Tensor]]:
        """Each part's optimiser state by name."""
        if self.state is not None:
            yield from self._named("sum", self.state)

    def _named(self, kind: str, tensor: Tensor) -> Iterator[tuple[str, Any]]:
        bounds = itertools.pairwise(self.starts)
        for part, (first, last) in zip(self.parts, bounds, strict=True):
            yield f"{part.name}.{kind}", tensor[first:last]
