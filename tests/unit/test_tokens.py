"""Indexed token files byte for byte, samples in Megatron's order, and `prepare tokens`."""

import itertools
import json
import lzma
import signal
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from tests.token_files import write_tokens
from tests.waiting import PATIENCE_S
from trainmark.cli import main
from trainmark.corpus import dataset, indexed, samples, tokenizer, tokens
from trainmark.errors import InputError

DOCUMENTS = [np.array(d) for d in ([1, 2, 3], [], [4], [5, 6, 7, 8, 9, 10, 11], [12, 13])]
TYPES: list[np.dtype[Any]] = [np.dtype(np.uint16), np.dtype(np.int32)]


# --- files


def expected_index(code: int, width: int) -> bytes:
    """The .idx of DOCUMENTS, written down by the documented layout."""
    lengths = [len(document) for document in DOCUMENTS]
    starts = [width * sum(lengths[:i]) for i in range(len(lengths))]
    return b"".join(
        [
            b"MMIDIDX\x00\x00",
            struct.pack("<QB", 1, code),
            struct.pack("<QQ", len(lengths), len(lengths) + 1),
            struct.pack(f"<{len(lengths)}i", *lengths),
            struct.pack(f"<{len(lengths)}q", *starts),
            struct.pack(f"<{len(lengths) + 1}q", *range(len(lengths) + 1)),
        ]
    )


@pytest.mark.parametrize(("dtype", "code"), list(zip(TYPES, (8, 4), strict=True)))
def test_the_index_has_megatrons_bytes(tmp_path: Path, dtype: np.dtype, code: int) -> None:
    write_tokens(tmp_path / "x", DOCUMENTS, dtype)
    assert (tmp_path / "x.idx").read_bytes() == expected_index(code, dtype.itemsize)
    assert indexed.HEADER_BYTES == 34


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("modes", [b"", bytes(len(DOCUMENTS))])
def test_what_was_written_is_read(tmp_path: Path, dtype: np.dtype, modes: bytes) -> None:
    write_tokens(tmp_path / "x", DOCUMENTS, dtype)
    with open(tmp_path / "x.idx", "ab") as file:
        file.write(modes)
    found = indexed.open_tokens(tmp_path / "x")
    assert [found.read(i).tolist() for i in range(len(found))] == [d.tolist() for d in DOCUMENTS]
    assert found.read(3, 2, 5).tolist() == [7, 8, 9]


def test_the_type_follows_the_vocabulary() -> None:
    assert indexed.token_dtype(65_499) == np.uint16
    assert indexed.token_dtype(65_500) == np.int32


@pytest.mark.parametrize("cut", [0, 8, 33, 40, 60, 100, 141])
def test_a_truncated_index_is_named_with_the_offset(tmp_path: Path, cut: int) -> None:
    write_tokens(tmp_path / "x", DOCUMENTS, TYPES[0])
    whole = (tmp_path / "x.idx").read_bytes()
    assert len(whole) == 142
    (tmp_path / "x.idx").write_bytes(whole[:cut])
    with pytest.raises(InputError, match=rf"x\.idx is truncated.* ends at {cut}"):
        indexed.open_tokens(tmp_path / "x")


@pytest.mark.parametrize(
    ("offset", "value", "message"),
    [
        (0, b"X", "byte 0: expected"),
        (9, b"\x02", "byte 9: expected version 1"),
        (17, b"\x07", "byte 17: 7 is not the code"),
        (25, b"\xff", "byte 18: .* cannot be in a file"),
        (34, b"\xff\xff\xff\x7f", "byte 54: sequence 0 .* does not lie inside"),
        (54 + 8, b"\x01", "byte 62: sequence 1"),
        (94, b"\x01", "byte 94: document boundaries"),
    ],
)
def test_a_corrupt_index_is_named_with_the_offset(
    tmp_path: Path, offset: int, value: bytes, message: str
) -> None:
    write_tokens(tmp_path / "x", DOCUMENTS, TYPES[0])
    raw = bytearray((tmp_path / "x.idx").read_bytes())
    raw[offset : offset + len(value)] = value
    (tmp_path / "x.idx").write_bytes(raw)
    with pytest.raises(InputError, match=message):
        indexed.open_tokens(tmp_path / "x")


