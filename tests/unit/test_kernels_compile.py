"""Every kernel of DLRM compiles for Hopper, and keeps its values in registers."""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_kernels_compile_for_hopper_without_spilling(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "tests.hopper_compiler"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert Counter(kernel for kernel, _ in lines) == {
        "_gather_kernel": 9, "_forward_kernel": 9, "_backward_kernel": 16,
        "_update_kernel": 47,
        "_masked_gemm_kernel": 2, "_masked_sums_kernel": 2, "_column_sums_kernel": 16,
        "_click_loss_kernel": 2, "_quantize_kernel": 3, "_mask_codes_kernel": 1, "_copy_kernel": 6,
        "_rows_kernel": 2, "_pool_kernel": 3, "_crossed_kernel": 2, "_cross_gradients_kernel": 4,
        "_quantize_rows_kernel": 1,
    }  # fmt: skip
    assert {stack for _, stack in lines} == {"0"}
