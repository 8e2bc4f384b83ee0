"""DistilBERT's input: batches of sentences, padded or packed, in shapes that never change.

A micro-batch always has `micro_batch` sentences: where an epoch or a rank has fewer, empty ones
with weight 0 stand in, so that one compiled step and one CUDA graph serve the whole run.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainmark.config import filled
from trainmark.corpus.sentences import Sentences, shuffled
from trainmark.errors import InputError
from trainmark.hardware.backends import is_accelerator
from trainmark.kernels.sentence_attention import FILLER_LENGTH
from trainmark.training.batches import BatchCounts, GlobalBatch, RankBatches
from trainmark.workloads.distilbert.runs import BUDGET_MULTIPLE, DistilbertRun, load_sentences

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Layout:
    """How the sentences of K micro-batches lie, S sentences and N tokens in each."""

    ids_KN: Ints
    positions_KN: Ints
    bounds: Ints
    """[K, segments + 1]: where each segment begins; see `kernels/sentence_attention.py`."""
    first_KS: Ints
    """Each sentence's first token."""


@dataclass(frozen=True, kw_only=True)
class SentenceBatch(BatchCounts):
    """One optimiser step's share of a data-parallel rank, in host memory."""

    ids_KN: Tensor
    positions_KN: Tensor
    bounds: Tensor
    first_KS: Tensor
    labels_KS: Tensor
    weights_KS: Tensor
    """1 / sentences of the global batch; 0 for an empty stand-in."""

    @property
    def tensors(self) -> list[Tensor]:
        return [
            self.ids_KN, self.positions_KN, self.bounds, self.first_KS, self.labels_KS,
            self.weights_KS,
        ]  # fmt: skip


# --- layouts


