"""Models as ONNX and as programs of torch.export score as their run's own evaluation does."""

import resource
import subprocess
import sys
from collections import namedtuple
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import log_loss, roc_auc_score
from torch import Tensor
from torch.nn.functional import softmax

from tests import small, small_distilbert
from trainmark import workloads
from trainmark.checkpoint import checkpoints
from trainmark.cli import main
from trainmark.run import evaluation, run_folder
from trainmark.verbs import export
from trainmark.workloads.distilbert.runs import load_sentences
from trainmark.workloads.dlrm import standalone

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")

from trainmark.interop import onnx_files  # noqa: E402  (needs onnx)

BATCHES = (1, 7, 64)
ALL_LARGE = ("--fp32-up-to-rows", "5")  # of 50, 7 and 3 rows, all but the last

RUN_PROGRAMS = """
import sys, torch
found = []
for path, parts in torch.load(sys.argv[1]):
    model = torch.export.load(path).module()
    found.append([model(*inputs) for inputs in parts])
    assert not any(output.requires_grad for output in found[-1])
torch.save(found, sys.argv[2])
assert not {"trainmark", "transformers"} & {name.split(".")[0] for name in sys.modules}
"""


def exported(run: Path, layout: str) -> Path:
    assert main(["export", str(run), "--format", layout, "--output", str(run / layout)]) == 0
    assert (run / layout / "config.json").is_file()
    assert (run / layout / "README.txt").is_file()
    return run / layout


def run_onnx(path: Path, **inputs: Tensor) -> Tensor:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {name: tensor.numpy() for name, tensor in inputs.items()})
    return torch.from_numpy(found)


Inputs = Sequence[tuple[Tensor, ...]]


def run_programs(programs: Sequence[tuple[Path, Inputs]], folder: Path) -> list[list[Tensor]]:
    """By a process that has neither Trainmark nor transformers loaded."""
    given, found = folder / "given.pt", folder / "found.pt"
    torch.save([(str(path), inputs) for path, inputs in programs], given)
    command = [sys.executable, "-I", "-c", RUN_PROGRAMS, str(given), str(found)]
    subprocess.run(command, check=True, cwd=folder)
    outputs: list[list[Tensor]] = torch.load(found)
    return outputs


# --- DLRM


