"""The setting acts on a whole process, so it is tested in one of its own."""

import platform
import subprocess
import sys

import pytest

FAULTS = """
import resource, torch
from trainmark.allocator import keep_freed_memory

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
    from trainmark import allocator

    monkeypatch.setattr(allocator.platform, "libc_ver", lambda: ("musl", "1.2"))
    assert not allocator.keep_freed_memory()
