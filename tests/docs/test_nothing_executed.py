"""Nothing is executed that was read: every place where bytes become objects, commands or markup.

A new one has to be named here, and has to show that hostile content stays content.
"""

import ast
import fnmatch
import html.parser
import json
import pickle
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.docs.commands import ROOT
from tests.small import train
from tests.unit.refusals import refused
from trainmark.cli import main

PACKAGE = ROOT / "trainmark"
HOSTILE = ["$(touch pwned)", "`touch pwned`", "'; touch pwned; '", "<script>pwned()</script>",
           '"><img src=x onerror=pwned()>', "a\nb", "[/nope]", "\x1b[31mred"]  # fmt: skip

# What could run code, and where it is: nothing of what it is given was read from a file.
KNOWN = {
    "importlib.import_module": {
        "cli.py",  # modules by our own names
        "clicklog/engine/parse_phase.py",  # one module, earlier
    },
    "subprocess.Popen": {
        "distributed/launch_jobs.py",  # a list of words; `sh -c` gets a text of ours alone
        "verbs/attempt.py",  # a list of words
        "verbs/gate_turns.py",  # a list of words
    },
    "subprocess.run": {
        "clicklog/spark/session.py",
        "distributed/launch_slurm.py",
        "hardware/devices.py",
        "hardware/environment.py",
        "verbs/gate.py",  # git, whose options end before what was given
    },
    "runpy.run_module": {"verbs/gate_worker.py"},  # trainmark
    "runpy.run_path": {"hardware/backends.py"},  # version.py of the torch that is installed
    "ctypes.CDLL": {  # libraries of the system, by our own names
        "clicklog/sources/apart.py",
        "hardware/allocator.py",
        "hardware/backends.py",
        "kernels/cublaslt.py",
        "verbs/gate_worker.py",
    },
    "dist.all_gather_object": {"distributed/mesh.py"},  # pickles, of the ranks of one job
    "dist.broadcast_object_list": {"distributed/mesh.py"},
    "tarfile.open": {"verbs/gate.py"},  # a commit of the checkout, as data
    "Markup": {  # what is not escaped
        "report/board_page.py",  # JSON without <, > and &
        "report/html.py",  # files of the package
        "report/markup.py",
    },
    "torch.load": {"workloads/distilbert/weights.py"},  # weights_only
    "np.load": {  # which unpickles nothing unless it is asked to
        "clickdata/terabyte.py",  # a file of the package
        "clicklog/npy_files.py",
        "corpus/samples.py",
        "corpus/sentences.py",
        "corpus/tokens.py",
        "run/assessment.py",
    },
    "yaml.SafeLoader": {"validation.py"},
}
NEVER = (
    "eval", "exec", "compile", "__import__", "ast.literal_eval", "np.fromregex",
    "os.system", "os.popen", "os.exec*", "os.spawn*", "os.posix_spawn*",
    "asyncio.create_subprocess*",
    "subprocess.call", "subprocess.check_*", "subprocess.get*",
    "pickle.*", "cloudpickle.*", "marshal.*", "shelve.*", "joblib.*", "shutil.unpack_archive",
    "yaml.*load*", "torch.jit.load", "torch.export.load", "torch.package.*", "*.from_pretrained",
)  # fmt: skip


@cache
def _nodes() -> list[tuple[str, ast.AST]]:
    """Of the code that imports or calls something."""
    return [
        (str(path.relative_to(PACKAGE)), node)
        for path in sorted(PACKAGE.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call | ast.Import | ast.ImportFrom)
    ]


def _is_never_called(name: str) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in NEVER)


def test_what_could_execute_goes_by_its_usual_name() -> None:
    """So that the next test finds it."""
    usual = {"np": "numpy", "dist": "torch.distributed"}
    modules = {name.rpartition(".")[0] for name in (*KNOWN, *NEVER)} - {"", "*"}
    modules = {usual.get(name, name) for name in modules}
    names, imported = {value: key for key, value in usual.items()}, 0
    for path, node in _nodes():
        if isinstance(node, ast.ImportFrom) and node.module in modules:
            for alias in node.names:
                name = f"{names.get(node.module, node.module)}.{alias.name}"
                assert name not in KNOWN, f"{path} imports {name} alone"
                assert not _is_never_called(name), f"{path} imports {name}"
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name in modules:
                    imported += 1
                    expected = names.get(alias.name)
                    assert alias.asname == expected, f"{path} imports {alias.name} as another"
    assert imported > 100


