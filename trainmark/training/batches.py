"""From the samples of a split to global batches, and from a global batch to the ranks' shares."""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

from trainmark.config import Run, filled


@dataclass(frozen=True, kw_only=True)
class BatchCounts:
    """What the loop counts of a batch. Every workload's batches begin with these fields."""

    samples: int
    """Samples of this rank."""
    tokens: int = 0
    """Tokens of these samples, without padding; 0 for a workload without tokens."""
    position: int
    """Samples of all ranks up to the end of this batch's global batch, over all epochs."""
    partial: bool
    """Whether the global batch has fewer samples than a full one, at the end of an epoch."""

    def counts(self) -> dict[str, Any]:
        """These fields, for the prepared form of this batch."""
        return {field.name: getattr(self, field.name) for field in fields(BatchCounts)}


@dataclass(frozen=True)
class GlobalBatch:
    """The samples of all ranks for one optimiser step: places in the order of an epoch."""

    epoch: int
    start: int
    stop: int
    position: int
    """Samples up to its end, over all epochs."""

    @property
    def size(self) -> int:
        return self.stop - self.start

    def share(self, rank: int, ranks: int) -> range:
        """The places of one of the data-parallel ranks."""
        ends = [self.start + self.size * r // ranks for r in (rank, rank + 1)]
        return range(*ends)


def rank_shares(samples: int, ranks: int) -> list[int]:
    """How many of a global batch's samples each rank gets, in order; they differ by at most one."""
    batch = GlobalBatch(epoch=0, start=0, stop=samples, position=samples)
    return [len(batch.share(rank, ranks)) for rank in range(ranks)]


@dataclass(frozen=True, kw_only=True)
class GlobalBatches:
    """A split's samples, cut into batches epoch by epoch."""

    samples: int
    size: int
    """Samples of a full batch."""
    epochs: int = 1
    drops_last: bool = False
    """Whether an epoch's last samples are left out where they do not fill a batch."""

    @property
    def samples_per_epoch(self) -> int:
        return self.samples // self.size * self.size if self.drops_last else self.samples

    @property
    def per_epoch(self) -> int:
        return -(-self.samples_per_epoch // self.size)

    def after(self, position: int) -> Iterator[GlobalBatch]:
        """The batches that come after so many samples, over all epochs."""
        while position < self.epochs * self.samples_per_epoch:
            epoch, start = divmod(position, self.samples_per_epoch)
            stop = min(start + self.size, self.samples_per_epoch)
            position += stop - start
            yield GlobalBatch(epoch, start, stop, position)

    def ending_at(self, position: int) -> GlobalBatch:
        """The batch that ends after so many samples."""
        epoch, last = divmod(position - 1, self.samples_per_epoch)
        return GlobalBatch(epoch, last // self.size * self.size, last + 1, position)


class RankBatches:
    """The batches of one split for one data-parallel rank, as far as all workloads are alike. A
    workload adds `__iter__`, over `_to_come`, and `describe` (`contract.Data`).

    Args:
        samples: of the split.
        cfg: a resolved configuration.
        split: `train` runs over all epochs, others once.
        dp_rank, dp_size: which share of every global batch is this rank's.
        drops_last: whether training leaves out an epoch's last samples if they fill no batch.
    """

    def __init__(
        self, samples: int, cfg: Run, split: str, dp_rank: int, dp_size: int, *, drops_last: bool
    ) -> None:
        self.split, self._training = split, split == "train"
        self._dp_rank, self._dp_size = dp_rank, dp_size
        self._position = 0
        self._batches = GlobalBatches(
            samples=samples,
            size=filled(cfg.global_batch) if self._training else filled(cfg.eval_batch) * dp_size,
            epochs=cfg.epochs if self._training else 1,
            drops_last=self._training and drops_last,
        )

    @property
    def samples(self) -> int:
        return self._batches.samples

    @property
    def steps_per_epoch(self) -> int:
        return self._batches.per_epoch

    def restore(self, state: dict[str, int]) -> None:
        """Begin after `samples` global samples, whatever the world size that trained on them.

        There is no `state()`: batches are made ahead of the step, and only the loop knows how
        many samples were trained on.
        """
        self._position = state["samples"]

    def _to_come(self) -> Iterator[GlobalBatch]:
        return self._batches.after(self._position)

    def _counts(self, batch: GlobalBatch) -> dict[str, Any]:
        """The fields of `BatchCounts` for this rank's share, without tokens."""
        is_partial = batch.size < self._batches.size
        samples = len(self._share(batch))
        return {"samples": samples, "position": batch.position, "partial": is_partial}

    def _share(self, batch: GlobalBatch) -> range:
        """This rank's places in a global batch."""
        return batch.share(self._dp_rank, self._dp_size)
