"""Corpora so small that a split has no sample: refused before training, with the numbers."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from trainmark.cli import main
from trainmark.corpus.indexed import write_index
from trainmark.hardware.devices import Cluster
from trainmark.workloads import resolve
from trainmark.workloads.llama3.runs import llama3_demo, notes

SAMPLE = 65  # of the demo, whose sequence is 64
OTHER_SPLIT = "another --split (100,0,0 holds nothing out) or "


def write(folder: Path, lengths: list[int]) -> str:
    """Documents of these lengths."""
    folder.mkdir()
    np.zeros(sum(lengths), np.uint16).tofile(folder / "corpus.bin")
    with open(folder / "corpus.idx", "wb") as file:
        write_index(file, np.dtype(np.uint16), np.array(lengths), range(len(lengths) + 1))
    return str(folder)


def show(data: str, split: str) -> int:
    return main(["show", "llama3-demo", "--data", data, "--split", split])


@pytest.mark.parametrize(
    ("lengths", "split", "documents", "left", "way_out"),
    [
        ([400], "98,1,1", "1 document (400 tokens)", "validation 0, test 0", OTHER_SPLIT),
        ([50], "100,0,0", "1 document (50 tokens)", "train 50", ""),
        ([SAMPLE] * 9 + [SAMPLE - 1], "8,1,1", "10 documents (649 tokens)", "test 64", OTHER_SPLIT),
        ([400], "0,1,0", "1 document (400 tokens)", "train 0", OTHER_SPLIT),
        ([], "1,0,0", "0 documents (0 tokens)", "train 0", ""),
    ],
)
def test_a_split_without_a_sample_is_refused(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    lengths: list[int],
    split: str,
    documents: str,
    left: str,
    way_out: str,
) -> None:
    data, output = write(tmp_path / "data", lengths), tmp_path / "run"
    flags = ["--data", data, "--split", split, "--device", "cpu", "--output", str(output)]
    assert main(["train", "llama3-demo", *flags]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == (
        f"trainmark: {data}/corpus: a sample takes 65 tokens, but split {split} of its {documents} "
        f"leaves {left}. Prepare more documents, or give {way_out}a shorter --sequence."
    )
    assert not output.exists()


def test_one_sample_a_split_is_enough(tmp_path: Path) -> None:
    assert show(write(tmp_path / "ten", [SAMPLE] * 10), "80,10,10") == 0
    assert show(write(tmp_path / "one", [SAMPLE]), "100,0,0") == 0


def test_a_sequence_of_nothing_is_told_as_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write(tmp_path / "data", [400])
    assert main(["show", "llama3-demo", "--data", data, "--sequence", "0"]) == 2
    assert "sequence must be at least 1. Received: 0." in capsys.readouterr().err


def resolved_split(data: str) -> str | None:
    return resolve(dataclasses.replace(llama3_demo(), data=data), Cluster("cpu", 1, 1)).split


def test_the_demo_holds_out_what_the_documents_allow(tmp_path: Path) -> None:
    assert resolved_split(write(tmp_path / "one", [4000])) == "100,0,0"
    assert resolved_split(write(tmp_path / "hundred", [SAMPLE] * 100)) == "98,1,1"
    short_test = write(tmp_path / "short", [SAMPLE] * 99 + [SAMPLE - 1])
    assert resolved_split(short_test) == "100,0,0"


def test_a_single_text_trains_and_says_that_nothing_was_held_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "run"
    flags = ["--data", write(tmp_path / "data", [400]), "--device", "cpu", "--max-steps", "2"]
    assert main(["train", "llama3-demo", *flags, "--output", str(output)]) == 0
    result = json.loads((output / "result.json").read_text())
    assert result["evaluations"] == []
    assert result["quality"]["value"] is None
    (note,) = result["notes"]
    assert note.startswith("No document was held out (split 100,0,0)")
    assert notes(dataclasses.replace(llama3_demo(), data="tokens", split="1,0,0"))
    assert not notes(dataclasses.replace(llama3_demo(), data="tokens", split="99,1,0"))

    capsys.readouterr()
    assert main(["evaluate", str(output), "--device", "cpu"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "There is nothing to evaluate" in line
    assert not (output / "evaluation.json").exists()


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        (["--target", "3"], "target"),
        (["--initial-evaluation"], "initial_evaluation"),
        (["--evals-per-epoch", "2"], "evals_per_epoch 2"),
    ],
)
def test_an_evaluation_of_nothing_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], name: str
) -> None:
    data = write(tmp_path / "data", [SAMPLE] * 100)
    assert main(["show", "llama3-demo", "--data", data, "--split", "99,1,0", *flags]) == 2
    assert f"{name} needs documents of the test split" in capsys.readouterr().err
    on_validation = ["--quality-split", "validation"]
    assert (
        main(["show", "llama3-demo", "--data", data, "--split", "99,1,0", *flags, *on_validation])
        == 0
    )