def test_every_place_that_could_execute_is_known() -> None:
    found: dict[str, set[str]] = {name: set() for name in KNOWN}
    for path, call in _nodes():
        if not isinstance(call, ast.Call):
            continue
        name = ast.unparse(call.func)
        assert not _is_never_called(name), f"{path} calls {name}"
        if name in found:
            found[name].add(path)
        given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        assert given.get("shell") != "True", f"{path} starts a shell"
        assert given.get("allow_pickle") in (None, "False"), f"{path} unpickles"
        assert given.get("trust_remote_code") in (None, "False"), f"{path} trusts remote code"
        if name.endswith((".extract", ".extractall")):
            assert given.get("filter") == "'data'", f"{path} unpacks links and devices"
        if name == "torch.load":
            assert given.get("weights_only") == "True"
    for name, places in found.items():
        assert places == KNOWN[name], f"{name}: name what is new, and only what is there"


class Bomb:
    """Leaves a trace when it is unpickled."""

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (Path("pwned"),))


def test_pickles_stay_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    days = tmp_path / "days"
    days.mkdir()
    for day in range(2):
        for part in ("dense", "sparse", "labels"):
            np.save(days / f"day_{day}_{part}.npy", np.array([[Bomb()]], object), allow_pickle=True)
    refused(capsys, ["prepare", "npy", "--input", str(days), "--output", "out"], "numpy file")
    weights = tmp_path / "weights"
    weights.mkdir()
    torch.save({"x": Bomb()}, weights / "pytorch_model.bin")
    (weights / "config.json").write_text(
        json.dumps({"model_type": "distilbert", "vocab_size": 512, "max_position_embeddings": 32,
                    "dim": 64, "n_layers": 2, "n_heads": 4, "hidden_dim": 256})
    )  # fmt: skip
    assert main(["train", "distilbert-demo", "--weights", str(weights), "--output", "run"]) == 2
    (tmp_path / "feature_spec.yaml").write_text(
        "metadata: !!python/object/apply:os.system ['touch pwned']\n"
    )
    refused(capsys, ["show", "dlrm-demo", "--data", str(tmp_path)], "feature_spec.yaml")
    (tmp_path / "config.json").write_bytes(pickle.dumps(Bomb()))
    refused(capsys, ["evaluate", str(tmp_path)], "config.json")
    assert not (tmp_path / "pwned").exists()


class _Tags(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, list[tuple[str, str | None]]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, attrs))


def test_hostile_names_and_values_stay_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the page, in the terminal, and as names of folders."""
    monkeypatch.chdir(tmp_path)
    assert train(tmp_path / "run", "--max-steps", "2") == 0
    good = json.loads((tmp_path / "run" / "result.json").read_text())
    del good["checksum"]
    for number, text in enumerate(HOSTILE):
        folder = tmp_path / f"{number}{text.replace('/', '_').replace(chr(27), '')}"
        folder.mkdir()
        notes = {"run": text, "case": text, "notes": [text], "warnings": [text], "changed": [text]}
        software = dict.fromkeys(good["software"], text)
        (folder / "result.json").write_text(json.dumps(good | notes | {"software": software}))
        (folder / "loss.csv").write_text("step,samples,loss\n1,2,0.5\n")
        capsys.readouterr()
        assert main(["compare", str(folder), str(folder)]) == 0
        assert main(["report", str(folder)]) == 0
        assert "\x1b" not in capsys.readouterr().out
        tags = _Tags()
        tags.feed((folder / "report.html").read_text())
        assert tags.found
        assert [a for tag, attrs in tags.found for a, _ in attrs if a.startswith("on")] == []
        assert "pwned()" not in "".join(v or "" for _, attrs in tags.found for _, v in attrs)
        assert "<script>pwned" not in (folder / "report.html").read_text()
    assert main(["board", str(tmp_path), "--output", "board.html"]) == 0
    board = _Tags()
    board.feed((tmp_path / "board.html").read_text())
    scripts = [dict(attrs)["id"] for tag, attrs in board.found if tag == "script"]
    assert scripts == ["data", "script"]
    assert [a for tag, attrs in board.found for a, _ in attrs if a.startswith("on")] == []
    assert "img" not in {tag for tag, _ in board.found}
    assert not (tmp_path / "pwned").exists()
