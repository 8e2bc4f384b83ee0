"""A run that does not fit says so before it allocates, and names what would make it fit."""

import re
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from tests import small
from tests.unit.refusals import refused
from trainmark import workloads
from trainmark.cli import main
from trainmark.distributed.mesh import single
from trainmark.errors import InputError
from trainmark.hardware import backends, devices
from trainmark.hardware.devices import Cluster, Device
from trainmark.run import memory
from trainmark.workloads import resolve
from trainmark.workloads.dlrm import sharding
from trainmark.workloads.dlrm.runs import DlrmRun, Model, Optimizer, TableFormat

GIB = 2**30
XLARGE = ["dlrm-xlarge", "--data", "synthetic"]
INT8 = r"With (--table-precision int8) it would fit \((\d+\.\d) GiB\)\.$"


def machine_of(gib: float, patch: pytest.MonkeyPatch) -> None:
    memory = SimpleNamespace(available=int(gib * GIB), total=int(gib * GIB))
    patch.setattr(psutil, "virtual_memory", lambda: memory)
    patch.setattr(devices, "host_memory_bytes", lambda: memory.total)


def last_line(text: str) -> str:
    return text.rstrip().splitlines()[-1]


# --- train


def test_train_names_the_table_precision_that_would_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["train", *XLARGE, "--device", "cpu", "--output", str(tmp_path / "run")]
    machine_of(130, monkeypatch)
    said = refused(capsys, command, "it needs 424.7 GiB", "this machine has 130.0 GiB free")
    found = re.search(INT8, said.strip())
    assert found
    assert float(found[2]) == pytest.approx(112.3, abs=0.1)
    for fewer in (110.0, 30.0):  # then int8 does not fit either
        machine_of(fewer, monkeypatch)
        assert "--table-precision" not in refused(capsys, command, "does not fit")
    machine_of(250, monkeypatch)
    refused(capsys, command, "With --table-precision bf16 it would fit (214.2 GiB).")
    assert not (tmp_path / "run").exists()


def test_train_on_a_gpu_names_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """No GPU is needed to refuse: what is too large is never allocated."""
    gpu = Device(key="h200", name="NVIDIA H200", memory_bytes=140 * GIB)
    monkeypatch.setattr(devices, "identify", lambda device: gpu)
    monkeypatch.setattr(backends, "free_bytes", lambda device: 139 * GIB)
    mesh, workload = single(torch.device("cuda")), workloads.load("dlrm")
    cfg = xlarge()
    with pytest.raises(InputError, match=r"NVIDIA H200 has 139\.0 GiB free") as refusal:
        memory.check_memory(cfg, workload, mesh)
    assert re.search(INT8, str(refusal.value))


def test_evaluate_names_no_other_precision(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint has the precision that it was trained in."""
    flags: tuple[str, ...] = ("--fp32-up-to-rows", "5", "--model.table-rows", "90000")
    flags += ("--global-batch", "64", "--optimizer.name", "sgd", "--max-steps", "1")
    assert small.train(tmp_path / "run", *flags) == 0
    machine_of(2e-3, monkeypatch)  # fp32 tables take 2.7e-3 GiB, bf16 1.3e-3
    again = ["train", "dlrm-demo", *small.FLAGS, *flags, "--output", str(tmp_path / "other")]
    refused(capsys, again, "With --table-precision bf16")
    said = refused(capsys, ["evaluate", str(tmp_path / "run")], "does not fit")
    assert "--table-precision" not in said


# --- plan


def xlarge(optimizer: str = "sgd", precision: str = "fp32") -> DlrmRun:
    return resolve(
        DlrmRun(
            name="dlrm-xlarge",
            data="synthetic",
            model=workloads.named_run("dlrm-xlarge").model,
            optimizer=Optimizer(name=optimizer),  # type: ignore[arg-type]
            table_format=TableFormat(table_precision=precision),  # type: ignore[arg-type]
        ),
        Cluster.parse("h200x1x1"),
    )


@pytest.mark.parametrize(
    ("optimizer", "fits"),
    [("sgd", True), ("rowwise_adagrad", True), ("adagrad", False), ("adam", False)],
)
def test_plan_counts_the_optimisers_state(
    optimizer: str, fits: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """And names no format that the optimiser cannot have; what it names does fit."""
    command = ["plan", *XLARGE, "--cluster", "h200x1x1", "--optimizer.name", optimizer]
    assert main(command) == 2
    found = re.search(INT8, capsys.readouterr().err.strip())
    assert bool(found) == fits
    if found:
        assert main([*command, *found[1].split()]) == 0
        (total,) = re.findall(r"(\d+\.\d\d)/141", capsys.readouterr().out)
        assert float(total) == pytest.approx(float(found[2]), abs=0.06)


def test_plan_does_not_name_the_format_that_did_not_fit(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Nor host memory, which has fp32 tables only, for tables that are not."""
    command = ["plan", *XLARGE, "--cluster", "h200x1x1", "--optimizer.name", "adagrad"]
    assert main([*command, "--table-precision", "int8"]) == 2
    said = last_line(capsys.readouterr().err)
    assert "Device 0 needs 531.1 GiB" in said
    assert "--table-precision" not in said
    assert said.endswith("It would fit 5 such devices.")
    assert main(["plan", *XLARGE, "--cluster", "h200x1x1", "--table-precision", "bf16"]) == 2
    assert re.search(INT8, last_line(capsys.readouterr().err))


def test_the_widest_format_that_fits_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "dlrm-large", "--cluster", "a100-80gx1x1"]) == 2
    assert "With --table-precision bf16 it would fit (44.0 GiB)." in capsys.readouterr().err


