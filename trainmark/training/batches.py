"""From the samples of a split to global batches, and from a global batch to the ranks' shares."""

from collections.abc import Iterator
from dataclasses import dataclass


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
        """Those to come after so many samples, over all epochs."""
        while position < self.epochs * self.samples_per_epoch:
            epoch, start = divmod(position, self.samples_per_epoch)
            stop = min(start + self.size, self.samples_per_epoch)
            position += stop - start
            yield GlobalBatch(epoch, start, stop, position)

    def ending_at(self, position: int) -> GlobalBatch:
        """The one that ends after so many samples."""
        epoch, last = divmod(position - 1, self.samples_per_epoch)
        return GlobalBatch(epoch, last // self.size * self.size, last + 1, position)
