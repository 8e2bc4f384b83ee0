"""Devices of other vendors: what each kind is reached by, and a whole run on a stand-in."""

import ast
from pathlib import Path
from typing import get_args

import pytest
import torch

import trainmark
from tests import small, small_distilbert, stand_in
from tests.small import result
from trainmark.cli import main
from trainmark.errors import InputError
from trainmark.hardware import backends
from trainmark.hardware.backends import BACKENDS, DeviceChoice, Kind
from trainmark.hardware.nvidia import capability, nvml_device

PACKAGE = Path(trainmark.__file__).parent
NVIDIAS_OWN = {"hardware/nvidia.py", "hardware/pinned.py"}
"""And what lies in kernels/."""

# --- kinds


def test_every_kind_has_a_row() -> None:
    assert set(get_args(DeviceChoice)) == {"auto", *BACKENDS} == {"auto", *get_args(Kind)}


@pytest.mark.parametrize("kind", ["cuda", "rocm", "xpu", "npu", "mps"])
def test_kinds_resolve_and_dry_run_anywhere(
    kind: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    told = f"--device {kind}: PyTorch's"
    for line in ("train llama3-demo --dry-run", "show dlrm-demo", "plan dlrm-demo"):
        assert main([*line.split(), "--device", kind]) == 0
        assert told in capsys.readouterr().out
    if backends.here() is None:
        assert main(["train", "dlrm-demo", "--device", kind, "--output", str(tmp_path)]) == 2
        (sentence,) = capsys.readouterr().err.splitlines()
        assert f"--device {kind}: PyTorch finds no {BACKENDS[kind].what} here" in sentence  # type: ignore[index]


@pytest.mark.parametrize(
    ("seen", "hip", "choice", "found"),
    [
        (None, None, "auto", "cpu"),
        ("cuda", None, "auto", "cuda"),
        ("cuda", "6.4", "auto", "rocm"),
        ("cuda", "6.4", "cuda", "rocm"),
        ("cuda", None, "rocm", "finds no AMD GPU here .* Use --device cuda"),
        ("cuda", None, "cpu", "cpu"),
        ("xpu", None, "auto", "cpu"),
        ("xpu", None, "xpu", "xpu"),
        ("maia", None, "auto", "cpu"),
        ("xpu", None, "cuda", "finds no CUDA device here .* Use --device xpu"),
        ("cuda", None, "npu", "finds no Ascend NPU here .* Use --device cuda"),
        ("maia", None, "xpu", "finds no Intel GPU here .* Use --device cpu"),
        ("mps", None, "mps", "it has no float64"),
    ],
)
def test_what_is_chosen(
    seen: str | None, hip: str | None, choice: str, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    accelerator = None if seen is None else torch.device(seen)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: seen is not None)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: accelerator)
    monkeypatch.setattr(torch.version, "hip", hip)
    if " " in found:
        with pytest.raises(InputError, match=found):
            backends.chosen(choice)
    else:
        assert backends.chosen(choice) == found


def test_what_pytorch_calls_collectives() -> None:
    """The table agrees with PyTorch's own, as far as that goes; HCCL comes with torch_npu."""
    known = torch.distributed.Backend.default_device_backend_map
    for kind, backend in BACKENDS.items():
        if kind != "npu":
            assert backend.collectives == known[backend.torch_type]
    for name in ("cpu", "cuda", "xpu", "mps"):
        assert backends.collectives(torch.device(name)) == known[name]


def test_nothing_of_nvidias_is_asked_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")
    for name in ("cpu", "xpu", "cuda"):
        assert capability(torch.device(name)) is None
        with nvml_device(torch.device(name)) as nvml:
            assert nvml.handle is None
            assert "has no NVML" in (nvml.reason or "")


# --- a whole run

RUNS = {
    "dlrm-demo": (*small.FLAGS, "--log-every", "3"),
    "distilbert-demo": (*small_distilbert.FLAGS,),
    "llama3-demo": (
        *("--max-steps", "3", "--evals-per-epoch", "0", "--synthetic-samples", "48"),
        *("--warmup-clock", "1"),
    ),
}
HARDWARE = f"""
name = "{stand_in.NAME}"
key = "stand-in"
peak.fp32 = {{tflops = 2.5, source = "its maker"}}
"""


@pytest.mark.parametrize("name", RUNS)
def test_a_run_on_another_accelerator_never_asks_torch_cuda(name: str, tmp_path: Path) -> None:
    (tmp_path / "hardware.toml").write_text(HARDWARE)
    output = tmp_path / "run"
    flags = ["--device", "xpu", "--hardware", str(tmp_path / "hardware.toml")]
    flags += ["--checkpoint-every", "2 steps", "--output", str(output)]
    events = stand_in.Event.made
    with stand_in.stand_in() as asked:
        assert main(["train", name, *RUNS[name], *flags]) == 0
        if name != "llama3-demo":  # which holds nothing out
            assert main(["evaluate", str(output), "--device", "xpu"]) == 0
    assert asked == []
    assert stand_in.Event.made > events  # the roads of a device with streams were taken
    found = result(output)
    assert (found["case"], found["config"]["device"]) == ("stand-inx1x1", "xpu")
    assert not found["config"]["compile"]
    assert found["hardware"]["accelerator"] == stand_in.NAME
    assert found["memory"]["total_bytes"] == stand_in.TOTAL
    assert found["memory"]["allocated_peak_bytes"] == stand_in.PEAK
    assert found["energy"]["reason"] == "a xpu device has no NVML"
    assert {(m["peak_flops"], m["peak_source"]) for m in found["mfu"]} == {(2.5e12, "its maker")}


def test_it_trains_as_a_cpu_does(tmp_path: Path) -> None:
    """The stand-in computes on one, after all; without a description it has no MFU."""
    flags = ("--log-every", "3", "--precision", "bf16")
    with stand_in.stand_in():
        assert small.train(tmp_path / "xpu", *flags, "--device", "xpu") == 0
    assert small.train(tmp_path / "cpu", *flags) == 0
    ours, theirs = (small.curve(tmp_path / kind) for kind in ("xpu", "cpu"))
    assert [loss for _, _, loss in ours] == pytest.approx([loss for _, _, loss in theirs], rel=1e-2)
    found = result(tmp_path / "xpu")
    assert found["mfu"] == []
    assert found["mfu_reason"] == f"no peak is known for '{stand_in.NAME}'"


def test_a_run_that_does_not_fit_the_accelerator_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with stand_in.stand_in():
        line = ["train", "dlrm-large", "--data", "synthetic", "--device", "xpu"]
        assert main([*line, "--output", str(tmp_path / "run")]) == 2
    assert f"{stand_in.NAME} has 12.0 GiB free" in capsys.readouterr().err


# --- the code


def asks_torch_cuda(path: Path) -> bool:
    """Whether code in a file names `torch.cuda`; comments and docstrings may."""
    text = path.read_text()
    return "torch.cuda" in text and any(
        (isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.cuda")
        or (isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch.cuda"))
        for node in ast.walk(ast.parse(text))
    )


def test_torch_cuda_is_left_to_what_is_nvidias_own() -> None:
    asking = {
        str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if asks_torch_cuda(path)
    }
    assert {name for name in asking if not name.startswith("kernels/")} == NVIDIAS_OWN
