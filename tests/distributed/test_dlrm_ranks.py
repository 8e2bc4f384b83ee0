"""DLRM on 1, 2 and 4 ranks, with tables sharded in every way, trains like one process."""

import csv
import json
import time
from pathlib import Path
from typing import Any

import pytest

from tests import rank_processes
from tests.distributed import dlrm_ranks as ranks
from tests.distributed import sharded, small_dlrm
from tests.distributed.launching import on_ranks
from tests.small import FLAGS, result, train
from tests.waiting import wait_until
from trainmark.checkpoint import checkpoints, folders
from trainmark.distributed.mesh import single
from trainmark.run.evaluation import evaluate


def test_every_sharding_on_1_2_and_4_ranks(tmp_path: Path) -> None:
    """One test, so that ranks are started once, whoever runs the tests."""
    sharded.check_groups(ranks.ON_CPUS, tmp_path)


def test_a_rank_killed_while_writing_leaves_a_good_checkpoint(tmp_path: Path) -> None:
    started = rank_processes.start(ranks.save_without_end, tmp_path, world=2)
    root = tmp_path / "killed"
    try:
        wait_until(lambda: len(folders.all_checkpoints(root)) == 2)
        writing = ".writing-*/rank-00001.safetensors"
        wait_until(lambda: any(root.glob(writing)), pause=0.001)
        started.processes[1].kill()
        started.processes[1].join()
        time.sleep(0.2)  # the other rank may finish what it was doing, but not the checkpoint
    finally:
        rank_processes.end(started)
    newest = folders.latest(root)
    assert newest is not None
    checkpoints.verify(newest)
    built = small_dlrm.trainer(small_dlrm.config(1, "rowwise_adagrad"), single(small_dlrm.CPU))
    state = checkpoints.load(newest, small_dlrm.tensors(built), exact=True)
    assert newest.name == f"step-{state['step']:08d}"
    # As many steps on one process end in the same weights.
    again = small_dlrm.trainer(small_dlrm.config(1, "rowwise_adagrad"), single(small_dlrm.CPU))
    for _ in range(state["step"]):
        small_dlrm.steps(again, small_dlrm.batches(again)[:1])
    for name, tensor in small_dlrm.tensors(again).items():
        assert tensor.numpy() == pytest.approx(built_tensor(built, name), rel=1e-3, abs=1e-5), name


def built_tensor(built: Any, name: str) -> Any:
    return small_dlrm.tensors(built)[name].numpy()


def test_two_ranks_begin_a_run_that_one_process_continues_and_two_evaluate(tmp_path: Path) -> None:
    placement = tmp_path / "placement.json"
    tables = [{"table": 0, "sharding": "row_wise", "shards": [
        {"device": 0, "rows": [0, 20], "columns": [0, 8]},
        {"device": 1, "rows": [20, 50], "columns": [0, 8]},
    ]}, {"table": 1, "sharding": "data_parallel"},
    {"table": 2, "sharding": "table_wise", "shards": [
        {"device": 1, "rows": [0, 3], "columns": [0, 8]},
    ]}]  # fmt: skip
    placement.write_text(
        json.dumps({"schema": "trainmark.placement/1", "devices": 2, "tables": tables})
    )
    output, flags = tmp_path / "ranks", ("--evals-per-epoch", "2", "--checkpoint-every", "4 steps")
    arguments = ["dlrm-demo", *FLAGS, *flags, "--output", str(output), "--max-steps", "4"]
    on_ranks(tmp_path, ["train", *arguments, "--placement", str(placement)])
    first = result(output)
    sent = first["parallel"]["sent_bytes_per_step"]
    assert first["parallel"]["dp"] == 2
    # Of table 2, rank 0 asks for 256 rows of 8 numbers, and sends as many gradients.
    assert sent["gradients"] >= 256 * 8 * 4
    assert sent["ids"] >= 256 * 4
    assert sent["counts"] > 0
    assert sent["replicas"] == 7 * 8 * 4
    last = {e["split"]: e["metrics"]["auc"] for e in first["evaluations"]}
    assert {s: found["auc"]["value"] for s, found in first["assessments"].items()} == last
    assert train(output, *flags) == 0
    assert train(tmp_path / "alone", *flags) == 0
    found, expected = result(output), result(tmp_path / "alone")
    assert found["parallel"] == {"dp": 1}
    assert found["samples"] == expected["samples"] == 4000
    assert _curve(output) == pytest.approx(_curve(tmp_path / "alone"), rel=sharded.TOLERANCE["cpu"])
    evaluations = {(e["at_sample"], e["split"]): e["metrics"] for e in found["evaluations"]}
    assert len(expected["evaluations"]) == 3
    for evaluation in expected["evaluations"]:  # the first run ended with some of its own
        metrics = evaluations[evaluation["at_sample"], evaluation["split"]]
        assert metrics == pytest.approx(evaluation["metrics"], rel=1e-5)
    (tmp_path / "store-2").unlink()  # of the ranks before
    on_ranks(
        tmp_path,
        ["evaluate", str(tmp_path / "alone"), "--importance", "--importance-rows", "500"],
        ["infer", str(tmp_path / "alone"), "--batches", "2,64", "--steps", "3"],
    )
    evaluated = json.loads((tmp_path / "alone" / "evaluation.json").read_text())
    for evaluation in expected["evaluations"][1:]:
        found = evaluated["splits"][evaluation["split"]]
        assert found == pytest.approx(evaluation["metrics"], rel=1e-5)
    answered = json.loads((tmp_path / "alone" / "inference.json").read_text())
    assert answered["case"] == "cpux1x2"
    assert [(row["batch"], row["samples"]) for row in answered["rows"]] == [(2, 6), (64, 192)]
    by_one = evaluate(tmp_path / "alone", device="cpu", importance_rows=500)["importance"]
    drops = {column["column"]: column["drop"] for column in evaluated["importance"]}
    assert len(drops) == 16
    assert drops == pytest.approx({c["column"]: c["drop"] for c in by_one}, abs=1e-3)


def _curve(output: Path) -> list[float]:
    """Losses, then norms of dense gradients."""
    found = [
        float(row[column])
        for name, column in (("loss.csv", "loss"), ("curves.csv", "gradient_norm"))
        for row in csv.DictReader((output / name).read_text().splitlines())
    ]
    assert len(found) == 2 * 8
    return found