def test_a_truncated_bin_is_noticed(tmp_path: Path) -> None:
    write_tokens(tmp_path / "x", DOCUMENTS, TYPES[0])
    (tmp_path / "x.bin").write_bytes((tmp_path / "x.bin").read_bytes()[:-1])
    with pytest.raises(InputError, match=r"sequence 4 .* does not lie inside x\.bin"):
        indexed.open_tokens(tmp_path / "x")


# --- samples


def slow_sample_index(
    lengths: list[int], documents: list[int], sequence: int, count: int
) -> list[list[int]]:
    """The documented walk, one document at a time."""
    found, place, offset = [[0, 0]], 0, 0
    for _ in range(count):
        remaining = sequence + 1
        while remaining:
            available = lengths[documents[place]] - offset
            remaining -= available
            if remaining <= 0:
                offset += remaining + available - 1
                remaining = 0
            else:
                place, offset = place + 1, 0
        found.append([place, offset])
    return found


class Megatron:
    """Its published rules, counted one epoch and one document at a time, in plain lists."""

    def __init__(
        self, lengths: list[int], sequences: range, sequence: int, wanted: int | None, seed: int
    ) -> None:
        random = np.random.RandomState(seed)
        per_epoch = sum(lengths[i] for i in sequences)
        epochs, tokens = 1, per_epoch
        while wanted is not None and tokens < wanted * sequence + 1:
            epochs, tokens = epochs + 1, tokens + per_epoch
        before_last = (tokens - per_epoch - 1) // sequence
        of_one_epoch = (per_epoch - 1) // sequence
        self.last_is_apart = (
            wanted is not None and epochs > 1 and wanted - before_last < int(0.8 * of_one_epoch)
        )
        count = (tokens - 1) // sequence
        if self.last_is_apart:
            orders = [list(sequences) * (epochs - 1), list(sequences)]
            places = [list(range(before_last)), list(range(before_last, count))]
        else:
            orders, places = [list(sequences) * epochs], [list(range(count))]
        for part in (*orders, *places):  # documents first, from one stream of random numbers
            random.shuffle(part)
        self.epochs = epochs
        self.documents = list(itertools.chain(*orders))
        self.samples = slow_sample_index(lengths, self.documents, sequence, count)
        self.shuffle = list(itertools.chain(*places))


def test_indices_are_megatrons() -> None:
    random = np.random.default_rng(0)
    together: set[int] = set()
    apart: set[int] = set()
    for case in range(400):
        sequence = int(random.integers(1, 40))
        sizes = random.integers(0, 2 * sequence, random.integers(2, 30)).astype(np.int32)
        sizes[-1] += sequence + 1  # one sample at least
        sequences = range(int(random.integers(0, len(sizes))), len(sizes))
        if case % 2:  # passes that end with a whole sample, but for the token after it
            sizes[-1] += -sizes[sequences.start :].sum() % sequence
        one_pass = int(sizes[sequences.start :].sum()) // sequence
        # Around the edges: whole passes, and a last one that is needed for 80 %.
        passes = random.choice([1, 2, 3, 1.8, 2.8, random.uniform(0, 6)])
        near = int(passes * one_pass) + int(random.integers(-1, 2))
        wanted = None if case % 8 == 0 else max(1, near)
        expected = Megatron(sizes.tolist(), sequences, sequence, wanted, seed=case)
        found = samples.build(sizes, sequences, sequence, wanted, seed=case)
        assert found.documents.tolist() == expected.documents, case
        assert found.samples.tolist() == expected.samples, case
        assert found.shuffle.tolist() == expected.shuffle, case
        (apart if expected.last_is_apart else together).add(expected.epochs)
    assert together >= {1, 2, 3, 4, 5, 6}
    assert apart >= {2, 3, 4, 5, 6}


