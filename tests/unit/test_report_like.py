"""`trainmark report --like`, `--format` and `published`: the tables of the published pages."""

import csv
import dataclasses
import io
import json
import re
import statistics
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.unit.results import GIB, make_result, write_run
from tests.unit.test_report_page import parse_page
from trainmark import cli, workloads
from trainmark.config import to_plain
from trainmark.inference.figures import Inference
from trainmark.inference.figures import Row as Measured
from trainmark.report.repeats import borders, counts
from trainmark.run.result import Evaluation, Memory, Result, Throughput


def nvidia_result(precision: str, auc: float, minutes: float, rate: float) -> Result:
    """NVIDIA's own first row, as if it had been trained here."""
    plain = make_result()
    config = to_plain(
        dataclasses.replace(workloads.named_run("dlrm-small"), data="synthetic", global_batch=65536)
    )
    return make_result(
        run="dlrm-small",
        case="a100-80gx1x1",
        precision=precision,
        config=config,
        hardware={"accelerator": "NVIDIA A100-SXM4-80GB"},
        time_s=replace(plain.time_s, e2e=60 * minutes),
        throughput=Throughput(p_whole=1.0, p_train=rate, p_core=rate),
        quality=replace(plain.quality, value=auc, target=None),
        memory=Memory(
            peak_bytes=GIB, allocated_peak_bytes=1, total_bytes=80 * GIB, host_peak_bytes=1
        ),
    )


def run_cli(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert cli.main([str(word) for word in words]) == 0
    return capsys.readouterr().out


def tables_of(text: str) -> dict[str, list[dict[str, str]]]:
    """The tables of a Markdown page by their headings."""
    found = {}
    for part in text.split("## ")[1:]:
        title, *lines = part.splitlines()
        cells = [line[2:-2].split(" | ") for line in lines if line.startswith("|")]
        found[title] = [dict(zip(cells[0], row, strict=True)) for row in cells[2:]]
    return found


def test_nvidias_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "tf32", nvidia_result("tf32", 0.8025, 26.75, 2.68e6))
    write_run(tmp_path / "fp16", nvidia_result("fp16", 0.8025, 16.27, 4.47e6))
    Inference(
        run="dlrm-small", workload="dlrm", checkpoint="c", step=1, samples=1, data="d",
        split="test", case="a100-80gx1x1", precision="fp16", threads=1, dropped=10,
        rows=[Measured(batch=2048, requests=9, samples=9, mean_ms=1.33, median_ms=1.0, p90_ms=1.0,
                       p95_ms=1.0, p99_ms=1.0, samples_per_s=1.54e6)],
        hardware={"accelerator": "NVIDIA A100-SXM4-80GB"}, software={}, started="now",
    ).write(tmp_path / "fp16")  # fmt: skip
    text = run_cli(capsys, "report", tmp_path / "tf32", tmp_path / "fp16", "--like", "nvidia")
    tables = tables_of(text)
    # Our own row, made of two results, has the cells of the published one.
    for title, count in (("Training accuracy", 9), ("Training performance", 9)):
        ours, theirs = tables[title][:2]
        assert len(tables[title]) == count
        assert ours.pop("By") == "this suite"
        assert ours.pop("Hardware") == "NVIDIA A100-SXM4-80GB"
        assert theirs.pop("By") == "NVIDIA"
        assert theirs.pop("Hardware") == "A100-80GB"
        assert ours == theirs
    assert list(ours.values()) == ["1", "small", "64k", "2.68M", "4.47M", "1.67"]
    ours, theirs = tables["Model sizes"][:2]
    assert (ours["Model size [GiB]"], theirs["Model size [GiB]"]) == ("15.6", "15.6")
    inference = tables["Inference performance"]
    assert len(inference) == 4
    assert inference[0]["Average latency - mixed precision [ms]"] == "1.33"
    assert inference[0]["Throughput - TF32/FP32"] == "/"
    assert [row["Speedup over CPU"] for row in tables[
        "Training performance: comparison with CPU for dlrm-xlarge"
    ]] == ["683x", "1x", "43x"]  # fmt: skip


