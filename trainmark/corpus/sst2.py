"""`trainmark prepare sst2`: a table of sentences and labels -> tokenised sentences.

The tokens are those of the published preparation: [CLS] words [SEP], cut at 512 tokens.
"""

import hashlib
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from trainmark import files
from trainmark.corpus import sentence_files, sentences
from trainmark.corpus.sentences import Sentences
from trainmark.errors import InputError, raise_all, require
from trainmark.progress import SafeConsole

TOKENIZER_FILES = (
    "tokenizer.json", "vocab.txt", "tokenizer_config.json", "special_tokens_map.json",
)  # fmt: skip
LABEL = "label"
_SHOWN = 5  # how many bad rows an error names


@dataclass(frozen=True, kw_only=True)
class Options:
    """Tokenise SST-2, or any table of sentences and labels, for DistilBERT."""

    train: Path
    """Training table with columns sentence and label: .tsv (as GLUE has it), .csv or .parquet."""
    dev: Path
    """Held-out table, with the same columns."""
    tokenizer: Path
    """Folder with a Hugging Face tokenizer: tokenizer.json, or vocab.txt."""
    output: Path
    """Folder to write; it appears when everything is written."""
    labels: int = 2
    """Number of classes; labels are 0 to labels - 1."""
    sequence_length: int = 512
    """Tokens at which a sentence is cut, and to which the published form pads."""
    npz: bool = True
    """Also write the published .npz files (padded; the packed form is always written)."""


def prepare(options: Options) -> None:
    """Write the dataset, unless the folder already holds it."""
    settings = {
        "train": _identity(options.train),
        "dev": _identity(options.dev),
        "tokenizer": [_identity(path) for path in _tokenizer_files(options.tokenizer)],
        "labels": options.labels,
        "sequence_length": options.sequence_length,
        "npz": options.npz,
    }
    if files.is_finished(options.output, "prepare.json", settings):
        print(f"{options.output} already holds this dataset; nothing to do.")
        return
    tokenizer = load_tokenizer(options.tokenizer, options.sequence_length)
    tables = {
        split: read_table(path, options.labels)
        for split, path in zip(sentences.SPLITS, (options.train, options.dev), strict=True)
    }
    with files.building(options.output) as partial:
        counts = {}
        for split, (texts, labels) in tables.items():
            found = tokenise(tokenizer, texts, labels)
            sentences.save_packed(partial, split, found)
            if options.npz:
                sentences.save_npz(partial, split, found, texts, options.sequence_length)
            counts[split] = _counts(found, options.sequence_length)
        manifest = {"schema": sentences.SCHEMA, "splits": counts}
        files.write_json(partial / "packed" / sentences.MANIFEST, manifest)
        copy_tokenizer(options.tokenizer, partial / sentences.MODEL_FOLDER)
        files.write_json(partial / "prepare.json", {"settings": settings})
    _print_counts(counts)


def _identity(path: Path) -> list[str]:
    if not path.is_file():
        found = "is not a file" if path.exists() else "does not exist"
        raise InputError(f"{path} {found}; expected a table of sentences and labels.")
    with path.open("rb") as file:
        return [path.name, hashlib.file_digest(file, "sha256").hexdigest()]


def _counts(found: Sentences, width: int) -> dict[str, int]:
    return {
        "sentences": len(found),
        "tokens": len(found.tokens),
        "longest": found.longest,
        # [SEP] ends a sentence that was cut as well, so this may count one that just fitted.
        "at_full_length": int((found.lengths == width).sum()),
    }


def _print_counts(counts: dict[str, dict[str, int]]) -> None:
    table = Table(box=None, header_style="bold")
    table.add_column("split")
    for column in next(iter(counts.values())):
        table.add_column(column.replace("_", " "), justify="right")
    for split, row in counts.items():
        table.add_row(split, *(f"{value:,}" for value in row.values()))
    SafeConsole().print(table)


# --- the table


