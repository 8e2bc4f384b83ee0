"""Packages whose docstring is a map of their files name all of them, and no others."""

import importlib
import re
from pathlib import Path

import pytest

import trainmark
from tests.docs.test_adding_a_workload import PAGE

OF_EVERY_WORKLOAD = set(re.findall(r"^\| `(\w+\.py)` \|", PAGE, re.M))
ROOT = Path(trainmark.__file__).parent
PACKAGES = sorted(
    ".".join(path.parent.relative_to(ROOT).parts)
    for path in ROOT.rglob("__init__.py")
    if path.parent != ROOT and "workloads" not in path.parts
)
WORKLOADS = [f"workloads.{name}" for name in ("dlrm", "distilbert", "llama3")]


@pytest.mark.parametrize("package", [*PACKAGES, *WORKLOADS])
def test_the_map_names_every_file(package: str) -> None:
    module = importlib.import_module(f"trainmark.{package}")
    named = set(re.findall(r"\b(\w+\.py)\b", module.__doc__ or ""))
    present = {path.name for path in Path(str(module.__file__)).parent.glob("*.py")}
    assert len(named) > 1
    assert named == present - (OF_EVERY_WORKLOAD if package in WORKLOADS else {"__init__.py"})
