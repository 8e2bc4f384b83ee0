"""A result names the command that gives it again."""

import dataclasses
import json
import shlex
from pathlib import Path

import pytest

from tests.unit.results import make_result
from trainmark import cli
from trainmark.errors import InputError
from trainmark.hardware import environment
from trainmark.verbs import replay

SHORT = ["--max-steps", "3", "--synthetic-rows", "4000", "--checkpoint-every", "never"]


def test_a_run_replayed_has_the_same_losses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = tmp_path / "a run"
    typed = ["train", "dlrm-demo", *SHORT, "--output", str(first)]
    assert cli.main(typed) == 0
    capsys.readouterr()
    assert cli.main(["replay", str(first), "--run"]) == 0
    printed = capsys.readouterr().out
    assert f"--config '{first}/result.json'" in printed
    again = tmp_path / "a run-again"
    assert (again / "loss.csv").read_bytes() == (first / "loss.csv").read_bytes()
    same, then = (json.loads((f / "result.json").read_text())["config"] for f in (again, first))
    assert same == then


def test_ranks_are_launched_and_what_differs_is_told(tmp_path: Path) -> None:
    software = {"commit": "0123abc", "torch": "1.0", "command": "trainmark train dlrm-demo --lr 2"}
    make_result(case="h200x2x8", software=software).write(tmp_path)
    words = replay.command(tmp_path, Path("new"))
    assert words[:5] == ["launch", "--on", "torchrun", "-j", "2x8"]
    assert words[-2:] == ["--output", "new"]
    *comments, line = replay.described(tmp_path, words).splitlines()
    assert line == shlex.join(["trainmark", *words])
    assert all(comment.startswith("# ") for comment in comments)
    assert "trainmark train dlrm-demo --lr 2" in comments[0]
    assert any("torch: 1.0 then" in comment for comment in comments)


def test_what_a_run_began_with_is_named_again(tmp_path: Path) -> None:
    result = make_result()
    typed = "trainmark train dlrm-demo --from 'old run' --with-optimizer --hardware my.toml"
    dataclasses.replace(result, software={"command": typed}).write(tmp_path)
    words = replay.command(tmp_path, None)
    assert words[4:9] == ["--with-optimizer", "--from", "old run", "--hardware", "my.toml"]


def test_what_a_result_says_stays_a_comment(tmp_path: Path) -> None:
    """The lines may be handed to a shell; a command that no shell could have read adds nothing."""
    software = {"command": "trainmark train x '\ntouch a", "torch": "1\rtouch b\x1b[31m"}
    result = make_result(software=software)
    dataclasses.replace(result, started="2020\ntouch c").write(tmp_path)
    words = replay.command(tmp_path, None)
    *comments, line = replay.described(tmp_path, words).split("\n")
    assert len(comments) >= 2
    assert all(comment.startswith("# ") and comment.isprintable() for comment in comments)
    assert line == shlex.join(["trainmark", *words])


@pytest.mark.parametrize("case", ["", "cpu", "cpux1", "cpux1x0", "cpuxax2"])
def test_a_case_that_is_none_is_refused(case: str, tmp_path: Path) -> None:
    make_result(case=case).write(tmp_path)
    with pytest.raises(InputError, match="expected DEVICExNODESxDEVICES"):
        replay.command(tmp_path, None)


def test_a_folder_without_a_result_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["replay", str(tmp_path)]) == 2
    assert "has no result.json" in capsys.readouterr().err


def test_network_rates_are_read(tmp_path: Path) -> None:
    for name, text in (
        ("net/eth0/speed", "100000"),
        ("net/veth/speed", "-1"),
        ("infiniband/mlx5_0/ports/1/rate", "400 Gb/sec (4X NDR)"),
    ):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(text + "\n")
    rates = environment._network(tmp_path)
    assert rates == {"mlx5_0/1": "400 Gb/sec (4X NDR)", "eth0": "100000 Mb/sec"}
