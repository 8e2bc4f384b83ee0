"""Llama-3's input: samples of sequence + 1 tokens, from indexed files or a made-up language."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainmark.config import SYNTHETIC, filled
from trainmark.corpus import dataset
from trainmark.errors import InputError
from trainmark.hardware.backends import is_accelerator
from trainmark.training.batches import BatchCounts, GlobalBatch, RankBatches
from trainmark.workloads.llama3.chain import Chain
from trainmark.workloads.llama3.runs import LlamaRun

SYNTHETIC_HELD_OUT = 256


@dataclass(frozen=True, kw_only=True)
class TokenBatch(BatchCounts):
    """One optimiser step's share of a data-parallel rank, in host memory."""

    ids: Tensor
    """[B, S + 1] int32"""


class Samples(Protocol):
    """Numbered samples of sequence + 1 tokens each; neighbours share their border token."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> NDArray[Any]: ...


class SyntheticSamples:
    """The made-up language; held-out samples follow the training ones."""

    def __init__(self, cfg: LlamaRun, split: str) -> None:
        self._chain = Chain(cfg.seed, cfg.model.vocab)
        self._length = cfg.sequence + 1
        train = filled(cfg.train_samples)
        places = {"train": 0, "validation": train, "test": train + SYNTHETIC_HELD_OUT}
        self._start = places[split]
        self._count = train if split == "train" else SYNTHETIC_HELD_OUT

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> NDArray[Any]:
        return self._chain.sample(self._start + index, self._length)


class TokenData(RankBatches):
    """Batches of a split's samples; an epoch is all that were drawn: documents repeat inside it as
    needed."""

    def __init__(
        self, samples: Samples, cfg: LlamaRun, split: str, dp_rank: int, dp_size: int
    ) -> None:
        super().__init__(len(samples), cfg, split, dp_rank, dp_size, drops_last=True)
        self._samples, self._cfg = samples, cfg
        if self._training and self.steps_per_epoch == 0:
            raise InputError(
                f"train_samples ({len(samples):,}) must fill at least one global batch "
                f"({self._batches.size:,})."
            )

    def __iter__(self) -> Iterator[TokenBatch]:
        return map(self._read, self._to_come())

    def _read(self, batch: GlobalBatch) -> TokenBatch:
        """This rank's share of a global batch."""
        share = self._share(batch)
        rows = [self._samples[index] for index in share]
        shape = (len(share), self._cfg.sequence + 1)
        ids = torch.from_numpy(np.array(rows, np.int32).reshape(shape))
        return TokenBatch(
            ids=ids.pin_memory() if is_accelerator(self._cfg.device) else ids,
            tokens=len(share) * self._cfg.sequence,
            **self._counts(batch),
        )

    def describe(self, position: int) -> str:
        """Which samples the global batch that ends at `position` holds, for an error message."""
        batch = self._batches.ending_at(position)
        return f"samples {batch.start} to {batch.stop - 1} of the {self.split} order"


def build_data(cfg: LlamaRun, split: str, dp_rank: int, dp_size: int) -> TokenData:
    """The batches of `split` for one data-parallel rank."""
    if cfg.data == SYNTHETIC:
        return TokenData(SyntheticSamples(cfg, split), cfg, split, dp_rank, dp_size)
    found = dataset.find(Path(filled(cfg.data)))
    wanted = filled(cfg.train_samples) if split == "train" else None
    samples = found.open(split, filled(cfg.split), cfg.sequence, wanted, cfg.seed)
    return TokenData(samples, cfg, split, dp_rank, dp_size)


def held_out_splits(cfg: LlamaRun) -> tuple[str, ...]:
    """The splits that get a share of the data."""
    if cfg.data == SYNTHETIC:
        return ("test",) if cfg.evals_per_epoch else ()
    shares = dataset.parse_split(filled(cfg.split))
    return tuple(split for split in ("test", "validation") if shares[split])
