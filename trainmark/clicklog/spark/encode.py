"""Arrow batches of a Spark partition to the bytes of `split_binary`. Runs on the workers.

Its code travels with the plan, so it imports nothing of this package but the recipe it is given.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

FACTS = "facts"
"""The name under which a partition says what it has counted."""


class Encoder:
    """Encodes a partition: rows sorted by split, columns split, label, integers, ids.

    Args:
        recipe: how integers are transformed.
        rare_ids: for each column, the id of values that have none; they come as null.
        dtypes: for each column, the type of its file.
    """

    def __init__(self, recipe: Any, rare_ids: Sequence[int], dtypes: Sequence[str]) -> None:
        self.recipe = recipe
        self.rare_ids = rare_ids
        self.dtypes = [np.dtype(dtype).newbyteorder("<") for dtype in dtypes]

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """One row for every split and file: (split, file, bytes)."""
        pieces: dict[tuple[int, str], list[bytes]] = defaultdict(list)
        facts: dict[int, NDArray[np.int64]] = {}
        for batch in batches:
            splits = batch.column(0).to_numpy()
            for split in np.unique(splits).tolist():
                start = int(np.searchsorted(splits, split))
                stop = int(np.searchsorted(splits, split, side="right"))
                part = batch.slice(start, stop - start)
                for file, data in self._encode(part):
                    pieces[split, file].append(data)
                facts[split] = facts.get(split, 0) + self._count(part)
        for split, counts in facts.items():
            clicks, *without_id = counts.tolist()
            text = json.dumps({"clicks": clicks, "without_id": without_id})
            pieces[split, FACTS].append(text.encode())
        for (split, file), parts in pieces.items():
            yield pa.RecordBatch.from_arrays(
                [pa.array([split], pa.int32()), pa.array([file]), pa.array([b"".join(parts)])],
                names=["split", "file", "data"],
            )

    def _columns(self, batch: pa.RecordBatch) -> tuple[Any, list[Any], list[Any]]:
        """Label, integers, ids."""
        _, label, *others = batch.columns
        return label, others[: -len(self.dtypes)], others[-len(self.dtypes) :]

    def _count(self, batch: pa.RecordBatch) -> NDArray[np.int64]:
        """Clicks, then for each column the rows without an id."""
        label, _, ids = self._columns(batch)
        clicks = int(label.to_numpy().sum(dtype=np.int64))
        return np.array([clicks, *(column.null_count for column in ids)])

    def _encode(self, batch: pa.RecordBatch) -> Iterator[tuple[str, bytes]]:
        label, integers, ids = self._columns(batch)
        yield "label.bin", label.to_numpy().astype(np.bool_).tobytes()
        numbers = np.stack([self._numbers(column) for column in integers], axis=1)
        yield "numerical.bin", numbers.astype("<f2").tobytes()
        for number, column in enumerate(ids):
            known = pc.fill_null(column, self.rare_ids[number]).to_numpy()
            yield f"cat_{number}.bin", known.astype(self.dtypes[number]).tobytes()

    def _numbers(self, column: pa.Array) -> Any:
        numbers = self.recipe.transform(pc.fill_null(column, 0).to_numpy())
        missing = pc.is_null(column).to_numpy(zero_copy_only=False)
        return np.where(missing, self.recipe.missing_number, numbers)
