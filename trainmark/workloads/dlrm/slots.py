"""Fixed places on the device for batches, because CUDA graphs work on fixed addresses.

There are two: while the compute stream trains on the batch in one, the copy stream fills the other.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from trainmark.kernels.graph import GraphedInPlace, shared_pool
from trainmark.training.transfer import Copier, Make


class Slot:
    """A place for one batch at a time.

    Args:
        like: the tensors of a batch, as the reader makes them.
        prepare: from such tensors on the device to what `train` takes, and none of them itself:
            the next copies do not wait for the step.
        train: one step of training, whose gradients are computed twice if it is a checked one.
        pool: memory for training that all slots share; see `GraphedInPlace`.
    """

    def __init__(
        self,
        like: Sequence[Tensor],
        copier: Copier,
        prepare: Callable[[list[Tensor]], Any],
        train: Callable[[Any, bool], None],
        pool: Any,
    ) -> None:
        self._copier = copier
        # From the copy stream's memory, since that stream alone uses them: what the compute stream
        # has let go of may still be in use there.
        self._copies, _ = copier.then(
            lambda: [torch.empty_like(tensor, device=copier.device) for tensor in like]
        )
        self._batch: Any = None
        self._trained: Any = None
        self._fills = 0

        def fill() -> None:
            self._batch = prepare(self._copies)

        # What is prepared must last while the other slot's batch is: it has memory of its own.
        self._prepare = GraphedInPlace(fill)
        self._train = GraphedInPlace(lambda: train(self._batch, False), pool)
        self._train_checked = GraphedInPlace(lambda: train(self._batch, True), pool)

    def fill(self, tensors: Sequence[Tensor], make: Make | None = None) -> "Filled":
        """Copy or make a batch and prepare it, once the step with the batch before has ended."""
        ready = self._copier.into(self._copies, tensors, make)
        _, prepared = self._copier.then(self._prepare, after=self._trained)
        self._fills += 1
        return Filled(self, self._fills, ready, prepared)

    def train(self, fill: int, *, checked: bool) -> None:
        """One step with the batch of that fill."""
        if fill != self._fills:
            raise RuntimeError("Batches were prepared further ahead than there are slots.")
        (self._train_checked if checked else self._train)()
        self._trained = torch.Event(device=self._copier.device)
        self._trained.record()


class Filled:
    """A batch in a slot."""

    def __init__(self, slot: Slot, fill: int, ready: Any, prepared: Any) -> None:
        self._slot, self._fill = slot, fill
        self.ready, self.prepared = ready, prepared
        """The events after which the copies may be read, and the batch trained on."""

    def train(self, *, checked: bool) -> None:
        self.prepared.wait()
        self._slot.train(self._fill, checked=checked)


class Slots:
    """Slots in turn. The arguments are those of a `Slot`."""

    COUNT = 2

    def __init__(self, copier: Copier, train: Callable[[Any, bool], None]) -> None:
        self._copier, self._train = copier, train
        self._slots: list[Slot] = []
        self._fills = 0

    def fill(
        self,
        tensors: Sequence[Tensor],
        prepare: Callable[[list[Tensor]], Any],
        make: Make | None = None,
    ) -> Filled:
        """Fill the next slot. How the first batch is prepared, all are."""
        if not self._slots:
            pool = shared_pool()
            self._slots = [
                Slot(tensors, self._copier, prepare, self._train, pool) for _ in range(self.COUNT)
            ]
        self._fills += 1
        return self._slots[self._fills % self.COUNT].fill(tensors, make)
