"""`docs/parallelism.md`: its predictions are today's, its placement is one."""

import dataclasses
import re
import sys
from pathlib import Path

import pytest
import torch

from tests.docs.commands import ROOT, table
from trainmark import workloads
from trainmark.cli import main
from trainmark.embeddings.placement import costs, placement
from trainmark.hardware.devices import Cluster
from trainmark.workloads import resolve
from trainmark.workloads.dlrm import sharding, step_time
from trainmark.workloads.dlrm.runs import THRESHOLD_3, Optimizer, TableFormat
from trainmark.workloads.dlrm.sizes import table_bytes

PAGE = (ROOT / "docs" / "parallelism.md").read_text()
ROWS = [
    (run.strip("`"), cluster, precision, predicted)
    for run, cluster, precision, _, _, predicted in table("docs/parallelism.md", "run | cluster |")
]


def test_the_table_was_read() -> None:
    assert len(ROWS) == 13


@pytest.mark.parametrize(("name", "cluster", "precision", "predicted"), ROWS)
def test_predictions_are_todays(name: str, cluster: str, precision: str, predicted: str) -> None:
    run = dataclasses.replace(workloads.named_run(name), data="synthetic", precision=precision)
    found = step_time.predict(resolve(run, Cluster.parse(cluster)))
    assert found.step_s is not None
    assert f"{found.batch / found.step_s / 1e6:.3g}" == f"{float(predicted):.3g}"


def test_what_plan_prints_is_todays(capsys: pytest.CaptureFixture[str]) -> None:
    (shown,) = re.findall(r"^```\n(dlrm-xlarge on .*?)^```", PAGE, re.M | re.S)
    assert main(["plan", "dlrm-xlarge", "--cluster", "a100-80gx1x8"]) == 0
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert printed[:4] == shown.splitlines()


def test_the_placement_is_one(tmp_path: Path) -> None:
    (text,) = re.findall(r"^```json\n(.*?)^```", PAGE, re.M | re.S)
    (tmp_path / "placement.json").write_text(text)
    found = placement.read(tmp_path / "placement.json", THRESHOLD_3[:3], 128, 4)
    assert [len(table.shards) for table in found.tables] == [2, 4, 1]


def test_the_efficiencies_are_the_codes() -> None:
    for number in (
        costs.GATHER_EFFICIENCY,
        costs.UPDATE_EFFICIENCY,
        costs.LINK_EFFICIENCY,
    ):
        assert re.search(rf"\b{number:g}0? of the (memory bandwidth|slower of)", PAGE), number
    assert f"{costs.LATENCY_S * 1e6:.0f} us per collective" in PAGE
    assert f"{costs.MESSAGE_S * 1e6:.0f} us per other device" in PAGE


# --- tables of 16 and 8 bits


def test_the_sizes_of_8_bit_tables_are_todays() -> None:
    run = dataclasses.replace(
        workloads.named_run("dlrm-xlarge"),
        data="synthetic",
        table_format=TableFormat(table_precision="int8"),
    )
    kept = [rows for rows in run.model.table_rows if rows <= run.table_format.fp32_up_to_rows]
    stored = len(run.model.table_rows) - len(kept)
    prose = " ".join(PAGE.split())
    assert f"{stored} tables are stored in 8 bits, and {len(kept)}, of {sum(kept):,} rows" in prose
    rowwise = dataclasses.replace(run, optimizer=Optimizer(name="rowwise_adagrad"))
    sgd, adagrad = (
        sharding.plan_devices(resolve(each, Cluster.parse("h200x1x1")))[0].total / 2**30
        for each in (run, rowwise)
    )
    (measured,) = re.findall(r"on one H200, in (\d+) GiB", prose)
    assert sgd == pytest.approx(float(measured), rel=0.03)
    assert f"then takes {adagrad:.0f} GiB" in prose
    assert f"in 8 bits takes {table_bytes(run) / 2**30:.0f} GiB" in prose


def test_the_code_loads_what_was_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    flags = "--device cpu --synthetic-rows 9000 --max-steps 2 --table-precision int8"
    flags += f" --fp32-up-to-rows 10000 --output {run}"
    assert main(["train", "dlrm-demo", *flags.split()]) == 0
    assert main(["export", str(run)]) == 0
    monkeypatch.chdir(run / "export")
    monkeypatch.syspath_prepend(run / "export")
    (code,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S)
    model = workloads.named_run("dlrm-demo").model
    ids = torch.zeros(5, len(model.table_rows), dtype=torch.int32)
    given = {"numerical": torch.zeros(5, model.numerical_features), "ids": ids}
    exec(compile(code, "parallelism.md", "exec"), given)
    assert given["clicks"].shape == (5,)
    assert ((given["clicks"] > 0) & (given["clicks"] < 1)).all()
    monkeypatch.delitem(sys.modules, "model")
