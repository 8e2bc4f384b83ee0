"""Small token datasets in Megatron's format."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainmark.corpus.indexed import write_index


def write_tokens(prefix: Path, documents: Iterable[NDArray[Any]], dtype: np.dtype[Any]) -> None:
    """One sequence a document."""
    arrays = [np.ascontiguousarray(document, dtype) for document in documents]
    prefix.with_name(f"{prefix.name}.bin").write_bytes(b"".join(a.tobytes() for a in arrays))
    lengths = np.array([len(a) for a in arrays], np.int64)
    with open(prefix.with_name(f"{prefix.name}.idx"), "wb") as file:
        write_index(file, dtype, lengths, range(len(lengths) + 1))
