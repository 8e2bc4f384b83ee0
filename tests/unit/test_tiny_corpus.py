"""Corpora so small that a split has no sample: refused before training, with the numbers."""

from pathlib import Path

import numpy as np
import pytest

from trainmark.cli import main
from trainmark.corpus.indexed import write_index

SAMPLE = 65  # of the demo, whose sequence is 64


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
    ("lengths", "split", "documents", "left"),
    [
        ([400], "98,1,1", "1 document (400 tokens)", "validation 0, test 0"),
        ([50], "100,0,0", "1 document (50 tokens)", "train 50"),
        ([SAMPLE] * 9 + [SAMPLE - 1], "80,10,10", "10 documents (649 tokens)", "test 64"),
        ([400], "0,1,0", "1 document (400 tokens)", "train 0"),
        ([], "1,0,0", "0 documents (0 tokens)", "train 0"),
    ],
)
def test_a_split_without_a_sample_is_refused(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    lengths: list[int],
    split: str,
    documents: str,
    left: str,
) -> None:
    data, output = write(tmp_path / "data", lengths), tmp_path / "run"
    flags = ["--data", data, "--split", split, "--device", "cpu", "--output", str(output)]
    assert main(["train", "llama3-demo", *flags]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == (
        f"trainmark: {data}/corpus: a sample takes 65 tokens, but split {split} of its {documents} "
        f"leaves {left}. Prepare more documents, or give another --split (100,0,0 holds nothing "
        "out) or a shorter --sequence."
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
    assert "sequence must be above 0. Received: 0." in capsys.readouterr().err
