"""What other systems write on a command line is understood: comma lists, `amp`; and what a
micro-batch does to a step is said."""

from pathlib import Path
from typing import Any

import pytest

from trainmark import cli, workloads
from trainmark.clicklog import per_column, synthetic
from trainmark.config import TrainOptions
from trainmark.errors import InputError
from trainmark.verbs.flags import number_lists, parse, parse_run


def run_of(*words: str) -> Any:
    return parse_run("train", ["dlrm-small", *words], TrainOptions)[0]


@pytest.mark.parametrize(
    "words",
    [
        ["--model.bottom-mlp", "512,256,128"],
        ["--model.bottom-mlp=512,256,128"],
        ["--model.bottom_mlp", "512, 256,128"],
        ["--model.bottom-mlp", "512,256", "128"],
        ["--model.bottom-mlp", "512", "256", "128"],
    ],
)
def test_lists_have_commas_or_spaces(words: list[str]) -> None:
    run = run_of(*words, "--lr", "3")
    assert run.model.bottom_mlp == (512, 256, 128)
    assert run.lr == 3


def test_the_tables_of_a_published_run() -> None:
    rows = workloads.named_run("dlrm-mlperf").model.table_rows
    assert len(rows) == 26
    assert run_of("--model.table-rows", ",".join(map(str, rows))).model.table_rows == rows
    options = parse(synthetic.Options, ["--output", "x", "--cardinalities", "3,4"], "prepare")
    assert options.cardinalities == (3, 4)


def test_only_lists_of_numbers_are_split() -> None:
    known = number_lists(type(workloads.named_run("dlrm-small")))
    assert {"--model.table-rows", "--model.bottom-mlp", "--model.table-widths"} <= known
    assert not {"--data", "--lr", "--dataset"} & known
    assert run_of("--host-tables", "1,7").sharding.host_tables == (1, 7)
    assert run_of("--fp32-tables=1,7").table_format.fp32_tables == (1, 7)
    assert run_of("--data", "1,2").data == "1,2"
    with pytest.raises(InputError, match=r"--model\.bottom-mlp"):
        run_of("--model.bottom-mlp", "512;256")


@pytest.mark.parametrize("words", [["--precision", "amp"], ["--precision=amp"]])
def test_amp_is_fp16(words: list[str]) -> None:
    assert run_of(*words).precision == "fp16"


def test_one_value_for_each_column() -> None:
    assert per_column.parse("7,8,9", "--max-rows", 3) == [7, 8, 9]
    assert per_column.parse("7,8,9", "--max-rows", 3, names=["C2", "a", "b"]) == [7, 8, 9]
    with pytest.raises(InputError, match="one for each of the 4 columns"):
        per_column.parse("7,8,9", "--max-rows", 4)
    with pytest.raises(InputError, match="less than 1"):
        per_column.parse("7,0", "--max-rows", 2, minimum=1)


def test_a_micro_batch_that_changes_the_accumulation_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["show", "dlrm-small", "--cluster", "a100-80gx1x8"]

    def shown(*more: str) -> str:
        assert cli.main([*words, *more]) == 0
        return " ".join(capsys.readouterr().out.split())

    assert "add up 4 micro-batches, because global_batch stays 65,536" in shown(
        "--micro-batch", "2048"
    )
    assert "give --global-batch 16384" in shown("--micro-batch", "2048")
    for more in ([], ["--micro-batch", "8192"], ["--micro-batch", "2048", "--accumulate", "4"]):
        assert "add up" not in shown(*more)
    flags = ["--micro-batch", "1024", "--max-steps", "1", "--device", "cpu", "--synthetic-rows"]
    output = str(tmp_path / "run")
    assert cli.main(["train", "dlrm-demo", "--output", output, *flags, "4096"]) == 0
    assert "micro_batch 1,024 makes each step add up" in " ".join(capsys.readouterr().err.split())
