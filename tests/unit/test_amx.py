"""Machines that announce AMX without having it are played by files; this one's CPUID is asked."""

import os
import platform
from pathlib import Path

import pytest

from trainmark.hardware import amx

PROCESSORS = Path("/proc/cpuinfo")
SETTING = "ONEDNN_MAX_CPU_ISA"


@pytest.fixture
def processors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(SETTING, "")  # so that it is undone, whatever there was
    monkeypatch.delenv(SETTING)
    monkeypatch.setattr(amx.platform, "machine", lambda: "x86_64")
    path = tmp_path / "cpuinfo"
    path.write_text("processor\t: 0\nflags\t\t: fpu amx_bf16 amx_tile\n\nprocessor\t: 1\n")
    return path


def cpuid(monkeypatch: pytest.MonkeyPatch, last: int | None, tiles: int) -> None:
    """The machine's highest leaf, and what it says of tiles."""
    monkeypatch.setattr(amx, "_cpuid", {0: last, 0x1D: tiles}.__getitem__)


@pytest.mark.parametrize(
    ("last", "tiles", "avoided"),
    [(0x20, 1, False), (0x20, 0, True), (0x1C, 0, True), (0x1C, 7, True), (None, 0, False)],
)
def test_it_is_avoided_only_where_it_has_no_tiles(
    processors: Path,
    monkeypatch: pytest.MonkeyPatch,
    last: int | None,
    tiles: int,
    avoided: bool,
) -> None:
    cpuid(monkeypatch, last, tiles)
    assert amx.avoid_missing_amx(processors) == avoided == (SETTING in os.environ)


def test_what_a_user_has_set_stays(processors: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cpuid(monkeypatch, 0x20, 0)
    monkeypatch.setenv(SETTING, "AVX2")
    assert amx.avoid_missing_amx(processors)
    assert os.environ[SETTING] == "AVX2"


def test_other_processors_are_not_asked(
    processors: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpuid(monkeypatch, 0x20, 0)
    assert not amx.avoid_missing_amx(tmp_path / "none")
    processors.write_text("flags\t\t: fpu avx512f\n")
    assert not amx.avoid_missing_amx(processors)
    assert SETTING not in os.environ


@pytest.mark.skipif(
    platform.machine() != "x86_64" or not PROCESSORS.exists(), reason="needs Linux on x86-64"
)
def test_cpuid_says_what_the_kernel_has_read() -> None:
    level = next(line for line in PROCESSORS.open() if line.startswith("cpuid level"))
    assert amx._cpuid(0) == int(level.split(":")[1])
