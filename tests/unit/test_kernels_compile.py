"""Every kernel of DLRM compiles for Hopper, and keeps its values in registers."""

import ast
import itertools
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
KERNELS = {
    "_gather_kernel": 9, "_forward_kernel": 9, "_backward_kernel": 16,
    "_update_kernel": 47, "_adagrad_kernel": 1,
    "_masked_gemm_kernel": 2, "_masked_sums_kernel": 2, "_column_sums_kernel": 16,
    "_click_loss_kernel": 2, "_quantize_kernel": 3, "_mask_codes_kernel": 1, "_copy_kernel": 6,
    "_rows_kernel": 2, "_rows_of_kernel": 3, "_pool_kernel": 3, "_crossed_kernel": 2,
    "_cross_gradients_kernel": 4, "_quantize_rows_kernel": 1,
}  # fmt: skip
"""And in how many forms each is compiled."""
OF_LLAMA = {"_adamw_kernel", "_transpose_kernel"}


def test_every_kernel_is_known() -> None:
    """So that one more does not wait for the slow test."""
    paths = (ROOT / "trainmark/kernels").glob("*.py")
    nodes = itertools.chain(*(ast.walk(ast.parse(path.read_text())) for path in paths))
    kernels = {
        node.name
        for node in nodes
        if isinstance(node, ast.FunctionDef)
        and node.name.endswith("_kernel")
        and any("triton.jit" in ast.unparse(decorator) for decorator in node.decorator_list)
    }
    assert kernels == {*KERNELS, *OF_LLAMA}


@pytest.mark.slow
def test_kernels_compile_for_hopper_without_spilling(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "tests.hopper_compiler"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert Counter(kernel for kernel, _ in lines) == KERNELS
    assert {stack for _, stack in lines} == {"0"}
