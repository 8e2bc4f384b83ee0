"""What a CPU computes in one pass is answered without torch, which takes longer to load than all
else."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from tests.unit.served import TEST_LINES
from trainmark.cli import main
from trainmark.hardware import backends
from trainmark.inference import serving
from trainmark.inference.options import ServeOptions
from trainmark.kernels.compiled import INSTALLED

if not INSTALLED:
    pytest.skip("needs numba (extra `fast`)", allow_module_level=True)

from trainmark.kernels import cpu_scores

SCORE = """
import json, sys
from trainmark.inference import serving
from trainmark.inference.options import ServeOptions
import trainmark.inference.server.process
(source,) = serving.sources(ServeOptions(folders=(sys.argv[1],), device="cpu"))
scorer = source.load(source.newest())
print(json.dumps(scorer.score([scorer.read(scorer.example)]).tolist()))
"""
PREDICT = "import sys; from trainmark.cli import main; main(sys.argv[1:])"
BLOCKED = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name in {"torch.nn", "torch._C"}:
            raise ImportError("torch is loaded")
sys.meta_path.insert(0, Blocked())
"""


def run_without_torch(code: str, *words: str) -> str:
    line = [sys.executable, "-c", BLOCKED + code, *words]
    done = subprocess.run(line, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def exported(clicks: Path, tmp_path: Path) -> Path:
    assert main(["export", str(clicks / "run"), "--output", str(tmp_path / "exported")]) == 0
    return tmp_path / "exported"


def scored_here(folder: Path) -> Any:
    (source,) = serving.sources(ServeOptions(folders=(str(folder),), device="cpu"))
    scorer = source.load(source.newest())
    return scorer.score([scorer.read(scorer.example)])


@pytest.mark.parametrize("of", ["run", "exported"])
def test_serve(of: str, clicks: Path, exported: Path) -> None:
    folder = clicks / "run" if of == "run" else exported
    found = json.loads(run_without_torch(SCORE, str(folder)))
    np.testing.assert_allclose(found, scored_here(folder), rtol=1e-6)


def test_predict_by_an_export(clicks: Path, exported: Path, tmp_path: Path) -> None:
    files = ["--input", str(clicks / "day_1"), "--device", "cpu"]
    outputs = [tmp_path / "without.parquet", tmp_path / "with.parquet"]
    run_without_torch(PREDICT, "predict", str(exported), *files, "--output", str(outputs[0]))
    assert main(["predict", str(exported), *files, "--output", str(outputs[1])]) == 0
    without, given = (pq.read_table(path)["score"].to_numpy() for path in outputs)
    assert len(without) >= len(TEST_LINES)
    np.testing.assert_array_equal(without, given)


@pytest.mark.parametrize(
    ("cuda", "driver", "asks_torch"),
    [(None, False, False), (None, True, False), ("13.0", False, False), ("13.0", True, True)],
)
def test_torch_is_asked_for_a_gpu_where_there_may_be_one(
    cuda: str | None,
    driver: bool,
    asks_torch: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "version.py").write_text(f"cuda = {cuda!r}\nhip = None\n")
    found = SimpleNamespace(origin=str(tmp_path / "__init__.py"))

    def load(name: str) -> None:
        if not driver:
            raise OSError(f"{name}: cannot open shared object file")

    with monkeypatch.context() as patch:
        patch.setattr(backends.importlib.util, "find_spec", lambda name: found)
        patch.setattr(backends.ctypes, "CDLL", load)
        patch.setattr(backends, "here", lambda: "cuda")
        patch.delitem(sys.modules, "torch", raising=False)
        assert backends.chosen("auto") == ("cuda" if asks_torch else "cpu")
        assert backends.chosen("cpu") == "cpu"


def test_packed_weights_begin_with_a_cache_line() -> None:
    weight, bias = np.ones((5, 3), np.float32), np.ones(5, np.float32)
    for _ in range(8):  # by luck, one in four does
        packed = cpu_scores.pack_layers([(weight, bias)], 3)
        assert packed.numbers.ctypes.data % cpu_scores.LINE == 0
