"""A folder of tokens as training sees it: its files, its splits, its vocabulary. No torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trainmark import checksums
from trainmark.corpus.indexed import IndexedTokens, open_tokens
from trainmark.corpus.samples import SampledTokens, open_samples
from trainmark.errors import InputError
from trainmark.files import read_json
from trainmark.formatting import counted

SCHEMA = "trainmark.tokens/1"
SPLITS = ("train", "validation", "test")
_SCAN = 2**24


@dataclass(frozen=True)
class TokenFolder:
    """An indexed dataset in a folder."""

    tokens: IndexedTokens
    vocab_size: int
    """Token ids lie below this."""

    def samples(self, split: str, shares: str, sequence: int) -> int:
        """How many samples one pass over a split has."""
        return max(0, (self.token_count(split, shares) - 1) // sequence)

    def token_count(self, split: str, shares: str) -> int:
        """How many tokens a split has."""
        part = self._sequences(split, shares)
        return int(self.tokens.lengths[part.start : part.stop].sum(dtype=np.int64))

    def check_splits(self, shares: str, sequence: int) -> None:
        """Refuse a corpus without a single sample for training, or for a split with a share."""
        if short := self.short_splits(shares, sequence):
            total = int(self.tokens.lengths.sum(dtype=np.int64))
            documents = counted(len(self.tokens), "document")
            left = ", ".join(f"{split} {count:,}" for split, count in short.items())
            # Of no use where all documents together are too few.
            other_split = "another --split (100,0,0 holds nothing out) or " * (total > sequence)
            raise InputError(
                f"{self.tokens.prefix}: a sample takes {sequence + 1:,} tokens, but split {shares} "
                f"of its {documents} ({total:,} tokens) leaves {left}. Prepare "
                f"more documents, or give {other_split}a shorter --sequence."
            )

    def short_splits(self, shares: str, sequence: int) -> dict[str, int]:
        """The tokens of training, and of splits with a share, that are too few for a sample."""
        parsed = parse_split(shares)
        wanted = [split for split in SPLITS if parsed[split] or split == "train"]
        counts = {split: self.token_count(split, shares) for split in wanted}
        return {split: count for split, count in counts.items() if count <= sequence}

    def open(
        self, split: str, shares: str, sequence: int, wanted: int | None, seed: int
    ) -> SampledTokens:
        """The samples of a split, in order."""
        part = self._sequences(split, shares)
        return open_samples(
            self.tokens, part, split=split, sequence=sequence, wanted=wanted, seed=seed
        )

    def _sequences(self, split: str, shares: str) -> range:
        """Consecutive documents, by Megatron's rounding."""
        parsed = parse_split(shares)
        before = sum(parsed[name] for name in SPLITS[: SPLITS.index(split)])
        count = len(self.tokens)
        return range(round(before * count), round((before + parsed[split]) * count))


def parse_split(text: str) -> dict[str, float]:
    """`98,1,1` as shares of train, validation and test."""
    try:
        weights = [float(part) for part in text.split(",")]
    except ValueError:
        weights = []
    if len(weights) != 3 or min(weights) < 0 or not 0 < sum(weights) < float("inf"):
        raise InputError(
            f"split must be three weights for train, validation and test, such as 98,1,1. "
            f"Received: {text!r}."
        )
    return {name: weight / sum(weights) for name, weight in zip(SPLITS, weights, strict=True)}


def find(path: Path) -> TokenFolder:
    """The dataset in a folder, or the one with the prefix `path`."""
    prefix = _prefix(path)
    if sum(file.stat().st_size for file in _files(prefix) if file.is_file()) <= MAX_CHECKED_BYTES:
        check_bytes(prefix)
    tokens = open_tokens(prefix)
    return TokenFolder(tokens, _vocab_size(prefix, tokens))


MAX_CHECKED_BYTES = 4 * 2**30  # a second or two; of more, `trainmark verify` reads all


def check_bytes(prefix: Path) -> int:
    """Refuse files that are not as `prepare` wrote them; the bytes of those that are."""
    return checksums.check(prefix.parent, listed_in=note_path(prefix).name)


def _files(prefix: Path) -> list[Path]:
    return [prefix.with_name(f"{prefix.name}.{kind}") for kind in ("bin", "idx")]


def checksums_of(prefix: Path) -> dict[str, list[Any]]:
    """The checksums of a dataset's two files, for the note beside them."""
    return {file.name: checksums.of_file(file) for file in _files(prefix)}


def _prefix(path: Path) -> Path:
    """Megatron keeps its cache in a folder with the name of the dataset, beside its files."""
    is_prefix = path.with_name(f"{path.name}.idx").is_file()
    if is_prefix or not path.is_dir():
        is_file = path.suffix in (".bin", ".idx") and not is_prefix
        return path.with_suffix("") if is_file else path
    found = sorted(path.glob("*.idx"))
    if len(found) != 1:
        names = ", ".join(file.stem for file in found[:5]) or "none"
        raise InputError(
            f"{path} must hold one indexed dataset (a .bin and an .idx file); found: {names}. "
            "Give the path without its extension to choose one."
        )
    return found[0].with_suffix("")


def _vocab_size(prefix: Path, tokens: IndexedTokens) -> int:
    """The vocabulary size that `prepare` noted; for files made elsewhere, the largest id + 1."""
    known = read_note(prefix)
    if known is not None:
        return int(known["vocab_size"])
    blocks = range(0, len(tokens.tokens), _SCAN)
    return 1 + max((int(tokens.tokens[i : i + _SCAN].max()) for i in blocks), default=0)


def note_path(prefix: Path) -> Path:
    """What `prepare` says about a dataset, beside it."""
    return prefix.with_name(f"{prefix.name}.json")


def read_note(prefix: Path) -> dict[str, Any] | None:
    path = note_path(prefix)
    if not path.is_file():
        return None
    note = read_json(path)
    if note.get("schema") != SCHEMA or not isinstance(note.get("vocab_size"), int):
        raise InputError(f"{path} is damaged; remove it to read the dataset without it.")
    return note