def test_several_devices_are_named_a_format_too(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", *XLARGE, "--cluster", "a100-80gx1x2"]
    assert main(command) == 2
    found = re.search(INT8, last_line(capsys.readouterr().err))
    assert found
    assert main([*command, *found[1].split()]) == 0
    fullest = max(map(float, re.findall(r"(\d+\.\d\d)/80", capsys.readouterr().out)))
    assert fullest == pytest.approx(float(found[2]), rel=0.05)


def test_tables_that_stay_fp32_anyway_are_offered_no_format() -> None:
    rows = Model(table_rows=(90_000,) * 2000, embedding_dim=512, bottom_mlp=(512,))  # 343 GiB
    for count in (1, 2):
        cluster = Cluster.parse(f"a100-80gx1x{count}")
        run = DlrmRun(name="dlrm-xlarge", data="synthetic", model=rows, global_batch=2)
        cfg = resolve(run, cluster)
        said = sharding.what_would_fit(cfg)
        assert "does not fit" in said
        assert "--table-precision" not in said


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "rowwise_adagrad"])
@pytest.mark.parametrize("precision", ["bf16", "int8"])
def test_plan_and_dry_run_count_the_same_bytes(optimizer: str, precision: str) -> None:
    cfg = xlarge(optimizer, precision)
    _, built = memory.dry_run(cfg, Cluster.parse("h200x1x1"))
    (planned,) = sharding.plan_devices(cfg)
    assert planned.total == pytest.approx(built.total, abs=64)  # the count of updates


# --- dry runs


@pytest.mark.parametrize(
    ("words", "needs", "advice"),
    [
        (["dlrm-xlarge", "--cluster", "h200x1x1"], "422.5 GiB of 141.0", "--table-precision int8"),
        (["llama3-8b", "--cluster", "h200x1x1"], "172.6 GiB of 141.0", "--optimizer-states bf16"),
        (["llama3-8b", "--cluster", "a100-80gx1x8"], "GiB of 80.0", "--recompute full"),
    ],
    ids=["dlrm", "llama3", "llama3 on 8"],
)
def test_a_dry_run_says_that_it_does_not_fit(
    words: list[str],
    needs: str,
    advice: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After the table, on one line, however wide the screen; what it advises does fit."""
    monkeypatch.setenv("COLUMNS", "60")
    assert main(["train", *words, "--dry-run"]) == 2
    printed = capsys.readouterr()
    assert "activations (estimated)" in printed.out
    said = last_line(printed.err)
    assert said.startswith(f"trainmark: {words[0]} does not fit {words[2]}: a device needs ")
    assert needs in said
    assert f"With {advice} it would fit (" in said
    assert main(["train", *words, *advice.split(), "--dry-run"]) == 0
    assert not capsys.readouterr().err


def test_a_dry_run_that_nothing_makes_fit(capsys: pytest.CaptureFixture[str]) -> None:
    batch = ["--micro-batch", "4096", "--global-batch", "4096"]
    for words in (["llama3-8b"], ["distilbert-sst2", *batch]):
        assert main(["train", *words, "--dry-run", "--cluster", "v100-16gx1x1"]) == 2
        said = last_line(capsys.readouterr().err)
        assert f"{words[0]} does not fit v100-16gx1x1" in said
        assert said.endswith("Use more devices or a smaller micro_batch.")


def test_a_dry_run_of_unknown_memory_or_enough_says_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for words in (["dlrm-xlarge"], ["dlrm-small", "--cluster", "h200x1x1"]):
        assert main(["train", *words, "--dry-run"]) == 0
        assert not capsys.readouterr().err
