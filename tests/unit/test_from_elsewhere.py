"""What other projects' files and folders hold is read, or refused in a sentence."""

import json
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from tests.small import newest, result, saved, write_dataset
from tests.unit.test_tokens import bytes_tokenizer
from trainmark import metrics
from trainmark.cli import main
from trainmark.corpus import dataset
from trainmark.workloads import named_run

# --- NVIDIA's feature specifications

DISK = ["--global-batch", "100", "--max-steps", "3", "--model.embedding-dim", "8"]


def _trained(data: Path, output: Path) -> dict[str, bytes]:
    words = ["train", "dlrm-demo", "--data", str(data), "--output", str(output), *DISK]
    assert main([*words, "--model.bottom-mlp", "8", "--model.top-mlp", "1"]) == 0
    return saved(newest(output))


@pytest.mark.parametrize("dtype", ["int64", "uint8"])
def test_other_types_of_ids_train_to_the_same_weights(tmp_path: Path, dtype: str) -> None:
    """Also with `metadata: null` and keys that are not ours, as their reader lets them pass."""
    ours = write_dataset(tmp_path / "ours", train_rows=400)
    theirs = write_dataset(tmp_path / "theirs", train_rows=400)
    spec = yaml.safe_load((theirs / "feature_spec.yaml").read_text())
    spec |= {"metadata": None, "version": 3}
    for name, feature in spec["feature_spec"].items():
        feature["remark"] = "not ours"
        if name.startswith("cat_"):
            for split in ("train", "test"):
                path = theirs / split / name
                np.fromfile(path, feature["dtype"]).astype(dtype).tofile(path)
            feature["dtype"] = dtype
    (theirs / "feature_spec.yaml").write_text(yaml.dump(spec))
    assert _trained(theirs, tmp_path / "b") == _trained(ours, tmp_path / "a")


# --- Megatron's


def prepare_tokens(text: Path, output: Path) -> None:
    tokenizer = bytes_tokenizer(text.parent / "tok")
    words = ["--tokenizer", str(tokenizer), "--workers", "1"]
    words += ["--input", str(text), "--output", str(output)]
    assert main(["prepare", "tokens", *words]) == 0


def test_a_cache_folder_with_the_name_of_the_dataset_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text")
    prepare_tokens(tmp_path / "a.txt", tmp_path / "out")
    prefix = tmp_path / "out" / "corpus_text_document"
    prefix.mkdir()
    (prefix / "cache").touch()
    assert dataset.find(prefix).tokens.prefix == prefix
    assert dataset.find(tmp_path / "out").tokens.prefix == prefix


def test_empty_documents_are_stored_as_by_megatron(tmp_path: Path) -> None:
    """Its preprocess_data.py: no sequence and no end, but a boundary."""
    texts = ["one", "", "two", "", ""]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    prepare_tokens(tmp_path / "a.jsonl", tmp_path / "out")
    lengths: list[int] = []
    boundaries = [0]
    for text in texts:
        if text:
            lengths.append(len(text) + 1)
        boundaries.append(len(lengths))
    starts = [0, *np.cumsum(lengths)[:-1].tolist()]
    expected = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, len(lengths), len(boundaries))
    expected += struct.pack(f"<{len(lengths)}i", *lengths)
    expected += struct.pack(f"<{len(starts)}q", *(2 * start for start in starts))
    expected += struct.pack(f"<{len(boundaries)}q", *boundaries)
    assert (tmp_path / "out" / "corpus_text_document.idx").read_bytes() == expected


# --- Hugging Face's


def test_weights_keep_their_vocabulary_and_a_tied_head_is_noted(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=300, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=True,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "theirs")
    (tmp_path / "a.txt").write_text("some text, some more text and again some " * 20)
    prepare_tokens(tmp_path / "a.txt", tmp_path / "out")
    flags = ["--data", str(tmp_path / "out"), "--weights", str(tmp_path / "theirs")]
    flags += ["--sequence", "16", "--max-steps", "1", "--global-batch", "2", "--device", "cpu"]
    assert main(["train", "llama3-demo", *flags, "--output", str(tmp_path / "run")]) == 0
    found = result(tmp_path / "run")
    assert found["config"]["model"]["vocab"] == 300
    assert any("one matrix for embedding and head" in note for note in found["notes"])


# --- from another folder


def test_a_run_finds_its_data_from_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_dataset(tmp_path / "here" / "data", train_rows=400)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    words = ["train", "dlrm-demo", "--data", "data", "--output", "run", *DISK]
    words += ["--model.bottom-mlp", "8", "--model.top-mlp", "1"]
    assert main(words) == 0
    assert main(words) == 0  # and the same command finds it finished
    assert "finished already" in capsys.readouterr().err
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert main(["evaluate", "../here/run"]) == 0
    assert main(["export", "../here/run", "--output", "model"]) == 0
    assert json.loads(Path("model/config.json").read_text())["numerical"][0] == "num_0"
    assert "model.load" in Path("model/README.txt").read_text()
    (tmp_path / "here" / "data").rename(tmp_path / "here" / "moved")
    capsys.readouterr()
    assert main(["export", "../here/run", "--output", "nameless"]) == 0
    assert "does not name the features" in capsys.readouterr().err
    monkeypatch.chdir(tmp_path / "here")
    old, new = (str(tmp_path / "here" / name) for name in ("data", "moved"))
    assert main([new if word == "data" else word for word in words]) == 2
    assert f"If {old} has moved to {new}, put a link in its place." in capsys.readouterr().err
    Path(old).symlink_to(new)
    assert main(words) == 0


# --- numbers


def test_the_auc_of_scores_that_are_none_is_undefined() -> None:
    labels = torch.tensor([1, 0, 1, 0])
    assert metrics.auc(torch.full((4,), float("nan")), labels) is None
    assert metrics.auc(torch.tensor([0.1, float("nan"), 0.3, 0.2]), labels) is None
    assert metrics.auc(torch.tensor([0.1, 0.4, 0.3, 0.2]), labels) == 0.25


def test_a_run_that_saves_nothing_says_so_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tests.small import train

    assert named_run("llama3-1b").checkpoint_every != "never"
    assert train(tmp_path / "run", "--max-steps", "1", "--checkpoint-every", "never") == 0
    told = capsys.readouterr().err
    assert told.index("Nothing will be saved but the result") < told.index("step 1")