def padded(sentences: Sentences, rows: Ints, micro: int, length: int) -> Layout:
    """Every sentence in a row of `length` tokens, its padding in a segment of its own."""
    batches = -(-len(rows) // micro)
    tokens, lengths = _gather(sentences, rows)
    lengths = np.pad(lengths, (0, batches * micro - len(rows)))
    ids = np.zeros((batches * micro, length), np.int64)
    ids[np.arange(length) < lengths[:, None]] = tokens
    starts_KS = np.broadcast_to(np.arange(micro) * length, (batches, micro))
    ends_KS = starts_KS + lengths.reshape(batches, micro)
    bounds = np.stack([starts_KS, ends_KS], axis=2).reshape(batches, -1)
    bounds = np.pad(bounds, ((0, 0), (0, 1)), constant_values=micro * length)
    positions = np.broadcast_to(np.tile(np.arange(length), micro), (batches, micro * length))
    return Layout(ids.reshape(batches, -1), positions, bounds, starts_KS)


def packed(sentences: Sentences, rows: Ints, micro: int, longest: int, budget: int) -> Layout:
    """Sentences one after another, filled up to a multiple of `budget` tokens."""
    groups = [rows[start : start + micro] for start in range(0, len(rows), micro)]
    most = max(int(sentences.lengths[group].sum()) for group in groups)
    size = max(1, -(-most // budget)) * budget
    parts = [
        _pack_one(sentences, group, micro, min(longest, FILLER_LENGTH), size) for group in groups
    ]
    return Layout(*(np.stack(arrays) for arrays in zip(*parts, strict=True)))


def _pack_one(
    sentences: Sentences, rows: Ints, micro: int, filler: int, size: int
) -> tuple[Ints, Ints, Ints, Ints]:
    tokens, lengths = _gather(sentences, rows)
    lengths = np.pad(lengths, (0, micro - len(rows)))
    ends = np.concatenate([[0], np.cumsum(lengths)])
    fillers = np.minimum(ends[-1] + filler * np.arange(1, size // filler + 2), size)
    bounds = np.concatenate([ends, fillers])
    begin_of_token = np.repeat(bounds[:-1], np.diff(bounds))
    ids = np.pad(tokens, (0, size - len(tokens)))
    # A stand-in at the very end has no token of its own; its weight is 0 whatever it reads.
    first = np.minimum(bounds[:micro], size - 1)
    return ids, np.arange(size) - begin_of_token, bounds, first


def _gather(sentences: Sentences, rows: Ints) -> tuple[Ints, Ints]:
    """The tokens of `rows` one after another, and their lengths."""
    starts, lengths = sentences.offsets[rows], sentences.lengths[rows]
    shift = starts - np.concatenate([[0], np.cumsum(lengths)[:-1]])[: len(rows)]
    places = np.repeat(shift, lengths) + np.arange(lengths.sum())
    return sentences.tokens[places].astype(np.int64), lengths


# --- batches


class SentenceData(RankBatches):
    """Batches of a split's sentences, shuffled for training, else as stored."""

    def __init__(
        self, sentences: Sentences, cfg: DistilbertRun, split: str, dp_rank: int, dp_size: int
    ) -> None:
        drops_last = cfg.last_batch == "drop"
        super().__init__(len(sentences), cfg, split, dp_rank, dp_size, drops_last=drops_last)
        self._sentences, self._cfg = sentences, cfg
        self._micro = filled(cfg.micro_batch if self._training else cfg.eval_batch)
        if self.steps_per_epoch == 0:
            raise InputError(
                f"The {split} split has {len(sentences):,} sentences, fewer than one global batch "
                f"({self._batches.size:,}), and last_batch is 'drop'. Lower global_batch."
            )

    def __iter__(self) -> Iterator[SentenceBatch]:
        epoch = -1
        for batch in self._to_come():
            if batch.epoch != epoch:
                epoch, order = batch.epoch, self._order(batch.epoch)
            yield self._assemble(batch, order)

    def _order(self, epoch: int) -> Ints:
        count = len(self._sentences)
        return shuffled(count, self._cfg.seed, epoch) if self._training else np.arange(count)

    def _assemble(self, batch: GlobalBatch, order: Ints) -> SentenceBatch:
        """This rank's share of a global batch."""
        share = self._share(batch)
        mine = order[share.start : share.stop]
        layout = self._lay_out(mine)
        missing = layout.first_KS.size - len(mine)
        labels = np.pad(self._sentences.labels[mine], (0, missing))
        weights = np.pad(np.full(len(mine), 1 / batch.size, np.float32), (0, missing))
        shape = layout.first_KS.shape
        return SentenceBatch(
            ids_KN=self._tensor(layout.ids_KN, np.int32),
            positions_KN=self._tensor(layout.positions_KN, np.int32),
            bounds=self._tensor(layout.bounds, np.int32),
            first_KS=self._tensor(layout.first_KS, np.int64),
            labels_KS=self._tensor(labels.reshape(shape), np.int64),
            weights_KS=self._tensor(weights.reshape(shape), np.float32),
            tokens=int(self._sentences.lengths[mine].sum()),
            **self._counts(batch),
        )

    def _lay_out(self, rows: Ints) -> Layout:
        cfg = self._cfg
        if len(rows) == 0:  # more ranks than sentences, at the end of an epoch
            return Layout(*(np.zeros((0, 0), np.int64) for _ in range(4)))
        if cfg.mode == "padded":
            return padded(self._sentences, rows, self._micro, cfg.sequence_length)
        # Evaluation is not replayed as a graph: its batches are as long as they are.
        budget = (cfg.token_budget if self._training else None) or BUDGET_MULTIPLE
        return packed(
            self._sentences, rows, self._micro, cfg.longest or cfg.sequence_length, budget
        )

    def _tensor(self, array: NDArray[Any], dtype: Any) -> Tensor:
        tensor = torch.from_numpy(np.array(array, dtype, copy=True, order="C"))
        return tensor.pin_memory() if is_accelerator(self._cfg.device) else tensor

    def describe(self, position: int) -> str:
        """Which sentences the global batch that ends at `position` holds, for an error message."""
        batch = self._batches.ending_at(position)
        rows = self._order(batch.epoch)[batch.start : batch.stop]
        shown = ", ".join(str(row) for row in rows[:8])
        return f"{len(rows):,} sentences of {self.split}: {shown}{', ...' if len(rows) > 8 else ''}"


def build_data(cfg: DistilbertRun, split: str, dp_rank: int, dp_size: int) -> SentenceData:
    """The batches of `split` for one data-parallel rank."""
    return SentenceData(load_sentences(cfg, split), cfg, split, dp_rank, dp_size)


def held_out_splits(cfg: DistilbertRun) -> tuple[str, ...]:
    """SST-2's dev set; its test set has no labels."""
    return ("validation",)
