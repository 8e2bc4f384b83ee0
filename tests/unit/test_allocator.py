"""The setting acts on a whole process, so it is tested in one of its own."""

import json
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from trainmark.hardware.allocator import use_huge_pages

FAULTS = """
import resource, torch
from trainmark.hardware.allocator import keep_freed_memory

def faults(steps):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(steps):
        torch.ones(64 * 2**20 // 4)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

fresh = faults(8)
keep_freed_memory()
faults(16)
print(fresh, faults(8))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's malloc only")
def test_a_step_gets_back_what_the_one_before_freed() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True
    )
    fresh, kept = map(int, done.stdout.split())
    assert kept * 5 < fresh


def test_other_libraries_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from trainmark.hardware import allocator

    monkeypatch.setattr(allocator.platform, "libc_ver", lambda: ("musl", "1.2"))
    assert not allocator.keep_freed_memory()


def _huge_kilobytes(tensor: torch.Tensor) -> int:
    """Of the mapping that a tensor lies in."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(found[1], 16) <= tensor.data_ptr() + 2**23 < int(found[2], 16)
        elif inside and line.startswith("AnonHugePages:"):
            return int(line.split()[1])
    return 0


THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.skipif(
    not THP.exists() or "[madvise]" not in THP.read_text(),
    reason="a kernel that gives huge pages to those who ask",
)
def test_huge_pages() -> None:
    asked = torch.empty(2**24)  # 64 MiB
    assert use_huge_pages(asked)
    asked.fill_(1)
    assert _huge_kilobytes(asked) > 2**15
    assert asked.sum() == 2**24


def test_no_huge_pages_where_there_are_none() -> None:
    assert not use_huge_pages(torch.empty(2**24, device="meta"))
    assert not use_huge_pages(torch.empty(10))
    assert not use_huge_pages(torch.empty(0))


LARGE_GRADIENT = (
    *("--model.vocabulary", "20000", "--model.hidden", "256", "--model.layers", "1"),
    *("--global-batch", "8", "--micro-batch", "8", "--synthetic-sentences", "480"),
    *("--epochs", "1", "--evals-per-epoch", "0", "--no-initial-evaluation", "--eval-batch", "64"),
    *("--device", "cpu", "--log-every", "1000", "--checkpoint-every", "never"),
)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's malloc only")
def test_a_run_does_not_grow_between_looks(tmp_path: Path) -> None:
    """The words' gradient has 20 MB, and nothing is logged before the 60th step."""
    command = [sys.executable, "-m", "trainmark", "train", "distilbert-demo", *LARGE_GRADIENT]
    subprocess.run([*command, "--output", str(tmp_path)], check=True, stdout=subprocess.DEVNULL)
    found = json.loads((tmp_path / "result.json").read_text())
    assert found["steps"]["all"] == 60
    assert found["memory"]["peak_bytes"] < 1.6e9  # kept, the gradients alone would take 1.2e9 more
