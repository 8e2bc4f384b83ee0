"""Parts of tables as checkpoints see them: boxes of tensors with global names."""

from collections.abc import Iterable

from torch import Tensor

from trainmark.checkpoint.boxes import Box, Boxes
from trainmark.embeddings.tables.store import TablePart


def table_boxes(of_parts: Iterable[tuple[TablePart, str, Tensor]]) -> dict[str, Boxes]:
    """What this rank holds of each tensor, from (part, name of the tensor, its rows).

    Of column slices, all of which have the state that a row has once, the first writes it.
    """
    boxes: dict[str, list[Box]] = {}
    shapes = {}
    for part, name, rows in of_parts:
        offsets = (part.rows[0], part.columns[0])[: rows.dim()]
        is_copy = rows.dim() == 1 and part.columns[0] > 0
        boxes.setdefault(name, []).append(Box(offsets=offsets, tensor=rows, is_copy=is_copy))
        shapes[name] = part.shape[: rows.dim()]
    return {name: Boxes(shapes[name], found) for name, found in boxes.items()}
