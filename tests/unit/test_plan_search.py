"""`plan --search`: which layouts are offered, in which order, and why others cannot run."""

import dataclasses
import re
from pathlib import Path

import pytest

from trainmark import workloads
from trainmark.cli import main
from trainmark.config import filled
from trainmark.hardware.devices import Cluster
from trainmark.verbs.flags import parse_run
from trainmark.verbs.options import PlanOptions
from trainmark.verbs.plan_search import choices


def test_search_finds_what_one_device_can_hold() -> None:
    """docs/parallelism.md trains dlrm-xlarge on one H200 so."""
    found, refused = choices(workloads.named_run("dlrm-xlarge"), Cluster.parse("h200x1x1"))
    assert not refused
    first, second = [choice for choice in found if choice.fits][:2]
    assert first.flags == "--table-precision int8 --placement auto"
    assert second.flags == "--host-tables 0 19 21"
    too_large = [choice.flags for choice in found if not choice.fits]
    assert "--placement auto" in too_large
    assert "--table-precision bf16 --placement auto" in too_large


def test_search_keeps_what_is_as_fast_as_others() -> None:
    """Eight devices wait for their hosts, whatever the format of their tables."""
    found, _ = choices(workloads.named_run("dlrm-xlarge"), Cluster.parse("a100-80gx1x8"))
    assert found[0].flags == "--placement auto"
    assert any(choice.flags == "--placement greedy" and not choice.fits for choice in found)


def test_search_prefers_large_micro_batches_of_sentences_that_fit() -> None:
    run = workloads.named_run("distilbert-sst2")
    found, refused = choices(run, Cluster.parse("v100-16gx1x1"))
    fitting, others = ([c for c in found if c.fits is fits] for fits in (True, False))
    assert not refused
    assert {choice.flags for choice in others} == {f"--micro-batch {m}" for m in (256, 128, 64)}
    assert fitting[0].flags == "--micro-batch 32"


def test_the_times_of_a_search_are_in_order_as_they_are_printed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["plan", "distilbert-sst2", "--cluster", "h200x1x1", "--search"]) == 0
    rows = re.findall(r"--micro-batch (\d+) +([\d,]+)", capsys.readouterr().out)
    times = [int(time.replace(",", "")) for _, time in rows]
    assert times == sorted(times)
    equal = [int(size) for (size, _), time in zip(rows, times, strict=True) if time == times[0]]
    assert len(equal) > 1
    assert equal == sorted(equal)  # those that need less memory come first


def test_search_takes_a_datasets_tables(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text(
        "y,rare,often\n" + "".join(f"{i % 2},{i % 9},{i % 3}\n" for i in range(60))
    )
    words = ["prepare", "csv", "--input", str(tmp_path / "log.csv"), "--output"]
    columns = "label=y categorical=often,rare"
    assert main([*words, str(tmp_path / "data"), "--columns", columns]) == 0
    run = dataclasses.replace(workloads.named_run("dlrm-auto"), data=str(tmp_path / "data"))
    found, _ = choices(run, Cluster.parse("h200x1x1"))
    on_host = {choice.flags for choice in found if "--host-tables" in choice.flags}
    assert on_host == {"--host-tables 1", "--host-tables 0 1"}  # the larger one first


def test_a_search_in_which_nothing_can_run_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "distilbert-sst2", "--cluster", "h200x8x8", "--global-batch", "32"]
    assert main([*words, "--search"]) == 2
    assert "--micro-batch 1: global_batch 32 must equal" in capsys.readouterr().err


def test_every_flag_of_a_search_is_one_of_plans() -> None:
    cluster = Cluster.parse("h100x1x4")
    run = workloads.named_run("dlrm-dcnv2")
    offered = list(filled(workloads.definition(run).alternatives)(run, cluster))
    assert len(offered) == 5 + 2 + 5 + 4 * 5
    for flags, alternative in offered[::5]:
        parsed, _ = parse_run("plan", [run.name, *flags.split()], PlanOptions)
        if "--accumulate" not in flags:
            assert parsed == dataclasses.replace(alternative, micro_batch=parsed.micro_batch)