@pytest.mark.parametrize(
    ("flags", "stored", "inline_bytes"),
    [
        ((), "FLOAT", 10**9),
        (("--model.numerical-features", "0"), "FLOAT", 0),
        (("--model.embedding-dim", "10", "--model.bottom-mlp", "16", "10"), "FLOAT", 0),
        (("--model.table-widths", "8", "2", "5"), "FLOAT", 0),
        (("--model.interaction", "dcn", "--model.cross-rank", "5"), "FLOAT", 10**9),
        (("--model.interaction", "dcn", "--model.cross-rank", "full"), "FLOAT", 0),
        (("--model.interaction", "projection", "--model.branch1-mlp", "24"), "FLOAT", 0),
        (("--model.interaction", "cat", "--model.table-widths", "8", "2", "5"), "FLOAT", 0),
        (("--model.interaction", "dot_and_inputs"), "FLOAT", 0),
        (("--model.bottom-output", "linear"), "FLOAT", 0),
        (("--table-precision", "bf16", *ALL_LARGE), "BFLOAT16", 0),
        (("--table-precision", "fp16", *ALL_LARGE), "FLOAT16", 10**9),
        (("--table-precision", "int8", *ALL_LARGE, "--positive-weight", "5"), "INT8", 0),
        (("--table-precision", "fp8", *ALL_LARGE), "UINT8", 10**9),
    ],
    ids=[
        "fp32",
        "no numerical features",
        "an interaction of 16",
        "widths",
        "dcn",
        "dcn, full rank",
        "projection",
        "cat",
        "dot and inputs",
        "a linear output",
        "bf16",
        "fp16",
        "int8",
        "fp8",
    ],
)
def test_clicks_are_those_of_the_evaluation(
    flags: tuple[str, ...],
    stored: str,
    inline_bytes: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(onnx_files, "INLINE_BYTES", inline_bytes)
    run = tmp_path / "run"
    assert small.train(run, *flags) == 0
    labels, numerical, ids = small.click_samples(run)

    in_onnx = exported(run, "onnx") / "model.onnx"
    clicks = run_onnx(in_onnx, numerical=numerical, categorical=ids).double()
    expected = evaluation.evaluate(run, data=None, device="cpu")["splits"]["test"]
    # A few of 500,000 pairs have scores so near that rounding decides which is higher.
    assert roc_auc_score(labels, clicks) == pytest.approx(expected["auc"], abs=1e-5)
    assert log_loss(labels, clicks) == pytest.approx(expected["log_loss"], abs=1e-6)

    plain = standalone.load(exported(run, "safetensors"))
    for size in (0, *BATCHES):
        some = run_onnx(in_onnx, numerical=numerical[:size], categorical=ids[:size])
        reference = plain(numerical[:size], ids[:size])
        torch.testing.assert_close(some, reference, rtol=0, atol=1e-6)

    onnx.checker.check_model(in_onnx, full_check=True)
    tables = {w.name: w for w in onnx.load(in_onnx, load_external_data=False).graph.initializer}
    tables = {name: table for name, table in tables.items() if name.startswith("tables.")}
    kinds = [onnx.TensorProto.DataType.Name(table.data_type) for table in tables.values()]
    assert kinds.count(stored) == (3 if stored == "FLOAT" else 2)
    beside = [table.data_location == onnx.TensorProto.EXTERNAL for table in tables.values()]
    assert set(beside) == {inline_bytes == 0}
    assert (run / "onnx" / "model.onnx.data").exists() == (inline_bytes == 0)


def test_programs_of_pytorch_give_the_same_clicks(tmp_path: Path) -> None:
    """One test, so that the process that runs them is started once."""
    cases = {
        "bf16": ("--table-precision", "bf16", *ALL_LARGE),
        "int8": ("--table-precision", "int8", *ALL_LARGE),
        "dcn": ("--model.interaction", "dcn", "--model.bottom-output", "linear"),
        "projection": ("--model.interaction", "projection", "--model.branch1-mlp", "24"),
    }
    programs = []
    for name, flags in cases.items():
        run = tmp_path / name
        assert small.train(run, *flags, "--positive-weight", "5") == 0
        _, numerical, ids = small.click_samples(run)
        parts = [(numerical[:size], ids[:size]) for size in BATCHES]
        programs.append((exported(run, "torch") / "model.pt2", parts))
    for (path, parts), found in zip(programs, run_programs(programs, tmp_path), strict=True):
        plain = standalone.load(exported(path.parents[1], "safetensors"))
        for part, clicks in zip(parts, found, strict=True):
            # Not bit for bit: kernels may add up unaligned rows in another order.
            torch.testing.assert_close(clicks, plain(*part), rtol=0, atol=1e-6, msg=str(path))


def test_large_weights_lie_beside_the_model_and_are_read_one_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    assert small.train(run, "--table-precision", "int8", *ALL_LARGE) == 0
    read, asked = checkpoints.read, []

    def read_and_note(path: Path, names: list[str]) -> dict[str, Tensor]:
        asked.append(list(names))
        return read(path, names)

    monkeypatch.setattr(onnx_files, "INLINE_BYTES", 0)
    monkeypatch.setattr(checkpoints, "read", read_and_note)
    folder = exported(run, "onnx")
    path = run_folder.find_checkpoint(run)
    weights = [name for name in checkpoints.names(path) if name.startswith("model.")]
    assert len(weights) == 8 + 2 * 2 + 1
    assert sorted(asked) == sorted([name] for name in weights)

    stored = read(path, weights)
    data = (folder / "model.onnx.data").read_bytes()
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    found = 0
    for weight in model.graph.initializer:
        place = {entry.key: entry.value for entry in weight.external_data}
        if not place:
            continue
        offset, length = int(place["offset"]), int(place["length"])
        content = stored[f"model.{weight.name}"].flatten().view(torch.uint8).numpy().tobytes()
        assert place["location"] == "model.onnx.data"
        assert offset % onnx_files.ALIGNMENT == 0
        assert data[offset : offset + length] == content
        found += 1
    assert found == len(weights)


@pytest.mark.slow
def test_a_table_of_more_than_2_gb(tmp_path: Path) -> None:
    rows, run = (4_300_000, 7, 3), tmp_path / "run"
    flags = ("--model.embedding-dim", "128", "--model.bottom-mlp", "16", "128", "--max-steps", "1")
    table_rows = ("--model.table-rows", *map(str, rows), "--optimizer.name", "sgd")
    assert small.train(run, *flags, *table_rows) == 0
    in_onnx = exported(run, "onnx") / "model.onnx"
    assert in_onnx.with_name("model.onnx.data").stat().st_size > 2**31
    assert in_onnx.stat().st_size < 10**6
    numerical = torch.randn(7, 13)
    ids = torch.stack([torch.randint(0, n, (7,)) for n in rows], dim=1)
    ids[0] = torch.tensor(rows) - 1
    reference = standalone.load(exported(run, "safetensors"))(numerical, ids)
    clicks = run_onnx(in_onnx, numerical=numerical, categorical=ids)
    torch.testing.assert_close(clicks, reference, rtol=0, atol=1e-6)
    onnx.checker.check_model(in_onnx)


# --- DistilBERT


def sentence_samples(run: Path) -> tuple[Tensor, Tensor, Tensor]:
    """Labels, tokens and masks of the run's validation split, padded to the longest sentence."""
    found = load_sentences(run_folder.read_config(run), "validation")
    lengths = np.diff(found.offsets)
    tokens = torch.zeros(len(lengths), int(lengths.max()), dtype=torch.int64)
    mask = torch.zeros_like(tokens)
    for number, (start, length) in enumerate(zip(found.offsets, lengths, strict=False)):
        tokens[number, :length] = torch.as_tensor(found.tokens[start : start + length])
        mask[number, :length] = 1
    return torch.as_tensor(found.labels), tokens, mask


@pytest.mark.parametrize("layout", ["distilbert", pytest.param("bert", marks=pytest.mark.slow)])
def test_classes_are_those_of_the_evaluation(
    layout: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = tmp_path / "run"
    flags = (*small_distilbert.FLAGS, "--model.layout", layout, "--lr", "0.01")
    assert main(["train", "distilbert-demo", *flags, "--output", str(run)]) == 0
    labels, tokens, mask = sentence_samples(run)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "transformers", None)
        assert "transformers: pip install 'trainmark[text]'." in refusal(capsys, run, "torch")

    in_onnx = exported(run, "onnx") / "model.onnx"
    said = capsys.readouterr().err  # and nothing of what the exporter warns about
    assert said.startswith("Exported ")
    assert said.count("\n") == 1
    logits = run_onnx(in_onnx, input_ids=tokens, attention_mask=mask)
    expected = evaluation.evaluate(run, data=None, device="cpu")["splits"]["validation"]
    right = (logits.argmax(1) == labels).double().mean().item()
    assert right == pytest.approx(expected["accuracy"], abs=1e-3)  # a tie may fall either way
    loss = log_loss(labels, softmax(logits.double(), dim=1))
    assert loss == pytest.approx(expected["loss"], abs=1e-6)

    parts = [(tokens[:n, :length], mask[:n, :length]) for n, length in ((1, 1), (7, 5), (64, 32))]
    (programmed,) = run_programs([(exported(run, "torch") / "model.pt2", parts)], tmp_path)
    for (ids, attended), from_program in zip(parts, programmed, strict=True):
        from_onnx = run_onnx(in_onnx, input_ids=ids, attention_mask=attended)
        torch.testing.assert_close(from_onnx, from_program, rtol=0, atol=1e-5)
    whole = run_onnx(in_onnx, input_ids=tokens[:64], attention_mask=mask[:64])
    torch.testing.assert_close(whole, logits[:64], rtol=0, atol=1e-5)


# --- what cannot be


def refusal(capsys: pytest.CaptureFixture[str], run: Path, layout: str) -> str:
    before = sorted(run.iterdir())
    capsys.readouterr()
    assert main(["export", str(run), "--format", layout]) == 2
    assert sorted(run.iterdir()) == before
    return capsys.readouterr().err


def test_a_disk_that_fills_up_ends_a_program_in_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """torch's writer would end the process (SIGABRT). A limit of this process is its disk."""
    assert small.train(tmp_path / "run", "--checkpoint-every", "4 steps") == 0
    command = ["export", str(tmp_path / "run"), "--format", "torch", "--output"]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
        assert main([*command, str(tmp_path / "full")]) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "File too large" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def test_an_export_that_is_there_is_left_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It may have been killed between its last file and its end."""
    run, output = tmp_path / "run", tmp_path / "model"
    assert small.train(run, "--checkpoint-every", "4 steps") == 0
    command = ["export", str(run), "--output", str(output)]
    assert main(command) == 0
    before = {path: path.stat().st_mtime_ns for path in output.rglob("*")}
    capsys.readouterr()
    assert main(command) == 0
    assert "nothing was done" in capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in output.rglob("*")} == before
    for other in (["--checkpoint", "step-4"], ["--format", "torch"]):
        assert main([*command, *other]) == 2
        assert "is not empty. Give another --output." in capsys.readouterr().err


def test_what_cannot_be_exported_says_so_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert small.train(run) == 0
    Free = namedtuple("Free", ["free", "available"])
    with monkeypatch.context() as patch:
        patch.setattr(export, "PACKAGES", ("onnx", "no_such_package"))
        said = refusal(capsys, run, "onnx")
        assert said.endswith("needs no_such_package: pip install 'trainmark[export]'.\n")
    with monkeypatch.context() as patch:
        patch.setattr("psutil.virtual_memory", lambda: Free(0, 4000))
        assert "too large for --format torch" in refusal(capsys, run, "torch")
    with monkeypatch.context() as patch:
        patch.setattr("shutil.disk_usage", lambda folder: Free(1000, 0))
        for layout in ("onnx", "safetensors"):
            assert "the disk has 1000 bytes free" in refusal(capsys, run, layout)


def test_formats_that_a_workload_lacks_name_those_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def named(name: str) -> Any:
        return lambda folder: workloads.named_run(name)

    monkeypatch.setattr(run_folder, "read_config", named("llama3-demo"))
    for layout in ("onnx", "torch"):
        said = refusal(capsys, tmp_path, layout)
        assert f"cannot be exported with --format {layout}. Use --format safetensors." in said
    monkeypatch.setattr(run_folder, "read_config", named("distilbert-demo"))
    assert "Use --format onnx or --format torch." in refusal(capsys, tmp_path, "safetensors")
    (tmp_path / "model").mkdir()
    said = refusal(capsys, tmp_path, "safetensors")
    assert f"needs no export: {tmp_path / 'model'} is its trained model." in said
