"""`trainmark calibrate` on a GPU: every figure is there, and the file says the same."""

from pathlib import Path

import pytest
import torch

from trainmark.hardware import hardware_file, known
from trainmark.verbs import calibrate
from trainmark.verbs.bench import Scale

pytestmark = pytest.mark.gpu

SMALL = Scale(
    rows=256, widest=256, table_bytes=2**20, lookups=1024, copy_bytes=2**22, file_bytes=2**20,
    budget_s=0.0,
)  # fmt: skip


def test_a_gpu_is_calibrated(tmp_path: Path) -> None:
    found = calibrate.measure(torch.device("cuda", 0), SMALL, tmp_path)
    measured = found.measured
    assert found.name == torch.cuda.get_device_name(0)
    assert {"fp32", "fp16"} <= measured.gemm.keys()
    assert all(sorted(rates) == [16, 64, 256] for rates in measured.gemm.values())
    for name in known.BY_WIDTH:
        assert all(rate > 0 for rate in getattr(measured, name).values()), name
    assert (measured.layer, measured.small, measured.interaction) == ({}, {}, {})  # of a CPU
    for rate in (measured.copy, measured.host, measured.disk, measured.launch_s):
        assert rate is not None
        assert rate > 0
    file = tmp_path / "hardware.toml"
    file.write_text(hardware_file.text(found))
    again = hardware_file.read(file)
    assert again.key == found.key
    assert again.measured.gemm.keys() == measured.gemm.keys()
    assert again.measured.copy == pytest.approx(measured.copy, rel=1e-5)
