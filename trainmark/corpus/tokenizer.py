"""Tokenizers from a local folder: Hugging Face's tokenizer.json, or tiktoken's tokenizer.model.

Both run in the `tokenizers` library. A tiktoken file lists byte strings by rank and no merges; the
merges follow from the ranks, because byte-pair encoding always joins the pair of lowest rank.
"""

import base64
import binascii
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainmark.errors import InputError, require
from trainmark.files import read_json

# How Llama-3 cuts text into words before byte-pair encoding (published with its tokenizer).
LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3_SPECIAL_TOKENS = 256
_END_NAMES = ("<|end_of_text|>", "<|endoftext|>", "</s>", "<eos>", "<|eot_id|>")


@dataclass(frozen=True)
class Tokenizer:
    """Text to token ids."""

    encoder: Any
    vocab_size: int
    end_of_document: int | None
    name: str
    digest: str
    """Digest of its file, so that a continued preparation uses the same one."""

    def encode(self, texts: list[str]) -> list[list[int]]:
        return [found.ids for found in self.encoder.encode_batch(texts, add_special_tokens=False)]


def load(folder: Path) -> Tokenizer:
    """The tokenizer in a folder (or the file itself)."""
    require("Preparing text", "tokenizers", extra="text")
    for path in (folder / "tokenizer.json", folder / "tokenizer.model", folder):
        if path.is_file():
            return _from_json(path) if path.suffix == ".json" else _from_tiktoken(path)
    raise InputError(
        f"{folder} has no tokenizer: expected tokenizer.json (Hugging Face) or tokenizer.model "
        "(tiktoken)."
    )


def _from_json(path: Path) -> Tokenizer:
    from tokenizers import Tokenizer as Encoder

    try:
        encoder = Encoder.from_file(str(path))
    except Exception as error:  # the library raises plain Exceptions
        raise InputError(f"{path} cannot be read: {error}.") from None
    size = encoder.get_vocab_size(with_added_tokens=True)
    highest = max(encoder.get_vocab(with_added_tokens=True).values(), default=-1)
    end = _configured_end(path.parent, encoder)
    if end is None:
        end = next((i for i in map(encoder.token_to_id, _END_NAMES) if i is not None), None)
    return Tokenizer(encoder, max(size, highest + 1), end, path.parent.name, _digest(path))


def _configured_end(folder: Path, encoder: Any) -> int | None:
    path = folder / "tokenizer_config.json"
    token = read_json(path).get("eos_token")
    token = token.get("content") if isinstance(token, dict) else token
    if not isinstance(token, str | None):
        raise InputError(f"{path}: eos_token should be a token's text. Received: {token!r:.80}.")
    found: int | None = encoder.token_to_id(token) if token else None
    return found


def _from_tiktoken(path: Path) -> Tokenizer:
    from tokenizers import AddedToken, Regex
    from tokenizers import Tokenizer as Encoder
    from tokenizers.decoders import ByteLevel as ByteLevelDecoder
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split

    ranks = read_ranks(path)
    _check_whole(path, ranks)
    names = {token: "".join(_BYTE_NAMES[byte] for byte in token) for token in ranks}
    vocab = {names[token]: rank for token, rank in ranks.items()}
    pairs = [(names[a], names[b]) for a, b in merges(ranks)]
    # A word that is a token itself is taken whole, as tiktoken does.
    encoder = Encoder(BPE(vocab, pairs, ignore_merges=True))
    encoder.pre_tokenizer = Sequence(
        [
            Split(Regex(LLAMA3_WORDS), "isolated"),
            ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    encoder.decoder = ByteLevelDecoder()
    special = ["<|begin_of_text|>", "<|end_of_text|>"]
    special += [f"<|reserved_{i}|>" for i in range(LLAMA3_SPECIAL_TOKENS - len(special))]
    encoder.add_special_tokens([AddedToken(name, special=True) for name in special])
    end = len(ranks) + 1
    return Tokenizer(
        encoder, len(ranks) + LLAMA3_SPECIAL_TOKENS, end, path.parent.name, _digest(path)
    )


def read_ranks(path: Path) -> dict[bytes, int]:
    """Byte strings by rank, from lines of base64 and a number."""
    ranks = {}
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                token, rank = line.split()
                ranks[base64.b64decode(token, validate=True)] = int(rank)
            except (ValueError, binascii.Error):
                raise InputError(
                    f"{path}, line {number}: expected base64 and a rank, received {line[:40]!r}."
                ) from None
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise InputError(f"{path}: ranks must be 0 to {len(ranks) - 1}, each once.")
    return ranks


def _check_whole(path: Path, ranks: dict[bytes, int]) -> None:
    """Refuse a file that was cut: what it has no tokens for would be dropped, or told in bytes."""
    missing = sum(bytes([byte]) not in ranks for byte in range(256))
    if missing:
        raise InputError(f"{path} has no token for {missing} of the 256 bytes: it is not whole.")
    for name in ("params.json", "config.json"):  # Meta's and Hugging Face's, beside it
        wanted = read_json(path.with_name(name)).get("vocab_size")
        if isinstance(wanted, int) and wanted > len(ranks) + LLAMA3_SPECIAL_TOKENS:
            raise InputError(
                f"{path} has {len(ranks):,} tokens, and {LLAMA3_SPECIAL_TOKENS} special ones; "
                f"{name} beside it says {wanted:,}: it is not whole."
            )


def merges(ranks: dict[bytes, int]) -> Iterator[tuple[bytes, bytes]]:
    """The last join that makes each token, in the order of ranks."""
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        if len(token) > 1:
            parts = _encode_below(token, ranks, rank)
            if len(parts) == 2:  # else the token is never reached by joining, only as a whole word
                yield parts[0], parts[1]


def _encode_below(token: bytes, ranks: dict[bytes, int], limit: int) -> list[bytes]:
    """Byte-pair encode `token` with the joins of lower rank than `limit`."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        candidates = [(ranks.get(parts[i] + parts[i + 1], limit), i) for i in range(len(parts) - 1)]
        rank, place = min(candidates)
        if rank >= limit:
            break
        parts[place : place + 2] = [parts[place] + parts[place + 1]]
    return parts


def _byte_names() -> dict[int, str]:
    """The printable character that stands for each byte in byte-level vocabularies."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    names = {byte: chr(byte) for byte in printable}
    others = [byte for byte in range(256) if byte not in names]
    return names | {byte: chr(256 + place) for place, byte in enumerate(others)}


_BYTE_NAMES = _byte_names()


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
