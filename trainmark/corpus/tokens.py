"""`trainmark prepare tokens`: text or JSON lines -> Megatron's .bin and .idx files.

The input streams through in blocks of whole lines, which several processes tokenise. Every finished
block is a file of its own until the end: a preparation that was stopped goes on where it was.
"""

import glob
import gzip
import hashlib
import io
import json
import lzma
import os
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from trainmark import checksums, files
from trainmark.clicklog.sources import remote
from trainmark.corpus import dataset, tokenizer
from trainmark.corpus.indexed import token_dtype, write_index
from trainmark.corpus.tokenizer import Tokenizer
from trainmark.errors import InputError, no_file_matches
from trainmark.files import write_atomically
from trainmark.formatting import counted
from trainmark.progress import rate_bar

BLOCK_BYTES = 4 * 2**20
_JSON_LINES = (".jsonl", ".ndjson", ".json")


@dataclass(frozen=True, kw_only=True)
class Options:
    """Tokenise text for Llama-3 (and anything that reads Megatron's indexed datasets)."""

    input: str
    """Files, as a pattern: .txt (a file is a document) or .jsonl (a line is one), also .gz, .xz;
    s3://, gs:// and hdfs:// as with csv."""
    tokenizer: Path
    """Folder with tokenizer.json (Hugging Face) or tokenizer.model (tiktoken, Llama-3's own)."""
    output: Path
    """Folder to write."""
    name: str = "corpus"
    """The files are called NAME_KEY_document.bin and .idx, as Megatron calls them."""
    json_key: str = "text"
    """Which field of a JSON line is the text."""
    append_eod: bool = True
    """End every document with the tokenizer's end-of-text token."""
    workers: int | None = None
    """Processes that tokenise; default as many as there are cores."""


@dataclass(frozen=True)
class TextBlock:
    """Some lines of one file."""

    number: int
    path: str
    first_line: int
    text: bytes
    ends_file: bool
    is_json: bool
    """Whether each line is a document."""


def _find(given: str) -> list[Path]:
    pattern = given.removeprefix("file://")
    if remote.is_remote(pattern):
        return remote.find(pattern, "--input")
    paths = sorted(Path(name) for name in glob.glob(pattern, recursive=True))
    if not (found := [path for path in paths if path.is_file()]):
        raise no_file_matches(pattern)
    return found


def prepare(options: Options) -> None:
    """Tokenise, then join the blocks; does nothing where the same dataset exists already."""
    files.refuse_address(options.output)
    paths = _find(options.input)
    if options.workers is not None and options.workers < 1:
        raise InputError(f"workers must be at least 1. Received: {options.workers}.")
    tokens = tokenizer.load(options.tokenizer)
    if options.append_eod and tokens.end_of_document is None:
        raise InputError(
            f"{options.tokenizer} names no end-of-text token; give --no-append-eod to do without."
        )
    prefix = options.output / f"{options.name}_{options.json_key}_document"
    settings = _settings(options, paths, tokens)
    note = dataset.read_note(prefix)
    if note is not None and note["settings"] == settings:
        print(f"{prefix} already holds this dataset; nothing to do.")
        return
    parts = options.output / f".{prefix.name}-{_digest(settings)}"
    if not parts.exists():  # nothing of this dataset is there yet
        _refuse_other_dataset(prefix, note, settings)
    with files.locked(parts / "lock", f"Another process is writing {prefix} now."):
        count = _tokenise(paths, options, parts)
        found = _join(parts, count, prefix, token_dtype(tokens.vocab_size))
        write_atomically(
            dataset.note_path(prefix),
            checksums.dumps(
                {"schema": dataset.SCHEMA, "vocab_size": tokens.vocab_size,
                 "tokenizer": tokens.name, "end_of_document": tokens.end_of_document, **found,
                 "settings": settings, "files": dataset.checksums_of(prefix)},
            ),
        )  # fmt: skip
        shutil.rmtree(parts)
    print(f"{prefix}: {counted(found['documents'], 'document')}, {found['tokens']:,} tokens.")


def _refuse_other_dataset(
    prefix: Path, note: dict[str, Any] | None, settings: dict[str, Any]
) -> None:
    index = prefix.with_name(f"{prefix.name}.idx")
    if not index.exists():
        return
    other = files.difference(note["settings"], settings) if note else "by other software"
    raise InputError(
        f"{index} was made with other settings ({other}). Choose another --output or --name, or "
        "remove it."
    )


def _settings(options: Options, paths: list[Path], tokens: Tokenizer) -> dict[str, Any]:
    inputs = [
        [remote.without_secrets(str(path)), path.stat().st_size, path.stat().st_mtime_ns]
        for path in paths
    ]
    return {
        "inputs": inputs,
        "tokenizer": tokens.digest,
        "json_key": options.json_key,
        "append_eod": options.append_eod,
    }


def _digest(settings: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:16]


# --- blocks


def _blocks(paths: list[Path]) -> Iterator[TextBlock]:
    """Whole lines, about BLOCK_BYTES of them each; which is a matter of the input alone."""
    number = 0
    for path in paths:
        line, suffixes = 1, Path(path.name).suffixes
        is_json = any(suffix in _JSON_LINES for suffix in suffixes)
        with _opened(path) as file:
            text = _read(path, file)
            while True:
                following = _read(path, file) if text else b""
                yield TextBlock(
                    number, str(path), line, text, ends_file=not following, is_json=is_json
                )
                number += 1
                line += text.count(b"\n")
                if not following:
                    break
                text = following


