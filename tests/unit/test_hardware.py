"""What is known of hardware: names, peaks, clusters, and the machine that this is."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from trainmark.errors import InputError
from trainmark.hardware.datasheets import ACCELERATORS, KEYS
from trainmark.hardware.devices import (
    PRECISIONS,
    Cluster,
    Device,
    Peak,
    Unknown,
    accelerators,
    identify,
    key_of,
    peak_flops,
)
from trainmark.hardware.environment import environment

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("Tesla V100-SXM2-32GB", "v100-32g"),
        ("Tesla V100-SXM2-16GB", "v100-16g"),
        ("NVIDIA A100-SXM4-40GB", "a100-40g"),
        ("A100-SXM4-40GB", "a100-40g"),
        ("NVIDIA A100-SXM4-80GB", "a100-80g"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie-80g"),
        ("NVIDIA A800-SXM4-80GB", "a800-80g"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H100 NVL", "h100-nvl"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA H200 NVL", "h200-nvl"),
        ("NVIDIA B200", "b200"),
        ("AMD Instinct MI300X", "mi300x"),
    ],
)
def test_driver_names_are_recognised(name: str, key: str) -> None:
    assert key_of(name) == key


@pytest.mark.parametrize(
    "name",
    ["NVIDIA GH200 480GB", "NVIDIA A100-SXM4-40GB MIG 1g.5gb", "NVIDIA GB200", "NVIDIA L40S"],
)
def test_what_merely_resembles_a_known_accelerator_has_no_peak(name: str) -> None:
    key = key_of(name)
    assert key not in ACCELERATORS
    peak = peak_flops(Device(key=key, name=name, memory_bytes=1), "bf16")
    assert isinstance(peak, Unknown)
    assert name in peak.reason


@pytest.mark.parametrize(
    ("key", "precision", "tflops"),
    [
        ("a100-40g", "fp32", 19.5),
        ("a100-40g", "tf32", 156),
        ("a100-80g", "bf16", 312),
        ("v100-32g", "fp16", 125),
        ("h100", "bf16", 989),
        ("h100", "fp8", 1979),
        ("h200", "tf32", 495),
        ("b200", "fp8", 4500),
        ("mi300x", "fp16", 1307.4),
    ],
)
def test_peaks_are_dense_and_belong_to_their_precision(
    key: str, precision: str, tflops: float
) -> None:
    peak = peak_flops(key, precision)
    assert isinstance(peak, Peak)
    assert peak.flops == pytest.approx(tflops * 1e12)
    assert peak.dtype == precision


def test_every_accelerator_has_a_dated_source_and_rising_peaks() -> None:
    for key, accelerator in ACCELERATORS.items():
        assert any(str(year) in accelerator.source for year in range(2018, 2027)), key
        rates = [accelerator.tflops[p] for p in PRECISIONS if p in accelerator.tflops]
        assert rates == sorted(rates), key
        assert 16 <= accelerator.memory_gib <= 192, key
        assert 0.5e12 < accelerator.bandwidth < 10e12, key


@pytest.mark.parametrize(("key", "precision"), [("v100-32g", "bf16"), ("a100-40g", "fp8")])
def test_units_that_do_not_exist_have_no_peak(key: str, precision: str) -> None:
    peak = peak_flops(key, precision)
    assert isinstance(peak, Unknown)
    assert precision in peak.reason


def test_a_known_cpu_has_the_peak_of_the_cores_in_use() -> None:
    cpu = Device(key="cpu", name="AMD EPYC 7742 64-Core Processor", memory_bytes=1, cores=8)
    peak = peak_flops(cpu, "fp32")
    assert isinstance(peak, Peak)
    assert peak.flops == pytest.approx(8 * 3.4e9 * 32)
    assert isinstance(peak_flops(cpu, "bf16"), Unknown)


def test_the_name_of_a_cpu_must_match_as_a_whole() -> None:
    other = Device(key="cpu", name="AMD EPYC 7742P Processor", memory_bytes=1, cores=8)
    assert isinstance(peak_flops(other, "fp32"), Unknown)
    ends_with_model = Device(
        key="cpu", name="INTEL(R) XEON(R) PLATINUM 8570", memory_bytes=1, cores=1
    )
    assert isinstance(peak_flops(ends_with_model, "bf16"), Peak)
    assert isinstance(peak_flops("cpu", "fp32"), Unknown)


def test_an_unknown_precision_is_an_error_with_a_suggestion() -> None:
    with pytest.raises(InputError, match="Did you mean 'bf16'"):
        peak_flops("h100", "bf61")


@pytest.mark.parametrize("text", ["a100-40gx2x8", "cpux1x1", "mi300xx1x8", "h100-nvlx16x4"])
def test_a_cluster_reads_what_it_writes(text: str) -> None:
    assert str(Cluster.parse(text)) == text


def test_every_key_can_be_a_cluster() -> None:
    for key in KEYS:
        assert Cluster.parse(f"{key}x3x5") == Cluster(key, 3, 5)
    assert Cluster("h100", 3, 5).world == 15


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("h200", "expected HARDWARExNODESxDEVICES"),
        ("", "expected HARDWARExNODESxDEVICES"),
        ("h20x1x8", "Did you mean 'h200'"),
        ("mi300x1x8", "Did you mean 'mi300x'"),
        ("x100x1x8", "Unknown hardware 'x100'"),
        ("h100x1x8x2", "more than two numbers"),
        ("a100x1x8", "several kinds: a100-40g, a100-80g"),
        ("h100x0x8", "at least 1"),
        ("h100x1x-8", "expected HARDWARExNODESxDEVICES"),
    ],
)
def test_a_bad_cluster_is_one_clear_sentence(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Cluster.parse(text)


def test_this_machine() -> None:
    device = identify("cpu")
    assert device.key == "cpu"
    assert device.memory_bytes > 2**28
    assert device.cores is not None
    assert device.cores >= 1


def test_the_environment_is_complete_and_fits_into_json() -> None:
    hardware, software = environment("cpu")
    assert json.loads(json.dumps([hardware, software])) == [hardware, software]
    assert hardware.keys() == {
        "machine",
        "accelerator",
        "accelerators",
        "cpu",
        "cpu_cores",
        "host_memory_bytes",
        "interconnect",
        "network",
    }
    assert hardware["cpu"]
    for known in ("os", "kernel", "container", "python", "torch", "trainmark"):
        assert software[known], known
    assert {"driver", "cuda", "nccl", "commit"} <= software.keys()


def test_accelerators_are_counted_without_holding_them() -> None:
    seen = range(torch.cuda.device_count())
    assert accelerators() == [identify(f"cuda:{n}").key for n in seen]


def test_importing_hardware_is_cheap() -> None:
    heavy = "{'torch', 'numpy', 'psutil', 'pynvml', 'pydantic', 'rich'}"
    code = f"import sys, trainmark.hardware.devices; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_commit_is_that_of_the_checkout() -> None:
    head = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.strip()
    _, software = environment()
    assert head
    assert str(software["commit"]).removesuffix("-dirty") == head
