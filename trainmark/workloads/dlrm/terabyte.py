"""The planted Terabyte (`clickdata/terabyte.py`) as what a run trains on: `--data terabyte`.

On a CPU its rows are made like those of a file are read, by all cores; on a GPU they are made in
the memory where a step looks for its batch.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainmark.clickdata import terabyte
from trainmark.kernels.terabyte_rows import RowsOnDevice, RowTables, make_rows
from trainmark.workloads.dlrm.rows import Columns, no_rows
from trainmark.workloads.dlrm.runs import DlrmRun, terabyte_range


class TerabyteRows:
    """A split of the log, as a run's tables see it: ids that they have no row for are 0."""

    def __init__(self, cfg: DlrmRun, split: str) -> None:
        self._first, stop = terabyte_range(cfg, split)
        self._table_rows = cfg.model.table_rows
        self.num_rows = stop - self._first
        # Of each feature one id: `multi_hot.py` adds others.
        ids = [(np.int32, 1)] * len(terabyte.VOCABULARY)
        self.kind = no_rows(terabyte.NUM_NUMERICAL, np.float16, ids)

    def read(self, start: int, stop: int, into: Columns) -> None:
        done = 0
        for made in terabyte.blocks(self._first + start, self._first + stop):
            part = into.part(slice(done, done + len(made)))
            part.numerical[:] = terabyte.inputs(made)
            part.labels[:] = made.labels
            for ids, of_log, rows in zip(part.ids, made.categorical, self._table_rows, strict=True):
                np.multiply(of_log, of_log < rows, out=ids)
            done += len(made)

    def maker(self, start: int) -> Callable[[list[Tensor]], None]:
        """What fills a batch's tensors on a GPU with rows from `start` on."""

        def make(places: list[Tensor]) -> None:
            numerical, labels, ids = places
            rows = RowsOnDevice(numerical=numerical, labels=labels, ids=ids)
            make_rows(on_device(self._table_rows, ids.device), self._first + start, rows)

        return make


@functools.lru_cache(maxsize=4)
def on_device(table_rows: tuple[int, ...], device: torch.device) -> RowTables:
    """The log's tables there, and which of its ids are seen."""
    t = terabyte.tables()

    def moved(array: Any) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device)

    columns = range(len(terabyte.VOCABULARY))
    return RowTables(
        starts=moved(t.starts),
        widths=moved(t.widths),
        inputs=moved(t.inputs),
        streams=moved(t.streams.view(np.int64)),
        salts=moved(t.salts),
        amplitudes=moved(t.amplitudes),
        thresholds=moved(t.thresholds.view(np.int32)),
        interacting=moved([np.int32(c in terabyte.INTERACTING) for c in columns]),
        table_rows=moved(np.array(table_rows, np.int32)),
        pair_weight=t.pair_weight,
        lowest_level=terabyte.ZERO + terabyte.BIAS,
    )
