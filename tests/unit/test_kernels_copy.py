"""Rows copied between tables and lists, in Triton's interpreter, against plain indexing."""

import pytest

from tests.embedding_kernels import check_copies, interpreted


@interpreted
@pytest.mark.parametrize("dim", [None, 1, 24, 128, 512])
def test_copies_of_rows(dim: int | None) -> None:
    check_copies(dim, "cpu", "cpu")
