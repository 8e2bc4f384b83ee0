"""Several ids per feature from one, as MLPerf makes them of Criteo's log: each id always comes with
the same others, drawn for it uniformly from its table.

MLPerf's script keeps what it drew for every id in memory; here it is a hash of the feature, the id
and its place in the bag, computed where the batch is, and so the same on every device.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from trainmark.embeddings.tables.batch import IdGroup
from trainmark.kernels.rounding import SPREAD, mix, signed
from trainmark.training.seeding import stream_seed

SEED = 0
"""MLPerf's. Not the run's: ids would mean something else in every run."""


class MoreIds:
    """Adds ids to batches.

    Args:
        hotness: how many ids each feature shall have.
        table_rows: rows of each feature's table.
    """

    def __init__(self, hotness: Sequence[int], table_rows: Sequence[int]) -> None:
        self._hotness, self._rows = hotness, table_rows
        self._constants: dict[tuple[int, ...], tuple[Tensor, Tensor, Tensor]] = {}
        self._indices: dict[tuple[int, ...], Tensor] = {}

    def add(self, groups: Sequence[IdGroup]) -> list[IdGroup]:
        """The samples with more ids; features with equally many ids become a group."""
        return [more for group in groups for more in self._of_group(group)]

    def _of_group(self, group: IdGroup) -> list[IdGroup]:
        found = []
        for count in sorted({self._hotness[feature] for feature in group.features}):
            chosen = [
                i for i, feature in enumerate(group.features) if self._hotness[feature] == count
            ]
            ids_KB = (
                group.ids if len(chosen) == len(group.features) else self._chosen(group, chosen)
            )
            features = [group.features[i] for i in chosen]
            ids = ids_KB if count == 1 else self._bags(features, ids_KB, count)
            found.append(IdGroup(features, ids))
        return found

    def _chosen(self, group: IdGroup, chosen: list[int]) -> Tensor:
        """Select by an index that is on the device already, because a CUDA graph cannot copy it."""
        key = tuple(chosen)
        if key not in self._indices:
            self._indices[key] = torch.tensor(chosen, device=group.ids.device)
        return group.ids.index_select(0, self._indices[key])

    def _bags(self, features: list[int], ids_KB: Tensor, count: int) -> Tensor:
        """[features, B, count] the ids, and others behind them."""
        salts_K1, rows_K11, places_H = self._on_device(features, count, ids_KB.device)
        of_ids_KB = mix(ids_KB.to(torch.int32) * signed(SPREAD) + salts_K1)
        bits_KBH = mix(of_ids_KB[:, :, None] + places_H)
        # A random number below 2^32, times the rows, over 2^32.
        others_KBH = ((bits_KBH.long() & 0xFFFFFFFF) * rows_K11 >> 32).to(torch.int32)
        return torch.cat([ids_KB[:, :, None].to(torch.int32), others_KBH], dim=2)

    def _on_device(
        self, features: list[int], count: int, device: torch.device
    ) -> tuple[Tensor, Tensor, Tensor]:
        """32 random bits and the rows of each feature; and a number for each further place."""
        key = tuple(features)
        if key not in self._constants:  # copied to the device only once
            salts = [stream_seed(SEED, "multi-hot", feature) % 2**32 for feature in features]
            rows = [self._rows[feature] for feature in features]
            places = [signed(place * SPREAD % 2**32) for place in range(1, count)]
            self._constants[key] = (
                torch.tensor([[signed(salt)] for salt in salts], dtype=torch.int32, device=device),
                torch.tensor(rows, device=device)[:, None, None],
                torch.tensor(places, dtype=torch.int32, device=device),
            )
        return self._constants[key]
