"""The page on serving ends with a deployed model: its commands run, those of the image, too."""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks import serve_load
from benchmarks.common import read_rows
from tests.docs.commands import ROOT, table
from tests.docs.test_readme import blocks, commands
from tests.unit.served import train_on_clicks
from tests.unit.test_dockerfiles import instructions
from tests.waiting import PATIENCE_S, wait_until
from trainmark.cli import main

pytest.importorskip("tritonclient.http")
PAGE, IMAGE = "docs/serving.md", "docker/serve.Dockerfile"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder `models` of the page, with the export that its first command writes."""
    folder = tmp_path_factory.mktemp("page")
    run = train_on_clicks(folder) / "run"
    (first,) = [words for words in commands(PAGE) if words[:2] == ["trainmark", "export"]]
    paths = {"build/demo/run": str(run), "models/clicks": str(folder / "models" / "clicks")}
    assert main([paths.get(word, word) for word in first[1:]]) == 0
    return folder / "models"


@contextmanager
def container(models: Path) -> Iterator[tuple[Any, dict[str, str]]]:
    """What `docker run` starts: the image's entry point and command, with the folder mounted."""
    told = dict(instructions(IMAGE))
    words = json.loads(told["ENTRYPOINT"]) + json.loads(told["CMD"])
    ports = {"8000": str(serve_load.free_port()), "8001": str(serve_load.free_port())}
    assert set(told["EXPOSE"].split()) == set(ports)
    words = [ports.get(word, word).replace("/models", str(models)) for word in words]
    assert words[0] == "trainmark"
    line = [sys.executable, "-m", *words]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(line, cwd=models, env=environment) as running:
        try:
            yield running, ports
        finally:
            running.kill()


def test_the_container_serves_what_the_page_says(models: Path, tmp_path: Path) -> None:
    with container(models) as (running, ports):
        healthy = json.loads(dict(instructions(IMAGE))["HEALTHCHECK"].partition("CMD ")[2])
        probe = [word.replace(":8000", f":{ports['8000']}") for word in healthy]

        def is_up() -> bool:
            assert running.poll() is None
            return not subprocess.run([sys.executable, *probe[1:]], capture_output=True).returncode

        wait_until(is_up, pause=0.2)

        def here(text: str) -> str:
            return re.sub(r"localhost:(800[01])", lambda m: f"127.0.0.1:{ports[m[1]]}", text)

        asked = [words for words in commands(PAGE) if words[0] == "curl"]
        assert len(asked) == 5
        answers = []
        for words in asked:
            target = tmp_path / words[words.index(">") + 1] if ">" in words else None
            words = [here(word) for word in words if word != ">" and word != "row.json"]
            words = [*words, "--fail", "--max-time", "60"]
            done = subprocess.run(words, cwd=tmp_path, capture_output=True, check=True)
            answers.append(done.stdout)
            if target:
                target.write_bytes(done.stdout)
        assert json.loads(answers[1])["name"] == "clicks"
        (score,) = json.loads(answers[3])["scores"]
        assert 0 < score < 1
        (code,) = blocks(PAGE, "python")
        for protocol, port in (("http", "8000"), ("grpc", "8001")):
            text = code.replace("tritonclient.http", f"tritonclient.{protocol}")
            text = here(text.replace('Client("localhost:8000")', f'Client("localhost:{port}")'))
            done = subprocess.run([sys.executable, "-c", text], capture_output=True, check=True)
            assert re.fullmatch(rb"\[0\.\d+\]\n", done.stdout)
        running.terminate()  # as `docker stop` does
        assert running.wait(PATIENCE_S) == 0


def test_the_image_is_built_and_run_as_the_page_says() -> None:
    """Names, ports and the mounted folder agree between the page and the file."""
    build, run, stop = (words for words in commands(PAGE) if words[0] == "docker")
    assert build[build.index("-f") + 1] == IMAGE
    assert build[build.index("-t") + 1] == run[-1]
    assert stop[-1] == run[run.index("--name") + 1]
    published = {run[i + 1].split(":")[1] for i, word in enumerate(run) if word == "-p"}
    assert published == set(dict(instructions(IMAGE))["EXPOSE"].split())
    assert ":/models:ro" in run[run.index("-v") + 1]
    usage = (ROOT / IMAGE).read_text().splitlines()[1]
    assert shlex.split(usage.lstrip("# ")) == build


# --- what was measured


@pytest.mark.parametrize(
    ("file", "heading"),
    [("serve_load", "p99 at most |"), ("serve_load_cuda", "p99 at most, with a GPU |")],
)
def test_the_rates_are_those_that_were_measured(file: str, heading: str) -> None:
    rows, found = read_rows(file), table(PAGE, heading)
    assert len(found) == 3
    for limit, *cells in found:
        best = serve_load.best_rates(rows, float(limit.removesuffix(" ms")))
        columns = [(s, f) for f in ("json", "binary") for s in ("trainmark", "fastapi")]
        assert cells == [f"{best[key]:.0f}" if key in best else "none" for key in columns]


def test_the_latencies_on_a_cpu_are_those_that_were_measured() -> None:
    rows, found = read_rows("inference_cpu"), table("docs/inference.md", "network |")
    ours = [row for row in rows if row["system"] == "trainmark"]
    assert len(found) == len({(row["threads"], row["run"]) for row in ours}) == 6
    slower = [(r["run"], r["batch"]) for r in ours if r["of_onnxruntime"] < 1]
    assert slower == [("dlrm-small's MLPs", 1)]  # and nowhere else, as the page says
    cells = [cell.split("; ") for _, _, *of_network in found for cell in of_network]
    for (median, times), row in zip(cells, ours, strict=True):
        assert float(median) == pytest.approx(row["median_ms"], rel=0.05)
        assert float(times.removesuffix(" x")) == pytest.approx(row["of_onnxruntime"], rel=0.05)


def test_the_latencies_on_a_gpu_are_those_that_were_measured() -> None:
    keys = "run", "precision", "tables_precision", "tables_memory", "batch", "clients"
    pinned = [row for row in read_rows("inference_h200") if row["request"].startswith("pinned")]
    measured = {(row["system"], *(row[key] for key in keys)): row for row in pinned}
    assert len(measured) == len(pinned)
    page, found = "docs/inference.md", []
    for run, mlps, tables, batch, clients, *figures, goal in table(page, "model | MLPs |"):
        stored, _, memory = tables.partition(", in ")
        where = memory.removesuffix(" memory") or "device"
        size = int(batch.replace(",", ""))
        row = measured["trainmark", run.strip("`"), mlps, stored, where, size, int(clients)]
        expected = row["median_ms"], row["p99_ms"], row["samples_per_s"] / 1e6
        assert [float(figure) for figure in figures] == pytest.approx(expected, rel=0.01)
        number, _, unit = goal.partition(" ")
        if unit:
            median_ms, _, rate = expected
            assert rate >= float(number) if unit == "M/s" else median_ms <= float(number)
        found.append(row)
    assert len(found) == 21
    for batch, *figures in table(page, "batch | ours"):
        systems = "trainmark", "PyTorch, compiled", "PyTorch, eager"
        size = int(batch.replace(",", ""))
        rows = [measured[s, "dlrm-small", "fp16", "fp32", "device", size, 1] for s in systems]
        medians = [row["median_ms"] for row in rows]
        assert [float(figure) for figure in figures] == pytest.approx(medians, rel=0.01)