def test_samples_overlap_by_one_token_and_are_cached(tmp_path: Path) -> None:
    documents = [np.arange(i * 100, i * 100 + 37) for i in range(9)]
    write_tokens(tmp_path / "x", documents, TYPES[0])
    folder = dataset.find(tmp_path)
    found = folder.open("train", "100,0,0", 16, 20, 1)
    assert all(len(found[i]) == 17 for i in range(len(found)))
    stream = np.concatenate([documents[i] for i in found._indices.documents])
    starts = [int(found._indices.shuffle[i]) * 16 for i in range(20)]
    assert all((found[i] == stream[s : s + 17]).all() for i, s in enumerate(starts))
    cached = sorted((tmp_path / "cache/GPTDataset_indices").iterdir())
    assert [path.name.split("-GPTDataset-")[1] for path in cached] == [
        "description.txt", "document_index.npy", "sample_index.npy", "shuffle_index.npy",
    ]  # fmt: skip
    again = dataset.find(tmp_path).open("train", "100,0,0", 16, 20, 1)
    assert np.array_equal(again[7], found[7])
    cached[2].write_bytes(b"damaged")
    assert np.array_equal(dataset.find(tmp_path).open("train", "100,0,0", 16, 20, 1)[7], found[7])


def test_splits_share_out_documents(tmp_path: Path) -> None:
    write_tokens(tmp_path / "x", [np.full(100, i) for i in range(10)], TYPES[0])
    folder = dataset.find(tmp_path / "x")
    assert folder.vocab_size == 10
    parts = [folder._sequences(split, "80,10,10") for split in dataset.SPLITS]
    assert parts == [range(8), range(8, 9), range(9, 10)]
    assert len(folder.open("test", "100,0,0", 16, None, 0)) == 0
    with pytest.raises(InputError, match="three weights"):
        dataset.parse_split("98,2")


# --- tokenizers


