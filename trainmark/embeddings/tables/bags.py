"""From a batch's ids, several per feature, to one list of rows, and the bags that they make up."""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from trainmark.embeddings.tables.batch import IdGroup
from trainmark.kernels.pool_rows import BagBlock, Bags


class BagLists:
    """Makes these lists for one device that holds whole tables.

    Args:
        hotness: ids of each feature; those of a group must be as many.
        starts: the first row of each feature's table in its store.
        offsets: what to add to the rows of each feature, and to its -1s; see `BagBlock`.
        vectors: rows of each sample where the sums go, the last of which are the features'.
        dtype: of the lists.
        varies: whether an id may be -1.
    """

    def __init__(
        self,
        hotness: Sequence[int],
        starts: Sequence[int],
        offsets: Sequence[int],
        vectors: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        varies: bool = True,
    ) -> None:
        self._varies = varies
        self._hotness, self._offsets, self._vectors = hotness, offsets, vectors
        self._starts_F = torch.tensor(starts, dtype=dtype, device=device)
        self._offsets_F = torch.tensor(offsets, dtype=dtype, device=device)
        self._of_groups: dict[Any, list[tuple[Tensor, Tensor]]] = {}
        self._bags: dict[tuple[int, ...], Bags] = {}

    def join(self, groups: Sequence[IdGroup], samples: int) -> tuple[Tensor, Bags]:
        """The rows of all ids, a feature after the other, and what they make up."""
        features = tuple(tuple(group.features) for group in groups)
        if features not in self._of_groups:  # copied to the device only once
            self._of_groups[features] = [self._added(group.features) for group in groups]
        order = tuple(itertools.chain(*features))
        if (samples, *order) not in self._bags:
            self._bags[samples, *order] = self._make_bags(order, samples)
        bags, first = self._bags[samples, *order], 0
        rows = self._starts_F.new_empty(sum(group.ids.numel() for group in groups))
        for group, (starts_K11, none_K11) in zip(groups, self._of_groups[features], strict=True):
            ids_KBH = group.ids if group.ids.dim() == 3 else group.ids[:, :, None]
            into_KBH = rows[first : first + ids_KBH.numel()].view(ids_KBH.shape)
            torch.add(ids_KBH, starts_K11, out=into_KBH)
            if self._varies:
                into_KBH.copy_(torch.where(ids_KBH < 0, none_K11, into_KBH))
            first += ids_KBH.numel()
        return rows, bags

    def _added(self, features: list[int]) -> tuple[Tensor, Tensor]:
        chosen = torch.tensor(features, device=self._starts_F.device)
        offsets = self._offsets_F[chosen]
        return (self._starts_F[chosen] + offsets)[:, None, None], (offsets - 1)[:, None, None]

    def _make_bags(self, order: Sequence[int], samples: int) -> Bags:
        blocks, first_id = [], 0
        for feature in order:
            hotness = self._hotness[feature]
            blocks.append(
                BagBlock(
                    first_id=first_id,
                    id_step=1,
                    bag_step=hotness,
                    hotness=hotness,
                    bags=samples,
                    first_row=self._vectors - len(self._hotness) + feature,
                    row_step=self._vectors,
                    offset=self._offsets[feature],
                )
            )
            first_id += samples * hotness
        return Bags(blocks, self._starts_F.device)