def _read(path: Path, file: BinaryIO) -> bytes:
    try:
        return file.read(BLOCK_BYTES) + file.readline()
    except (OSError, EOFError, lzma.LZMAError) as error:
        raise InputError(f"{path} cannot be read: {error}.") from None


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Unpacked. A file elsewhere is read here, too: connections do not survive a fork."""
    unpacked: Any = {".gz": gzip.open, ".xz": lzma.open}.get(path.suffix, nullcontext)
    with (
        io.BufferedReader(path.open("rb", buffering=0), remote.READ_BYTES) as file,
        unpacked(file) as text,
    ):
        yield text


def _tokenise(paths: list[Path], options: Options, parts: Path) -> int:
    """Write every block's part that is not there yet. Returns how many blocks there are."""
    count = 0
    waiting: list[Future[None]] = []
    text_bytes = sum(path.stat().st_size for path in paths)
    cores = min(len(os.sched_getaffinity(0)), text_bytes // BLOCK_BYTES + 1)
    workers = options.workers or cores
    pool = ProcessPoolExecutor(
        workers, get_context("spawn"), initializer=_begin, initargs=(options,)
    )
    with rate_bar("Tokenising", text_bytes, "MB") as advance, pool:
        try:
            for block in _blocks(paths):
                count += 1
                advance(len(block.text))
                if not _part(parts, block.number).exists():
                    waiting.append(pool.submit(_write_part, block, parts))
                if len(waiting) >= 4 * workers:  # a bound on what is in memory
                    waiting.pop(0).result()
            for future in waiting:
                future.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return count


def _part(parts: Path, number: int) -> Path:
    return parts / f"{number:08d}.npz"


# --- in a worker


_STATE: dict[str, Any] = {}


def _begin(options: Options) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are parallel already
    _STATE["options"], _STATE["tokens"] = options, tokenizer.load(options.tokenizer)


def _end_with_parent() -> None:
    """Otherwise a worker whose parent was killed waits forever, and keeps its memory."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _write_part(block: TextBlock, parts: Path) -> None:
    """The block's tokens, the lengths of its pieces, and whether the last one ends a document."""
    options, tokens = _STATE["options"], _STATE["tokens"]
    texts = _json_texts(block, options.json_key) if block.is_json else [_decode(block)]
    ends = block.is_json or block.ends_file
    documents = tokens.encode(texts)
    if not any(documents) and any(text.strip() for text in texts):
        raise InputError(
            f"{options.tokenizer} knows no token in {block.path} from line {block.first_line:,} "
            "on: the text would be dropped. Is it the tokenizer of this text, and whole?"
        )
    if options.append_eod:
        for place, document in enumerate(documents):
            # As Megatron does it, an empty document has no end; the last part of a long one has.
            has_begun = bool(document) or (not block.is_json and block.first_line > 1)
            if has_begun and (ends or place < len(documents) - 1):
                document.append(tokens.end_of_document)
    ids = np.array([i for document in documents for i in document], token_dtype(tokens.vocab_size))
    lengths = np.array([len(d) for d in documents], np.int64)
    with files.replacing(_part(parts, block.number)) as temporary, open(temporary, "xb") as file:
        np.savez(file, ids=ids, lengths=lengths, ends=ends)


def _json_texts(block: TextBlock, key: str) -> list[str]:
    texts = []
    for number, line in enumerate(block.text.splitlines(), start=block.first_line):
        if not line.strip():
            continue
        try:
            text = json.loads(line)[key]
        except (ValueError, KeyError, TypeError):
            text = None
        if not isinstance(text, str):
            raise InputError(
                f"{block.path}, line {number}: expected a JSON object with a text {key!r}, "
                f"received {line[:60]!r}."
            )
        texts.append(text)
    return texts


def _decode(block: TextBlock) -> str:
    try:
        return block.text.decode("utf-8")
    except UnicodeDecodeError as error:
        line = block.first_line + block.text[: error.start].count(b"\n")
        raise InputError(f"{block.path}, line {line}: not UTF-8 ({error.reason}).") from None


# --- joining


def _join(parts: Path, count: int, prefix: Path, dtype: np.dtype[Any]) -> dict[str, int]:
    """Append the parts in order; the files get their names when they are whole.

    As Megatron's, an empty document has no sequence, but is counted: a boundary stands twice.
    """
    documents: list[int] = []  # their tokens
    open_document = False  # whether the last piece so far goes on in the next block
    with _appearing(prefix.with_name(f"{prefix.name}.bin"), parts) as file:
        for number in range(count):
            with np.load(_part(parts, number)) as part:
                file.write(part["ids"].astype(dtype).tobytes())
                pieces, ends = part["lengths"].tolist(), bool(part["ends"])
            if open_document and pieces:
                documents[-1] += pieces.pop(0)
            documents += pieces
            open_document = not ends
    # The index last: without it there is no dataset.
    with _appearing(prefix.with_name(f"{prefix.name}.idx"), parts) as file:
        lengths = np.array(documents, np.int64)
        boundaries = np.concatenate([[0], np.cumsum(lengths > 0)])
        write_index(file, dtype, lengths[lengths > 0], boundaries)
    return {"documents": len(documents), "tokens": sum(documents)}


@contextmanager
def _appearing(path: Path, parts: Path) -> Iterator[BinaryIO]:
    """A file that gets its name when it is whole; until then it is one of the parts."""
    temporary = parts / path.name
    temporary.unlink(missing_ok=True)  # of a preparation that was killed here
    with open(temporary, "xb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