def bytes_tokenizer(folder: Path) -> Path:
    """Every byte is a token, and so is the end of a document."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: i for i, character in enumerate(alphabet)}
    encoder = Tokenizer(models.BPE(vocab, []))
    encoder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    encoder.add_special_tokens(["<|endoftext|>"])
    folder.mkdir(exist_ok=True)
    encoder.save(str(folder / "tokenizer.json"))
    return folder


def tiktoken_file(path: Path) -> dict[bytes, int]:
    import base64

    ranks = {bytes([i]): i for i in range(256)}
    for token in (b"he", b"ll", b"llo", b"hello", b" w", b" wor", b"ld"):
        ranks[token] = len(ranks)
    lines = [f"{base64.b64encode(t).decode()} {rank}" for t, rank in ranks.items()]
    path.write_text("\n".join(lines) + "\n")
    return ranks


def slow_bpe(word: bytes, ranks: dict[bytes, int]) -> list[int]:
    if word in ranks:
        return [ranks[word]]
    parts = [word[i : i + 1] for i in range(len(word))]
    while True:
        pairs = [(ranks[a + b], i) for i, (a, b) in enumerate(itertools.pairwise(parts))
                 if a + b in ranks]  # fmt: skip
        if not pairs:
            return [ranks[part] for part in parts]
        _, i = min(pairs)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


def test_a_tiktoken_file_is_encoded_by_its_ranks(tmp_path: Path) -> None:
    ranks = tiktoken_file(tmp_path / "tokenizer.model")
    loaded = tokenizer.load(tmp_path)
    assert (loaded.vocab_size, loaded.end_of_document) == (len(ranks) + 256, len(ranks) + 1)
    words = ["hello", " world", " hell", " yellow", "\n\n", "123", "4", " Ünïcode"]
    expected = [i for word in words for i in slow_bpe(word.encode(), ranks)]
    assert loaded.encode(["".join(words)])[0] == expected
    assert loaded.encoder.decode(loaded.encode(["hello world, été"])[0]) == "hello world, été"


def test_a_bad_tiktoken_line_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_text("aGU= 0\nnot-base64! 1\n")
    with pytest.raises(InputError, match="line 2"):
        tokenizer.load(tmp_path)


@pytest.mark.parametrize("kept_lines", [0, 1, 255])
def test_a_tiktoken_file_that_was_cut_is_refused(tmp_path: Path, kept_lines: int) -> None:
    path = tmp_path / "tokenizer.model"
    tiktoken_file(path)
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:kept_lines]))
    missing = 256 - kept_lines
    with pytest.raises(InputError, match=f"no token for {missing} of the 256 bytes"):
        tokenizer.load(tmp_path)


@pytest.mark.parametrize("name", ["params.json", "config.json"])
def test_a_tiktoken_file_shorter_than_the_model_beside_it_is_refused(
    tmp_path: Path, name: str
) -> None:
    ranks = tiktoken_file(tmp_path / "tokenizer.model")
    (tmp_path / name).write_text(json.dumps({"vocab_size": len(ranks) + 256}))
    assert tokenizer.load(tmp_path).vocab_size == len(ranks) + 256
    (tmp_path / name).write_text(json.dumps({"vocab_size": len(ranks) + 257}))
    with pytest.raises(InputError, match=f"{name} beside it says 520: it is not whole"):
        tokenizer.load(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", '{"eos_token": 3}', '{"eos_token": {"content": []}}'])
def test_a_bad_tokenizer_config_is_named(tmp_path: Path, text: str) -> None:
    folder = bytes_tokenizer(tmp_path / "tok")
    (folder / "tokenizer_config.json").write_text(text)
    with pytest.raises(InputError, match=r"tokenizer_config\.json"):
        tokenizer.load(folder)


def test_text_without_a_known_token_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tokenizers import Tokenizer, models

    (tmp_path / "tok").mkdir()
    Tokenizer(models.BPE({"a": 0}, [])).save(str(tmp_path / "tok" / "tokenizer.json"))
    (tmp_path / "text.txt").write_text("Some words.\n")
    words = ["prepare", "tokens", "--input", str(tmp_path / "text.txt"), "--tokenizer"]
    words += [str(tmp_path / "tok"), "--output", str(tmp_path / "out"), "--workers", "1"]
    assert main([*words, "--no-append-eod"]) == 2
    assert "the text would be dropped" in capsys.readouterr().err
    assert not list((tmp_path / "out").glob("*.idx"))


# --- prepare


def prepare(tmp_path: Path, pattern: str, *flags: str) -> int:
    return main(
        ["prepare", "tokens", "--input", str(tmp_path / pattern), "--tokenizer",
         str(bytes_tokenizer(tmp_path / "tok")), "--output", str(tmp_path / "out"), "--workers",
         "1", *flags]
    )  # fmt: skip


def documents_of(tmp_path: Path, name: str = "") -> list[bytes]:
    found = dataset.find(tmp_path / "out" / name).tokens
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = {tokenizer._BYTE_NAMES[byte]: byte for byte in range(256)}
    table = {i: bytes([names[c]]) for i, c in enumerate(alphabet)} | {256: b"$"}
    return [b"".join(table[int(t)] for t in found.read(i)) for i in range(len(found))]


def test_json_lines_become_documents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [{"text": f"line {i} é", "id": i} for i in range(50)]
    with lzma.open(tmp_path / "a.jsonl.xz", "wt") as file:
        file.write("\n".join(map(json.dumps, lines)))
    monkeypatch.setattr(tokens, "BLOCK_BYTES", 200)
    assert prepare(tmp_path, "*.jsonl.xz") == 0
    assert documents_of(tmp_path) == [f"line {i} é$".encode() for i in range(50)]
    assert (tmp_path / "out" / "corpus_text_document.idx").exists()
    assert prepare(tmp_path, "*.jsonl.xz") == 0
    assert "nothing to do" in capsys.readouterr().out


def test_any_number_of_workers_gives_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In many blocks, of which the first takes the longest: they are not done in order."""
    texts = ["word " * 50_000, *(f"document {i}, " + "word " * (i % 97) for i in range(300))]
    lines = [json.dumps({"text": text}) + "\n" for text in texts]
    (tmp_path / "a.jsonl").write_text("".join(lines[:200]))
    (tmp_path / "b.jsonl").write_text("".join(lines[200:]))
    monkeypatch.setattr(tokens, "BLOCK_BYTES", 3000)
    for workers in ("1", "3"):
        assert prepare(tmp_path, "?.jsonl", "--name", workers, "--workers", workers) == 0
    for kind in ("bin", "idx"):
        one, three = ((tmp_path / "out" / f"{n}_text_document.{kind}").read_bytes() for n in "13")
        assert one == three
    assert documents_of(tmp_path, "3_text_document") == [f"{text}$".encode() for text in texts]


