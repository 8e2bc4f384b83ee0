"""benchmarks/dlrm_kernels.py runs from end to end at tiny sizes, in Triton's interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_every_kernel_is_checked_and_timed() -> None:
    pytest.importorskip("triton")
    command = [sys.executable, "benchmarks/dlrm_kernels.py", "--tiny", "--seconds", "1000"]
    command += ["--dims", "16", "24"]
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    _, fastest = done.stdout.split("--- fastest")
    kernels = ["forward", "backward", "update sgd", "update adagrad", "sort", "gather"]
    for kernel in kernels:
        times = 2 if kernel == "gather" else 4  # kinds of ids, and widths of what is a default
        for table_format in ("fp32", "int8"):
            assert fastest.count(f"trainmark   {kernel:22s} {table_format}") == times, kernel
    assert "0 variants skipped" in fastest
