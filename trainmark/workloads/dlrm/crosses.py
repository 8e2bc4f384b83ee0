"""Crosses: tables whose rows are combinations of several features' ids, as those of place x year.

A dot product says how two features go together, and a row of its own says what three do. A cross
is written as the numbers of its features, `0x4x6`. Its tables lie behind those of the features, and
nothing but the network knows of them: datasets and requests have the ids of the features alone.

Combinations share `CROSS_ROWS` rows by a hash that does not depend on how many ids a feature has,
so that a cross stays what it was when its features get new ids. The multiplier is one of L'Ecuyer's
for this modulus: combinations that are near each other have different rows (of two features, up to
a distance of 263; of three, of 34).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from trainmark.workloads.dlrm.network import Model

if TYPE_CHECKING:
    from trainmark.embeddings.tables.batch import IdGroup

CROSS_ROWS = 65_521
"""Rows of a cross's table: a prime."""
MULTIPLIER = 17_364


def cross_features(cross: str) -> tuple[int, ...]:
    """The numbers of a cross's features."""
    return tuple(map(int, cross.split("x")))


def crossed(ids: Sequence[Any]) -> Any:
    """Rows of a cross, of the 64-bit ids of its features: arrays or tensors of one shape."""
    rows = ids[0] % CROSS_ROWS
    for of_feature in ids[1:]:
        rows = (rows * MULTIPLIER + of_feature) % CROSS_ROWS
    return rows


def with_crosses(groups: Sequence[IdGroup], model: Model) -> list[IdGroup]:
    """A batch's ids, and behind them those of the crosses."""
    if not model.crosses:
        return list(groups)
    import torch  # which a server of numbers and ids does without

    from trainmark.embeddings.tables.batch import IdGroup

    by_feature = {
        feature: ids_B.long()
        for group in groups
        for feature, ids_B in zip(group.features, group.ids, strict=True)
    }
    ids = [crossed([by_feature[f] for f in cross_features(cross)]) for cross in model.crosses]
    first = len(model.feature_rows)
    behind = IdGroup(list(range(first, first + len(ids))), torch.stack(ids).int())
    return [*groups, behind]