def test_repeats_share_a_cell_and_have_a_histogram(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = [0.8020, 0.8024, 0.8025, 0.8025, 0.8031]
    for index, value in enumerate(values):
        write_run(tmp_path / "run" / str(index), nvidia_result("fp16", value, 16.0, 4e6))
    tables = tables_of(run_cli(capsys, "report", tmp_path / "run", "--like", "nvidia"))
    first = tables["Training accuracy"][0]
    assert first["Accuracy (AUC) - mixed precision"] == f"{statistics.mean(values):.4f}"
    assert first["Runs (TF32/FP32, mixed)"] == "0, 5"
    bins = tables["Repeats: auc of dlrm-small on a100-80gx1x1, fp16"]
    assert sum(int(row["runs"]) for row in bins) == 5
    assert [row["histogram"] for row in bins] == ["█" * int(row["runs"]) or "" for row in bins]
    out = tmp_path / "page.html"
    run_cli(capsys, "report", tmp_path / "run", "--output", out)
    parse_page(out)
    assert "Repeats: auc" in out.read_text()
    assert f"standard deviation {statistics.stdev(values):.2g}" in out.read_text()


def test_runs_of_one_name_on_other_data_are_no_repeats(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each of two logs has a run for each of two seeds, in folders of the same names. How a run
    was watched makes it no other."""
    first = nvidia_result("fp16", 0.7, 16.0, 4e6)
    for log, auc in (("birds", 0.7), ("flights", 0.9)):
        for seed in range(2):
            config = first.config | {"data": log, "seed": seed, "log_every": 10 + seed}
            quality = replace(first.quality, value=auc + 0.01 * seed)
            result = replace(first, config=config, quality=quality)
            write_run(tmp_path / log / "run" / str(seed), result)
    folders = [tmp_path / "birds" / "run", tmp_path / "flights" / "run"]
    tables = tables_of(run_cli(capsys, "report", *folders, "--like", "nvidia"))
    ours = [row for row in tables["Training accuracy"] if row["By"] == "this suite"]
    assert [row["Accuracy (AUC) - mixed precision"] for row in ours] == ["0.7050", "0.9050"]
    repeats = {title: rows for title, rows in tables.items() if title.startswith("Repeats")}
    where = "Repeats: auc of dlrm-small on a100-80gx1x1, fp16, data"
    assert set(repeats) == {f"{where} birds", f"{where} flights"}
    assert all(sum(int(row["runs"]) for row in rows) == 2 for rows in repeats.values())
    page = tmp_path / "page.html"
    run_cli(capsys, "report", *folders, "--output", page)
    labels = [f"dlrm-small ({log}/run/{seed})" for log in ("birds", "flights") for seed in "01"]
    assert [label for label in labels if label in page.read_text()] == labels


@pytest.mark.parametrize("spread", [0.0, 1e-7, 3e-4, 0.2, 40.0])
def test_a_histogram_counts_as_numpy_does(spread: float) -> None:
    values = list(np.random.default_rng(1).normal(0.8, 1, 50) * spread + 0.8)
    edges = borders(values)
    assert edges[0] <= min(values)
    assert edges[-1] > max(values)
    assert len(edges) <= 18
    assert counts(values, edges) == np.histogram(values, edges)[0].tolist()


def test_torchrecs_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = to_plain(
        dataclasses.replace(
            workloads.named_run("dlrm-mlperf"), data="d", global_batch=65536, epochs=1
        )
    )
    evaluations = [
        Evaluation(at_sample=1, split=split, metrics={"auc": value}, seconds=1.0)
        for split, value in (("validation", 0.7736921906471252), ("test", 0.7684569954872131))
    ]
    write_run(
        tmp_path,
        make_result(
            run="dlrm-mlperf", case="a100-40gx1x8", config=config, samples=4195197692,
            ended="epochs", evaluations=evaluations, hardware={"accelerator": "A100"},
            throughput=Throughput(p_whole=1.0, p_train=5497159.68, p_core=6e6),
        ),
    )  # fmt: skip
    text = run_cli(capsys, "report", tmp_path, "--like", "torchrec", "--format", "csv")
    title, *lines = text.splitlines()
    assert title == "# TorchRec, examples/dlrm"
    rows = list(csv.DictReader(io.StringIO("\n".join(lines))))
    assert len(rows) == 4
    ours, theirs = rows[:2]
    assert (ours.pop("Configuration"), theirs.pop("Configuration")) == ("dlrm-mlperf", "MLPerf")
    assert (ours.pop("Hardware"), theirs.pop("Hardware")) == ("A100", "A100-40GB, EFA")
    assert ours.pop("Unique Flags") == ""
    assert theirs.pop("Unique Flags").startswith("--batch_size 8192 --num_embeddings_per_feature 4")
    assert ours == theirs
    assert list(ours.values()) == [
        "97.36", "8", "8192", "65536", "0.7737", "0.7685", "5497160", "12m43s",
    ]  # fmt: skip
    assert rows[3]["Time to Train 1 Epoch"] == "02h32m03s"


def test_flagperfs_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "a", make_result())
    write_run(tmp_path / "b", make_result(run="distilbert-sst2", workload="distilbert"))
    words = ("report", tmp_path / "a", tmp_path / "b", "--like", "flagperf", "--format", "json")
    dlrm, distilbert = json.loads(run_cli(capsys, *words))
    assert list(dlrm["rows"][0])[2:] == [
        "note", "precision", "fix_hp", "e2e_time", "p_whole", "p_train", "p_core", "auc", "mem",
    ]  # fmt: skip
    assert len(dlrm["rows"]) == 13
    assert dlrm["rows"][0]["p_train"] == 20000
    assert dlrm["rows"][1]["p_whole"] == 7292588
    assert dlrm["rows"][0]["fix_hp"] is None
    assert len(distilbert["rows"]) == 5
    assert "accuracy" in distilbert["rows"][0]


def test_flagperfs_table_of_a_language_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(
        tmp_path,
        make_result(
            run="llama3-8b", workload="llama3", tokens_per_device_s=8103.0,
            parallel={"pp": 1, "dp": 4, "tp": 2},
        ),
    )  # fmt: skip
    (rows,) = tables_of(run_cli(capsys, "report", tmp_path, "--like", "flagperf")).values()
    assert len(rows) == 15
    assert rows[0]["token/p/s"] == "8103.0" == rows[2]["token/p/s"]
    assert rows[0]["parallel"] == "PP1DP4TP2" == rows[2]["parallel"]


def test_a_page_of_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path, make_result())
    path = run_cli(capsys, "report", tmp_path, "--like", "flagperf", "--format", "html").strip()
    assert path == str(tmp_path / "report.html")
    parse_page(Path(path))
    assert "106141201" in Path(path).read_text()


def test_our_own_table_as_markdown_in_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "run", make_result())
    out = tmp_path / "table.md"
    run_cli(capsys, "report", tmp_path / "run", "--format", "markdown", "--output", out)
    (rows,) = tables_of(out.read_text()).values()
    assert rows == [{
        "run": "dlrm-demo", "case": "cpux1x1", "precision": "fp32", "fix_hp": "/",
        "e2e_time": "62.0", "p_whole": "18182", "p_train": "20000", "p_core": "22500",
        "quality": "0.7912/0.787", "mem": "1.2/16.0",
    }]  # fmt: skip


def test_a_page_without_a_table_for_the_workload(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path, make_result(workload="llama3", run="llama3-8b"))
    assert cli.main(["report", str(tmp_path), "--like", "nvidia"]) == 2
    assert "--like nvidia has tables for dlrm; received results of llama3" in (
        capsys.readouterr().err
    )


def test_published_lists_everything(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = json.loads(run_cli(capsys, "published", "--format", "json"))
    assert {part: len(found) for part, found in figures.items()} == {
        "systems": 5, "rows": 45, "models": 7, "inference": 6,
    }  # fmt: skip
    one = tables_of(
        run_cli(capsys, "published", "--system", "torchrec-dlrm", "--format", "markdown")
    )
    assert list(one) == ["TorchRec, examples/dlrm (torchrec-dlrm)", "TorchRec: models"]
    monkeypatch.setenv("COLUMNS", "80")
    text = run_cli(capsys, "published")
    # A row in a line, however narrow the terminal; sentences fit it.
    assert re.search(r"^ dlrm-flagperf +A100.* 7292588 +7466400 +8493416 ", text, re.M)
    assert (
        "\nMFU as printed: tokens/device/s x 8e9 x 6 / peak. The network has about 7.54 \n" in text
    )
    assert "flagperf-distilbert" in text
    assert cli.main(["published", "--system", "torchrec"]) == 2
    assert "torchrec-dlrm" in capsys.readouterr().err
