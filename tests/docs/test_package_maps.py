"""Packages whose docstring is a map of their files name all of them, and no others."""

import importlib
import re
from pathlib import Path

import pytest


@pytest.mark.parametrize("package", ["clicklog", "distributed", "embeddings"])
def test_the_map_names_every_file(package: str) -> None:
    module = importlib.import_module(f"trainmark.{package}")
    named = set(re.findall(r"\b(\w+\.py)\b", module.__doc__ or ""))
    present = {path.name for path in Path(str(module.__file__)).parent.glob("*.py")}
    assert len(named) > 5
    assert named == present - {"__init__.py"}