def read_table(path: Path, labels: int) -> tuple[list[str], list[int]]:
    """Sentences and labels, or everything that is wrong with them."""
    _check_columns(path)
    texts, found = list[str](), list[Any]()
    for part in sentence_files.parts([path], None, [LABEL]):
        texts += [text or "" for text in part.sentences]
        found += part.kept[LABEL].to_pylist()
    numbers = list(map(_label, found))
    problems = []
    if not texts:
        problems.append(f"{path} has no rows.")
    empty = [i for i, text in enumerate(texts) if not text.strip()]
    if empty:
        problems.append(f"{path}: empty sentences in {_places(empty)}.")
    wrong = [i for i, number in enumerate(numbers) if number is None or not 0 <= number < labels]
    if wrong:
        received = ", ".join(repr(found[i]) for i in wrong[:_SHOWN])
        problems.append(
            f"{path}: labels must be 0 to {labels - 1}; received {received} in {_places(wrong)}. "
            "Give --labels for more classes."
        )
    raise_all(problems)
    return texts, [int(number) for number in numbers if number is not None]


def _label(value: Any) -> int | None:
    try:
        return int(value)
    except (TypeError, ValueError):
        return None


def _places(rows: list[int]) -> str:
    """Data rows as an editor counts lines: the header is line 1."""
    shown = ", ".join(str(row + 2) for row in rows[:_SHOWN])
    more = f" and {len(rows) - _SHOWN:,} more" if len(rows) > _SHOWN else ""
    return f"line(s) {shown}{more}"


def _check_columns(path: Path) -> None:
    if path.suffix not in (*sentence_files.TABLES, *sentence_files.PARQUET):
        raise InputError(
            f"{path} is expected to be a table, with a name that ends in .tsv, .csv or .parquet."
        )
    columns = sentence_files.columns(path)
    missing = [name for name in (sentence_files.COLUMN, LABEL) if name not in columns]
    if missing:
        raise InputError(
            f"{path} has no column {' and no column '.join(missing)}; its header has: "
            f"{', '.join(columns) or 'nothing'}. Expected sentence and label."
        )


# --- the tokenizer


def load_tokenizer(path: Path, sequence_length: int) -> Any:
    """A `tokenizers.Tokenizer` that adds [CLS] and [SEP] and cuts, but does not pad."""
    require("Preparing text", "tokenizers", extra="text")
    import tokenizers

    if (path / "tokenizer.json").is_file():
        try:
            tokenizer = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
        except Exception as error:  # the library raises bare exceptions for a bad file
            raise InputError(f"{path / 'tokenizer.json'} cannot be read: {error}.") from None
    elif (path / "vocab.txt").is_file():
        lowercase = files.read_json(path / "tokenizer_config.json").get("do_lower_case", True)
        words = tokenizers.BertWordPieceTokenizer(str(path / "vocab.txt"), lowercase=lowercase)
        tokenizer = words._tokenizer
    else:
        raise InputError(f"{path} is no tokenizer folder: no tokenizer.json, no vocab.txt.")
    tokenizer.no_padding()
    tokenizer.enable_truncation(sequence_length)
    _check_tokenizer(tokenizer, path)
    return tokenizer


def _check_tokenizer(tokenizer: Any, path: Path) -> None:
    special = [tokenizer.token_to_id(token) for token in ("[PAD]", "[CLS]", "[SEP]")]
    if None in special or tokenizer.encode("").ids != special[1:]:
        raise InputError(
            f"{path} is not a BERT-style tokenizer: it must know [PAD], [CLS] and [SEP] and put "
            "the last two around a sentence."
        )
    vocabulary = tokenizer.get_vocab_size()
    expected = files.read_json(path / "config.json").get("vocab_size")
    if expected is not None and vocabulary > expected:
        raise InputError(
            f"{path}: the tokenizer has {vocabulary:,} tokens, but the model in its config.json "
            f"has a vocabulary of {expected:,}. Give the tokenizer that belongs to the model."
        )


def tokenise(tokenizer: Any, texts: list[str], labels: list[int]) -> Sentences:
    """All sentences as token ids, one after another."""
    encoded = [encoding.ids for encoding in tokenizer.encode_batch(texts)]
    lengths = [len(ids) for ids in encoded]
    return Sentences(
        tokens=np.concatenate([np.array(ids, np.int64) for ids in encoded]),
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        labels=np.array(labels, np.int64),
    )


def copy_tokenizer(source: Path, target: Path) -> None:
    """The tokenizer's files, so that a dataset and a trained model carry their own."""
    for path in _tokenizer_files(source):
        target.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target / path.name)


def _tokenizer_files(source: Path) -> list[Path]:
    return [source / name for name in TOKENIZER_FILES if (source / name).is_file()]
