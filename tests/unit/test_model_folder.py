"""Folders that hold no model of Hugging Face's are named, whatever is wrong with them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trainmark.errors import InputError
from trainmark.workloads.distilbert import layouts
from trainmark.workloads.llama3 import huggingface


@pytest.mark.parametrize("read", [lambda f: layouts.read_model(f, 2), huggingface.read_model])
@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (None, "is not a Hugging Face model folder: it has no config.json"),
        ("{", "config.json cannot be read"),
        ("[1]", "config.json must hold a JSON object"),
    ],
)
def test_refused(
    read: Callable[[Path], Any], text: str | None, answer: str, tmp_path: Path
) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(InputError, match=answer):
        read(tmp_path)