def test_another_dataset_is_not_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text(name)
    assert prepare(tmp_path, "a.txt") == 0
    assert prepare(tmp_path, "b.txt") == 2
    assert "made with other settings (inputs:" in capsys.readouterr().err
    (tmp_path / "out" / "corpus_text_document.json").unlink()
    assert prepare(tmp_path, "a.txt") == 2
    assert "by other software" in capsys.readouterr().err
    assert documents_of(tmp_path) == [b"a$"]
    assert prepare(tmp_path, "b.txt", "--name", "other") == 0
    # Killed before the note was written, a preparation goes on: the files are its own.
    for path in (tmp_path / "out").iterdir():
        path.unlink()
    with monkeypatch.context() as patch:
        patch.setattr(tokens, "write_atomically", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            prepare(tmp_path, "b.txt")
    assert prepare(tmp_path, "b.txt") == 0
    assert documents_of(tmp_path) == [b"b$"]


def test_a_text_file_is_one_document_and_a_stopped_preparation_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "".join(f"line {i}\n" for i in range(300))
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text(name + text)
    monkeypatch.setattr(tokens, "BLOCK_BYTES", 500)
    stop_at = tokens._join
    monkeypatch.setattr(tokens, "_join", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        prepare(tmp_path, "?.txt")
    (parts,) = (tmp_path / "out").glob(".corpus*")
    done = {path.name: path.stat().st_mtime_ns for path in parts.iterdir()}
    assert len(done) >= 10
    (parts / "00000003.npz").unlink()
    seen = []
    monkeypatch.setattr(tokens, "_join", lambda *args: seen.append(_times(parts)) or stop_at(*args))
    assert prepare(tmp_path, "?.txt") == 0
    assert {n for n, t in seen[0].items() if done[n] != t} == {"00000003.npz"}
    assert documents_of(tmp_path) == [f"{name}{text}$".encode() for name in ("a", "b")]
    assert not parts.exists()


KILLED = """
import os, signal, sys, time
from pathlib import Path
from trainmark.cli import main
from trainmark.corpus import tokens

def blocks(paths):
    yield tokens.TextBlock(0, str(paths[0]), 1, b"text", ends_file=True, is_json=False)
    while not list(Path(sys.argv[1]).glob("out/.corpus*/00000000.npz")):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)

tokens._blocks = blocks
main(["prepare", "tokens", *sys.argv[2:]])
"""


def test_workers_end_with_a_preparation_that_is_killed(tmp_path: Path) -> None:
    """They hold its pipe: it is at its end when they are gone."""
    (tmp_path / "a.txt").write_text("text")
    bytes_tokenizer(tmp_path / "tok")
    flags = ["--input", "a.txt", "--tokenizer", "tok", "--output", "out"]
    line = [sys.executable, "-c", KILLED, str(tmp_path), *flags]
    ended = subprocess.run(line, cwd=tmp_path, stderr=subprocess.PIPE, timeout=PATIENCE_S)
    assert ended.returncode == -signal.SIGKILL


def _times(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}


def test_a_bad_line_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "good"}\n{"body": "bad"}\n')
    assert prepare(tmp_path, "a.jsonl") == 2
    assert "a.jsonl, line 2: expected a JSON object" in capsys.readouterr().err
    assert prepare(tmp_path, "none*.txt") == 2


def test_addresses_of_files_of_this_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text("some text")
    words = ["prepare", "tokens", "--tokenizer", str(bytes_tokenizer(tmp_path / "tok"))]
    for given, output, said in (
        (f"file://{tmp_path}/a.txt", str(tmp_path / "out"), None),
        (f"{tmp_path}/a.txt", "s3://bucket/tokens", "s3:/bucket/tokens is an address of s3:"),
    ):
        assert main([*words, "--input", given, "--output", output]) == (2 if said else 0)
        assert said is None or said in capsys.readouterr().err
