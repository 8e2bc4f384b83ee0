"""Samples of a fixed length from indexed documents, in Megatron's order.

Documents are repeated for as many epochs as the wanted samples need, and shuffled; samples of
sequence + 1 tokens run through them, neighbours sharing one token; then samples are shuffled. A
last epoch that is needed for less than 80 % is shuffled apart, so that no document of it comes
early. The three indices are cached beside the data, under Megatron's file names.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainmark.corpus.indexed import IndexedTokens
from trainmark.errors import InputError
from trainmark.files import NPY_ERRORS, replacing, write_atomically

LAST_EPOCH_APART_BELOW = 0.80


@dataclass(frozen=True)
class Indices:
    """Which tokens make up which sample."""

    documents: NDArray[np.int32]
    """Sequences in the order in which they are read."""
    samples: NDArray[np.int32]
    """[samples + 1, 2]: place in `documents` and offset of each sample's first token."""
    shuffle: NDArray[np.uint32]
    """The order of the samples."""


class SampledTokens:
    """Numbered samples of sequence + 1 tokens."""

    def __init__(self, tokens: IndexedTokens, indices: Indices, count: int) -> None:
        self._tokens, self._indices, self._count = tokens, indices, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> NDArray[Any]:
        place = int(self._indices.shuffle[index])
        (first, start), (last, end) = self._indices.samples[place : place + 2].tolist()
        documents = self._indices.documents
        if first == last:
            return np.asarray(self._tokens.read(documents[first], start, end + 1))
        middle = [self._tokens.read(documents[i]) for i in range(first + 1, last)]
        return np.concatenate(
            [
                self._tokens.read(documents[first], start),
                *middle,
                self._tokens.read(documents[last], 0, end + 1),
            ]
        )


def open_samples(
    tokens: IndexedTokens,
    sequences: range,
    *,
    split: str,
    sequence: int,
    wanted: int | None,
    seed: int,
) -> SampledTokens:
    """The samples of one split; `wanted` None is one pass, in Megatron's order as well."""
    description = json.dumps(
        {
            "class": "GPTDataset",
            "path_prefix": str(tokens.prefix.resolve()),
            "num_samples": wanted,
            "index_split": split,
            "sequences": [sequences.start, sequences.stop],
            "random_seed": seed,
            "sequence_length": sequence,
            "tokens": int(tokens.lengths.sum(dtype=np.int64)),
        },
        indent=4,
    )
    lengths = tokens.lengths
    available = int(lengths[sequences.start : sequences.stop].sum(dtype=np.int64))
    if available <= sequence:
        if wanted is None:
            return SampledTokens(tokens, _nothing(), 0)
        raise InputError(
            f"{tokens.prefix}: the {split} split has {available:,} tokens, fewer than one "
            f"sample of {sequence + 1:,}."
        )
    indices = _cached(tokens.prefix, description) or _store(
        tokens.prefix, description, build(lengths, sequences, sequence, wanted, seed)
    )
    return SampledTokens(tokens, indices, len(indices.shuffle) if wanted is None else wanted)


def _nothing() -> Indices:
    return Indices(np.empty(0, np.int32), np.empty((0, 2), np.int32), np.empty(0, np.uint32))


def build(
    lengths: NDArray[np.int32], sequences: range, sequence: int, wanted: int | None, seed: int
) -> Indices:
    """The three indices, as Megatron-core 0.6 draws them."""
    random = np.random.RandomState(seed)
    per_epoch = int(lengths[sequences.start : sequences.stop].sum(dtype=np.int64))
    epochs = 1 if wanted is None else max(1, -(-(wanted * sequence + 1) // per_epoch))
    before_last = ((epochs - 1) * per_epoch - 1) // sequence
    apart = (
        wanted is not None
        and epochs > 1
        and wanted - before_last < int(LAST_EPOCH_APART_BELOW * ((per_epoch - 1) // sequence))
    )
    documents = (
        np.concatenate([_shuffled(sequences, epochs - 1, random), _shuffled(sequences, 1, random)])
        if apart
        else _shuffled(sequences, epochs, random)
    )
    count = (epochs * per_epoch - 1) // sequence
    samples = _sample_index(lengths, documents, sequence, count)
    return Indices(
        documents, samples, _shuffle_index(before_last if apart else count, count, random)
    )


def _shuffled(sequences: range, epochs: int, random: np.random.RandomState) -> NDArray[np.int32]:
    index = np.tile(np.arange(sequences.start, sequences.stop, dtype=np.int32), epochs)
    random.shuffle(index)
    return index


def _sample_index(
    lengths: NDArray[np.int32], documents: NDArray[np.int32], sequence: int, count: int
) -> NDArray[np.int32]:
    """Sample i begins with token i x sequence of the documents laid end to end."""
    ends = np.cumsum(lengths[documents], dtype=np.int64)
    first_tokens = np.arange(count + 1, dtype=np.int64) * sequence
    places = np.searchsorted(ends, first_tokens, side="right")
    places[0] = 0  # also where the first document is empty
    begins = ends[places] - lengths[documents[places]]
    return np.stack([places, first_tokens - begins], axis=1).astype(np.int32)


def _shuffle_index(
    first_part: int, count: int, random: np.random.RandomState
) -> NDArray[np.uint32]:
    index = np.arange(count, dtype=np.uint32)
    random.shuffle(index[:first_part])
    if first_part < count:
        random.shuffle(index[first_part:])
    return index


# --- the cache

_NAMES = {"documents": "document_index", "samples": "sample_index", "shuffle": "shuffle_index"}


def _path(prefix: Path, description: str, name: str) -> Path:
    digest = hashlib.md5(description.encode(), usedforsecurity=False).hexdigest()
    return prefix.parent / "cache" / "GPTDataset_indices" / f"{digest}-GPTDataset-{name}"


def _cached(prefix: Path, description: str) -> Indices | None:
    note = _path(prefix, description, "description.txt")
    if not note.is_file() or note.read_text() != description:
        return None
    paths = {field: _path(prefix, description, f"{name}.npy") for field, name in _NAMES.items()}
    try:
        return Indices(**{field: np.load(path, mmap_mode="r") for field, path in paths.items()})
    except NPY_ERRORS:
        return None  # damaged or removed: it is made again


def _store(prefix: Path, description: str, indices: Indices) -> Indices:
    """Written under other names first: several ranks may store the same at once."""
    note = _path(prefix, description, "description.txt")
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        for field, name in _NAMES.items():
            path = _path(prefix, description, f"{name}.npy")
            with replacing(path) as temporary, open(temporary, "xb") as file:
                np.save(file, getattr(indices, field))
        write_atomically(note, description)
    except OSError:
        pass  # a read-only data folder: the indices are made again next time
    return indices
