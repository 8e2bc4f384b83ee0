"""Preparing sentences, reading them, and cutting them into batches."""

import dataclasses
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.small_distilbert import batches, config, write_dataset
from trainmark.cli import main
from trainmark.corpus import sentence_files, sentences, sst2
from trainmark.errors import InputError
from trainmark.hardware.devices import Cluster
from trainmark.workloads import resolve
from trainmark.workloads.distilbert import opinions
from trainmark.workloads.distilbert.data import build_data
from trainmark.workloads.distilbert.runs import DistilbertRun, distilbert_sst2

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "good", "bad", "film", "!", ",", "very", "##ly"]
ROWS = ["a very good film !\t1", 'a "bad film\t0', "badly , badly bad film\t0"]


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    pytest.importorskip("tokenizers")
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    (folder / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    return folder


def table(path: Path, rows: list[str], header: str = "sentence\tlabel") -> Path:
    path.write_text("\n".join([header, *rows]) + "\n")
    return path


def prepare(tmp_path: Path, tokenizer: Path, rows: list[str], **changes: Any) -> Path:
    train = table(tmp_path / "train.tsv", rows)
    options = sst2.Options(
        train=train, dev=train, tokenizer=tokenizer, output=tmp_path / "data", sequence_length=8
    )
    sst2.prepare(dataclasses.replace(options, **changes))
    return tmp_path / "data"


# --- prepare


def test_published_arrays(tmp_path: Path, tokenizer: Path) -> None:
    folder = prepare(tmp_path, tokenizer, ROWS)
    with np.load(folder / "dataset" / "train_dataset.npz") as file:
        assert sorted(file) == ["attention_mask", "idx", "input_ids", "label", "sentence"]
        ids, mask = file["input_ids"], file["attention_mask"]
        assert ids.dtype == mask.dtype == np.int64
        assert file["label"].tolist() == [1, 0, 0]
        assert file["sentence"].tolist() == [row.split("\t")[0] for row in ROWS]
    word = {w: i for i, w in enumerate(WORDS)}
    assert ids[0].tolist() == [2, word["a"], word["very"], word["good"], word["film"], 8, 3, 0]
    assert mask.tolist() == [[1] * 7 + [0], [1] * 6 + [0] * 2, [1] * 8]  # cut at 8
    assert ids[2, -1] == word["[SEP]"]


def test_both_forms_hold_the_same(tmp_path: Path, tokenizer: Path) -> None:
    folder = prepare(tmp_path, tokenizer, ROWS)
    packed = sentences.load(folder, "train")
    padded = sentences._load_npz(sentences.npz_path(folder, "train"))
    for name in ("tokens", "offsets", "labels"):
        np.testing.assert_array_equal(getattr(packed, name), getattr(padded, name))
    assert isinstance(packed.tokens, np.memmap)
    assert (folder / "model" / "vocab.txt").is_file()


def test_csv_and_parquet(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    texts = ['say "hi", you', "no"]
    (tmp_path / "a.csv").write_text('label,sentence\n1,"say ""hi"", you"\n0,no\n')
    columns = pyarrow.table({"idx": [0, 1], "sentence": texts, "label": [1, 0]})
    pyarrow.parquet.write_table(columns, tmp_path / "a.parquet")
    for name in ("a.csv", "a.parquet"):
        assert sst2.read_table(tmp_path / name, 2) == (texts, [1, 0])


def test_a_table_is_read_as_predict_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part at a time, in which other columns may be of any type, and blank lines are none."""
    monkeypatch.setattr(sentence_files, "PART_BYTES", 1 << 8)
    rows = [f'{n if n < 80 else "?"}\ta "b" {n}\t{n % 2}' for n in range(100)]
    path = table(tmp_path / "t.tsv", [*rows, "", ""], header="idx\tsentence\tlabel")
    texts = [f'a "b" {n}' for n in range(100)]
    assert sst2.read_table(path, 2) == (texts, [0, 1] * 50)
    found = sentence_files.parts([path], None, ["idx"])
    assert [text for part in found for text in part.sentences] == texts
    with pytest.raises(InputError, match=r"t\.txt is expected to be a table"):
        sst2.read_table(path.rename(tmp_path / "t.txt"), 2)


def test_repeated_prepare_does_nothing(tmp_path: Path, tokenizer: Path, capsys: Any) -> None:
    prepare(tmp_path, tokenizer, ROWS)
    prepare(tmp_path, tokenizer, ROWS)
    assert "nothing to do" in capsys.readouterr().out
    with pytest.raises(InputError, match="other settings"):
        prepare(tmp_path, tokenizer, ROWS, npz=False)
    other = [row.replace("good", "very") for row in ROWS]  # as long as they were
    with pytest.raises(InputError, match="other settings"):
        prepare(tmp_path, tokenizer, other)
    (tokenizer / "vocab.txt").write_text("\n".join([*WORDS[:4], *reversed(WORDS[4:])]) + "\n")
    with pytest.raises(InputError, match="other settings"):
        prepare(tmp_path, tokenizer, ROWS)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (["fine\t1", " \t0"], r"empty sentences in line\(s\) 3"),
        (["a\t1", "b\t2", "c\t-1"], r"labels must be 0 to 1; received '2', '-1' in line\(s\) 3, 4"),
        (["a\tgood"], "received 'good'"),
        (["a"], "Expected 2 columns, got 1: a"),
        (["a\t"], "received None"),
        ([], "has no rows"),
    ],
)
def test_bad_rows_are_named(tmp_path: Path, rows: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        sst2.read_table(table(tmp_path / "t.tsv", rows), 2)


def test_missing_columns_are_named(tmp_path: Path) -> None:
    path = table(tmp_path / "t.tsv", ["x\t1"], header="text\tlabel")
    with pytest.raises(InputError, match="no column sentence; its header has: text, label"):
        sst2.read_table(path, 2)


def test_missing_library_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    path = str(table(tmp_path / "t.tsv", ROWS))
    flags = ["--train", path, "--dev", path, "--tokenizer", str(tmp_path), "--output"]
    assert main(["prepare", "sst2", *flags, str(tmp_path / "data")]) == 2
    assert capsys.readouterr().err == (
        "trainmark: Preparing text needs tokenizers: pip install 'trainmark[text]'.\n"
    )


def test_wrong_tokenizers_are_named(tmp_path: Path, tokenizer: Path) -> None:
    with pytest.raises(InputError, match=r"no tokenizer\.json, no vocab\.txt"):
        sst2.load_tokenizer(tmp_path, 8)
    (tokenizer / "config.json").write_text('{"vocab_size": 5}')
    with pytest.raises(InputError, match="the tokenizer has 12 tokens, but the model"):
        sst2.load_tokenizer(tokenizer, 8)
    import tokenizers

    plain = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "[UNK]": 1}, "[UNK]"))
    plain.save(str(tokenizer / "tokenizer.json"))
    with pytest.raises(InputError, match="is not a BERT-style tokenizer"):
        sst2.load_tokenizer(tokenizer, 8)


# --- reading


def npz(folder: Path, **arrays: Any) -> Path:
    path = sentences.npz_path(folder, "train")
    path.parent.mkdir(parents=True)
    np.savez(path, **arrays)
    return path


GOOD = {
    "idx": np.arange(2),
    "sentence": np.array(["x", "y z"], dtype=object),
    "label": np.array([0, 1]),
    "input_ids": np.array([[2, 5, 3, 0], [2, 6, 7, 3]]),
    "attention_mask": np.array([[1, 1, 1, 0], [1, 1, 1, 1]]),
}


def test_files_of_the_original_script(tmp_path: Path) -> None:
    """Their texts may be pickled objects; they are never unpickled."""
    npz(tmp_path, **GOOD)
    found = sentences.load(tmp_path, "train")
    assert found.tokens.tolist() == [2, 5, 3, 2, 6, 7, 3]
    assert found.offsets.tolist() == [0, 3, 7]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"input_ids": None}, "has no input_ids; it has attention_mask, idx, label, sentence"),
        ({"label": np.array([0])}, "do not belong together"),
        ({"label": np.array([0, -1])}, "sentence 1 of train has label -1"),
        ({"attention_mask": np.array([[1, 0, 1, 0]] * 2)}, "ones followed by zeros"),
        ({"attention_mask": np.array([[0] * 4, [1] * 4])}, "sentence 0 of train has no tokens"),
    ],
)
def test_bad_npz_is_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    npz(tmp_path, **{k: v for k, v in (GOOD | changes).items() if v is not None})
    with pytest.raises(InputError, match=message):
        sentences.load(tmp_path, "train")


def test_truncated_files_are_named(tmp_path: Path) -> None:
    path = npz(tmp_path, **GOOD)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(InputError, match="damaged or truncated"):
        sentences.load(tmp_path, "train")
    packed = write_dataset(tmp_path / "packed-one", [3, 4])
    tokens = sentences.packed_path(packed, "train", "tokens")
    tokens.write_bytes(tokens.read_bytes()[:-2])
    with pytest.raises(InputError, match="is damaged"):
        sentences.load(packed, "train")
    with pytest.raises(InputError, match="holds no train sentences"):
        sentences.load(tmp_path / "packed-one" / "packed", "train")


def test_data_that_does_not_fit_the_model(tmp_path: Path) -> None:
    folder = write_dataset(tmp_path, [40, 3], vocabulary=1000)
    with pytest.raises(InputError) as error:
        config(data=str(folder))
    assert "vocabulary has 200 tokens: they do not belong together" in str(error.value)
    assert (
        "sentences of 40 tokens; sequence_length is 32. Prepare the data with --sequence-length "
        "32, or give --sequence-length 40 --model.positions 40."
    ) in str(error.value)


def test_held_out_data_that_does_not_fit_the_model(tmp_path: Path) -> None:
    """It was found at the first evaluation, as an index out of range."""
    folder = write_dataset(tmp_path, [10, 3])
    odd = sentences.Sentences(np.full(40, 200), np.array([0, 40]), np.array([2]))
    sentences.save_packed(folder, "eval", odd)
    with pytest.raises(InputError) as error:
        config(data=str(folder))
    assert "Give --model.vocabulary 201." in str(error.value)
    assert "sentences of 40 tokens; sequence_length is 32" in str(error.value)
    assert "labels up to 2; give --model.labels 3" in str(error.value)


@pytest.mark.parametrize("longest", [None, 64])
def test_packed_sentences_beyond_the_models_positions(tmp_path: Path, longest: int | None) -> None:
    folder = write_dataset(tmp_path, [33, 3])
    with pytest.raises(InputError, match=r"33 tokens; model.positions is 32\."):
        config(data=str(folder), mode="packed", longest=longest)
    assert config(data=str(write_dataset(tmp_path / "b", [32])), mode="packed").longest == 32


# --- resolve


@pytest.mark.parametrize(
    ("cluster", "micro", "accumulate"),
    [("a100-40gx1x1", 32, 8), ("a100-40gx1x8", 32, 1), ("a100-40gx2x8", 16, 1)],
)
def test_published_cases(cluster: str, micro: int, accumulate: int) -> None:
    from trainmark.config import changed_fields
    from trainmark.workloads.distilbert.runs import closed

    named = distilbert_sst2()
    cfg = resolve(dataclasses.replace(named, data="synthetic"), Cluster.parse(cluster))
    assert (cfg.micro_batch, cfg.accumulate, cfg.global_batch) == (micro, accumulate, 256)
    assert cfg.schedule.decay_steps == 2640
    assert cfg.schedule.factor(0) == 1.0
    assert cfg.schedule.factor(1320) == 0.5
    assert cfg.schedule.factor(2640) == 0.0
    assert changed_fields(named, cfg, closed(cfg)) == ["data"]
    packed = resolve(
        dataclasses.replace(named, data="synthetic", mode="packed"), Cluster.parse(cluster)
    )
    assert "mode" in changed_fields(named, packed, closed(packed))


@pytest.mark.parametrize(
    ("case", "devices", "rate", "steps"),
    [("1x1", 1, 1.5e-4, 702), ("1x8", 8, 5e-5, 88), ("2x8", 16, 5e-5, 44)],
)
def test_fix_hp_rows(
    case: str, devices: int, rate: float, steps: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """96 sentences a device in one micro-batch; the decay takes ten epochs of such steps."""
    page = (Path(__file__).parents[2] / "docs" / "distilbert.md").read_text()
    (flags,) = re.findall(rf"^\| {case}, bs=96.* \| `(.*)` \|$", page, re.M)
    words = [*flags.split(), "--cluster", f"a100-40gx{case}"]
    assert main(["show", "distilbert-sst2", *words]) == 0
    found = shown(capsys)
    assert (int(found["micro_batch"]), int(found["accumulate"])) == (96, 1)
    assert int(found["global_batch"]) == 96 * devices
    assert float(found["lr"]) == rate
    assert int(found["schedule.decay_steps"]) == 10 * steps


def shown(capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """What `trainmark show` printed, by field."""
    lines = capsys.readouterr().out.splitlines()
    return dict(line.split(maxsplit=1) for line in lines if line.strip())


def test_a_warm_up_is_one_flag(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--schedule.warmup-steps", "264", "--synthetic-sentences", "67349"]
    assert main(["show", "distilbert-sst2", *flags]) == 0
    found = shown(capsys)
    assert int(found["schedule.decay_start"]) == 264
    assert int(found["schedule.decay_steps"]) == 2640 - 264
    assert main(["train", "distilbert-sst2", *flags]) == 2
    assert "decay" not in capsys.readouterr().err  # it is the data that is missing
    assert main(["show", "distilbert-sst2", "--schedule.warmup-steps", "-1"]) == 2
    assert "schedule.warmup_steps must be at least 0" in capsys.readouterr().err


# --- batches


def sentence_lists(cfg: DistilbertRun, rank: int, size: int, split: str) -> list[Any]:
    """What the batches of a rank hold, sentence by sentence, with the stand-ins left out."""
    found = []
    for batch in build_data(cfg, split, rank, size):
        for ids, bounds, first, weights in zip(
            batch.ids_KN, batch.bounds, batch.first_KS, batch.weights_KS, strict=True
        ):
            for start, weight in zip(first.tolist(), weights.tolist(), strict=True):
                if weight > 0:
                    stop = int(bounds[bounds > start].min())
                    found.append(tuple(ids[start:stop].tolist()))
    return found


@pytest.mark.parametrize("mode", ["padded", "packed"])
def test_every_sentence_once_at_any_world_size(mode: str) -> None:
    cfg = config(mode=mode, epochs=1, synthetic_sentences=101)
    alone = sentence_lists(cfg, 0, 1, "train")
    assert len(alone) == 101
    for size in (2, 3, 16):
        split = config(mode=mode, epochs=1, synthetic_sentences=101, devices=1)
        shared = [s for r in range(size) for s in sentence_lists(split, r, size, "train")]
        assert sorted(shared) == sorted(alone)
        held_out = [s for r in range(size) for s in sentence_lists(split, r, size, "validation")]
        assert len(held_out) == opinions.HELD_OUT


@pytest.mark.parametrize("mode", ["padded", "packed"])
def test_shapes_never_change(mode: str) -> None:
    cfg = config(mode=mode)
    made = batches(cfg)
    assert len({tuple(t.shape[1:] for t in batch.tensors) for batch in made}) == 1
    assert [batch.samples for batch in made[:7]] == [16] * 6 + [4]
    assert [batch.partial for batch in made[:7]] == [False] * 6 + [True]
    assert made[-1].position == 200
    for batch in made:
        assert float(batch.weights_KS.sum()) == pytest.approx(1.0)


def test_a_small_token_budget_is_exceeded_in_multiples(tmp_path: Path) -> None:
    folder = write_dataset(tmp_path, [30] * 20 + [3] * 20)
    cfg = config(data=str(folder), mode="packed", token_budget=128, global_batch=8)
    sizes = {batch.ids_KN.shape[1] for batch in batches(cfg)}
    assert sizes <= {128, 256}
    assert len(sizes) == 2


def test_order_continues_where_it_was(tmp_path: Path) -> None:
    cfg = config()
    later = build_data(cfg, "train", 0, 1)
    later.restore({"samples": batches(cfg)[8].position})
    expected = batches(cfg)[9]
    np.testing.assert_array_equal(next(iter(later)).ids_KN, expected.ids_KN)


def test_opinions_follow_their_rule() -> None:
    language = opinions.Opinions(seed=3, vocabulary=100)
    made = language.sentences("train", 500, mean_tokens=12, longest=16)
    assert len(made) == 500
    assert made.longest <= 16
    balance = np.add.reduceat(language.polarity()[made.tokens].astype(int), made.offsets[:-1])
    np.testing.assert_array_equal(balance > 0, made.labels == 1)
    assert (balance != 0).all()
    assert 0.4 < made.labels.mean() < 0.6
