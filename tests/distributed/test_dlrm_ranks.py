"""DLRM on 1, 2 and 4 ranks, with tables sharded in every way, trains like one process."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests import rank_processes
from tests.distributed import dlrm_ranks as ranks
from tests.small import FLAGS, result, train
from trainmark.checkpoint import checkpoints
from trainmark.distributed.mesh import single
from trainmark.run.evaluation import evaluate
from trainmark.training.batches import rank_shares

ROOT = Path(__file__).resolve().parents[2]
TOLERANCE = 2e-6  # relative; in fp32 differences come from the order of additions alone
LOW_PRECISION_TOLERANCE = 1e-4


def alone(optimizer: str, **changes: Any) -> dict[str, Any]:
    return ranks.train(ranks.trainer(ranks.config(1, optimizer, **changes), single(ranks.CPU)))


def test_every_sharding_on_1_2_and_4_ranks(tmp_path: Path) -> None:
    """One test, so that ranks are started once, whoever runs the tests."""
    started = [
        rank_processes.start(ranks.main, world, tmp_path, world=world) for world in ranks.WORLDS
    ]
    expected = {name: alone(name) for name in ranks.OPTIMIZERS}
    regular = {name: alone(name, regular=True) for name in ranks.OPTIMIZERS}
    narrow = {name: alone(name, narrow=True) for name in ("rowwise_adagrad", "adam")}
    low = alone("sgd", **ranks.LOW_PRECISION)
    other = {
        "dcn": alone("rowwise_adagrad", interaction="dcn"),
        "cat": alone("sgd", interaction="cat"),
        "projection": alone("sgd", interaction="projection", regular=True),
    }
    assert len(set(expected["sgd"]["losses"])) == 8
    rank_processes.finish(*started)
    for world in ranks.WORLDS:
        of_ranks = [
            json.loads((tmp_path / f"rank-{rank}-of-{world}.json").read_text())
            for rank in range(world)
        ]
        print(f"{world} ranks: largest relative difference of a loss, difference of AUC")
        for name, (kind, optimizer, changes) in ranks.cases(world).items():
            is_low = "precision" in changes
            reference = low if is_low else expected[optimizer]
            reference = regular[optimizer] if "regular" in changes else reference
            reference = narrow[optimizer] if "narrow" in changes else reference
            reference = other.get(changes.get("interaction", "dot"), reference)
            tolerance = LOW_PRECISION_TOLERANCE if is_low else TOLERANCE
            _check_run(name, of_ranks[0]["equality"][name], reference, tolerance)
            if kind == "table_wise" and optimizer == "sgd":
                _check_bytes([rank["equality"][name]["sent"] for rank in of_ranks])
        assert of_ranks[0]["skips"] == {"nan": True, "overflow": True}
        _check_resharded(of_ranks[0]["reshard"], expected, world)


def _check_run(
    name: str, found: dict[str, Any], reference: dict[str, Any], tolerance: float
) -> None:
    pairs = zip(found["losses"], reference["losses"], strict=True)
    difference = max(abs(a - b) / b for a, b in pairs)
    of_auc = abs(found["metrics"]["auc"] - reference["metrics"]["auc"])
    print(f"  {name:45} {difference:.1e} {of_auc:.1e}")
    assert difference < tolerance, name
    assert of_auc < 10 * tolerance, name
    assert found["metrics"] == pytest.approx(reference["metrics"], rel=10 * tolerance), name
    assert found["samples"] == reference["samples"] == 2 * ranks.TRAIN_ROWS, name


def _check_bytes(sent: list[dict[str, int]]) -> None:
    """Table i lies on rank i modulo the ranks; count what must go elsewhere, sample by sample."""
    world, epochs, table_count = len(sent), 2, len(ranks.TABLE_ROWS)
    batches = [ranks.GLOBAL_BATCH] * 3 + [3]
    totals = [sum(rank_shares(b, world)[r] for b in batches) * epochs for r in range(world)]
    for rank, found in enumerate(sent):
        mine = len(range(rank, table_count, world))
        others = sum(totals) - totals[rank]
        asked = totals[rank] * (table_count - mine)
        assert found["ids"] == 4 * asked
        assert found["rows"] == others * mine * ranks.DIM * 4
        assert found["gradients"] == asked * ranks.DIM * 4
        assert found["counts"] == found["replicas"] == found["squares"] == 0


def _check_resharded(
    found: dict[str, float], expected: dict[str, dict[str, Any]], world: int
) -> None:
    """9 checkpoints into 3 shardings, and 6 with Adam into 2."""
    assert len(found) == 9 * 3 + 6 * 2
    for name, loss in found.items():
        optimizer = "adam" if "Adam" in name else "rowwise_adagrad"
        after = expected[optimizer]["losses"][ranks.SAVED_AT]
        assert loss == pytest.approx(after, rel=TOLERANCE), name


def test_a_rank_killed_while_writing_leaves_a_good_checkpoint(tmp_path: Path) -> None:
    started = rank_processes.start(ranks.save_without_end, tmp_path, world=2)
    root = tmp_path / "killed"
    try:
        _wait_until(lambda: len(checkpoints.all_checkpoints(root)) == 2)
        _wait_until(lambda: any(root.glob(".writing-*/rank-00001.safetensors")))
        started.processes[1].kill()
        started.processes[1].join()
        time.sleep(0.2)  # the other rank may finish what it was doing, but not the checkpoint
    finally:
        rank_processes.end(started)
    newest = checkpoints.latest(root)
    assert newest is not None
    checkpoints.verify(newest)
    built = ranks.trainer(ranks.config(1, "rowwise_adagrad"), single(ranks.CPU))
    state = checkpoints.load(newest, ranks.tensors(built), exact=True)
    assert newest.name == f"step-{state['step']:08d}"
    # As many steps on one process end in the same weights.
    again = ranks.trainer(ranks.config(1, "rowwise_adagrad"), single(ranks.CPU))
    for _ in range(state["step"]):
        ranks.steps(again, ranks.batches(again)[:1])
    for name, tensor in ranks.tensors(again).items():
        assert tensor.numpy() == pytest.approx(built_tensor(built, name), rel=1e-3, abs=1e-5), name


def built_tensor(built: Any, name: str) -> Any:
    return ranks.tensors(built)[name].numpy()


def _wait_until(condition: Any) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


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
    torchrun("train", *arguments, "--placement", str(placement))
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
    assert _curve(output) == pytest.approx(_curve(tmp_path / "alone"), rel=TOLERANCE)
    evaluations = {(e["at_sample"], e["split"]): e["metrics"] for e in found["evaluations"]}
    assert len(expected["evaluations"]) == 3
    for evaluation in expected["evaluations"]:  # the first run ended with some of its own
        metrics = evaluations[evaluation["at_sample"], evaluation["split"]]
        assert metrics == pytest.approx(evaluation["metrics"], rel=1e-5)
    torchrun("evaluate", str(tmp_path / "alone"), "--importance", "--importance-rows", "500")
    evaluated = json.loads((tmp_path / "alone" / "evaluation.json").read_text())
    for evaluation in expected["evaluations"][1:]:
        found = evaluated["splits"][evaluation["split"]]
        assert found == pytest.approx(evaluation["metrics"], rel=1e-5)
    by_one = evaluate(tmp_path / "alone", device="cpu", importance_rows=500)["importance"]
    drops = {column["column"]: column["drop"] for column in evaluated["importance"]}
    assert len(drops) == 16
    assert drops == pytest.approx({c["column"]: c["drop"] for c in by_one}, abs=1e-3)


def torchrun(*arguments: str) -> None:
    """`trainmark` on two ranks."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    subprocess.run(
        [sys.executable, *launcher, "-m", "trainmark", *arguments],
        check=True,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
    )


def _curve(output: Path) -> list[float]:
    rows = (output / "loss.csv").read_text().splitlines()[1:]
    losses = [float(row.split(",")[2]) for row in rows]
    assert len(losses) == 8
    return losses
