"""Tokenised, labelled sentences on disk, in the published form and in a packed one.

    DIR/dataset/{train,eval}_dataset.npz    as published: idx, sentence, label, input_ids and
                                            attention_mask, the last two int64 [N, 512]
    DIR/packed/{train,eval}_{tokens,offsets,labels}.npy and manifest.json
                                            the same sentences without padding, memory-mappable
    DIR/model/                              tokenizer (and, as published, pretrained weights)

Readers take the packed form where it is there. Nothing here imports torch.
"""

import json
import zipfile
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainmark import checksums
from trainmark.errors import InputError
from trainmark.files import NPY_ERRORS

SPLITS = ("train", "eval")
MODEL_FOLDER = "model"
MANIFEST = "manifest.json"
SCHEMA = "trainmark.sentences/1"
_KEYS = ("input_ids", "attention_mask", "label")


@dataclass(frozen=True)
class Sentences:
    """All sentences one after another: sentence i is tokens[offsets[i]:offsets[i + 1]]."""

    tokens: NDArray[Any]
    offsets: NDArray[np.int64]
    labels: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.labels)

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        return np.diff(self.offsets)

    @property
    def longest(self) -> int:
        return int(self.lengths.max(initial=0))

    @property
    def vocabulary(self) -> int:
        """The largest token id plus one."""
        return int(self.tokens.max()) + 1 if len(self.tokens) else 0


def npz_path(folder: Path, split: str) -> Path:
    return folder / "dataset" / f"{split}_dataset.npz"


PARTS = ("tokens", "offsets", "labels")


def packed_path(folder: Path, split: str, part: str) -> Path:
    return folder / "packed" / f"{split}_{part}.npy"


@lru_cache(maxsize=4)
def load(folder: Path, split: str) -> Sentences:
    """The sentences of a split, checked."""
    if not folder.is_dir():
        raise InputError(f"Data folder {folder} does not exist. See 'trainmark prepare sst2'.")
    parts = [packed_path(folder, split, part) for part in PARTS]
    files = [*parts, npz_path(folder, split)]
    checksums.check(folder, [str(path.relative_to(folder)) for path in files])
    if packed_path(folder, split, "tokens").exists():
        sentences, source = _load_packed(folder, split), folder / "packed"
    elif npz_path(folder, split).exists():
        sentences, source = _load_npz(npz_path(folder, split)), npz_path(folder, split)
    else:
        raise InputError(
            f"{folder} holds no {split} sentences: expected {packed_path(folder, split, 'tokens')} "
            f"or {npz_path(folder, split)}. Make them with 'trainmark prepare sst2'."
        )
    _check(sentences, split, source)
    return sentences


def save_packed(folder: Path, split: str, sentences: Sentences) -> None:
    packed_path(folder, split, "tokens").parent.mkdir(parents=True, exist_ok=True)
    narrow = np.uint16 if sentences.vocabulary <= 2**16 else np.int32
    np.save(packed_path(folder, split, "tokens"), sentences.tokens.astype(narrow))
    np.save(packed_path(folder, split, "offsets"), sentences.offsets)
    np.save(packed_path(folder, split, "labels"), sentences.labels)


def save_npz(folder: Path, split: str, sentences: Sentences, texts: list[str], width: int) -> None:
    """The published form: every sentence padded with zeros to `width` tokens."""
    path = npz_path(folder, split)
    path.parent.mkdir(parents=True, exist_ok=True)
    mask = np.arange(width) < sentences.lengths[:, None]
    ids = np.zeros(mask.shape, np.int64)
    ids[mask] = sentences.tokens
    np.savez_compressed(
        path,
        idx=np.arange(len(sentences)),
        sentence=np.array(texts),
        label=sentences.labels,
        input_ids=ids,
        attention_mask=mask.astype(np.int64),
    )


def _load_packed(folder: Path, split: str) -> Sentences:
    manifest = folder / "packed" / MANIFEST
    try:
        schema = json.loads(manifest.read_text()).get("schema")
        parts = [np.load(packed_path(folder, split, part), mmap_mode="r") for part in PARTS]
    except (*NPY_ERRORS, AttributeError) as error:
        raise InputError(f"{folder / 'packed'} is damaged: {error}. Prepare it again.") from None
    if schema != SCHEMA:
        raise InputError(f"{manifest}: expected schema {SCHEMA!r}, received {schema!r}.")
    return Sentences(*parts)


def _load_npz(path: Path) -> Sentences:
    """Read only what training needs; the texts stay in the file, and nothing is unpickled."""
    try:
        with np.load(path, allow_pickle=False) as file:
            missing = [key for key in _KEYS if key not in file]
            if missing:
                raise InputError(
                    f"{path} has no {', '.join(missing)}; it has {', '.join(sorted(file))}. "
                    f"Expected idx, sentence, label, input_ids, attention_mask."
                )
            ids, mask, labels = (file[key] for key in _KEYS)
    except (*NPY_ERRORS, zipfile.BadZipFile) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(
            f"{path} is damaged or truncated ({error}). Prepare or copy it again."
        ) from None
    if ids.ndim != 2 or ids.shape != mask.shape or labels.shape != ids.shape[:1]:
        raise InputError(
            f"{path}: input_ids {ids.shape}, attention_mask {mask.shape} and label {labels.shape} "
            "do not belong together; expected [N, length] twice and [N]."
        )
    lengths = mask.sum(axis=1)
    kept = np.arange(mask.shape[1]) < lengths[:, None]
    if not np.array_equal(kept, mask != 0):
        raise InputError(f"{path}: attention_mask must be ones followed by zeros in every row.")
    return Sentences(ids[kept], np.concatenate([[0], np.cumsum(lengths)]), labels)


def _check(sentences: Sentences, split: str, source: Path) -> None:
    if len(sentences) == 0:
        raise InputError(f"{source}: the {split} split has no sentences.")
    lengths = sentences.lengths
    whole = sentences.offsets[0] == 0 and sentences.offsets[-1] == len(sentences.tokens)
    if len(sentences.offsets) != len(sentences) + 1 or not whole or lengths.min() < 0:
        raise InputError(f"{source}: tokens, offsets and labels of {split} do not fit together.")
    if lengths.min() == 0:
        first = int(np.argmin(lengths))
        raise InputError(f"{source}: sentence {first} of {split} has no tokens.")
    if sentences.labels.min() < 0:
        first = int(np.argmin(sentences.labels))
        raise InputError(
            f"{source}: sentence {first} of {split} has label {sentences.labels[first]}; labels "
            "are 0, 1, ... (GLUE's test split has no labels and cannot be used)."
        )


def shuffled(count: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """The order of an epoch's sentences, a function of (seed, epoch) at any world size."""
    return np.random.default_rng((seed, epoch)).permutation(count)


def most_tokens(sentences: Sentences, group: int, seed: int, epochs: int) -> int:
    """The most tokens that `group` sentences in a row have, over the shuffled epochs."""
    starts = np.arange(0, len(sentences), group)
    lengths = sentences.lengths
    return max(
        int(np.add.reduceat(lengths[shuffled(len(sentences), seed, epoch)], starts).max())
        for epoch in range(epochs)
    )
