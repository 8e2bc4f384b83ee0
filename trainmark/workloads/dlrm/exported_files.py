"""Scores rows of raw files with an exported DLRM, which carries the vocabularies to encode them."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from trainmark import checksums
from trainmark.clicklog.engine import kept
from trainmark.clicklog.preparation import FOLDER
from trainmark.errors import InputError
from trainmark.scoring import RawFiles, ScoredRows, Served
from trainmark.workloads.dlrm import serving
from trainmark.workloads.dlrm.raw_files import encode_by
from trainmark.workloads.dlrm.requests import Clicks, clicks_of
from trainmark.workloads.dlrm.rows import Columns, SplitBinary
from trainmark.workloads.dlrm.runs import DlrmRun

BATCH = 1 << 14
PART_ROWS = 1 << 18


def score_files(
    served: Served[DlrmRun], raw: RawFiles, folder: Path, done: int
) -> Iterator[ScoredRows]:
    """See `contract.Definition.score_files`."""
    data = served.folder / FOLDER
    if not data.is_dir():
        raise InputError(
            f"{served.folder} does not carry the vocabularies that encode raw values: its dataset "
            "had none, or was not there. Export the run again where its dataset is, or use the run."
        )
    checksums.check(served.folder)
    encoded = encode_by(data, raw, folder / "data")
    device = torch.device(served.device)
    clicks = clicks_of(serving.of_export(served.folder, served.device), device)
    source = SplitBinary(encoded.folder, "test")
    source.check_bytes()
    for start in range(done * PART_ROWS, source.num_rows, PART_ROWS):
        stop = min(start + PART_ROWS, source.num_rows)
        scores = [
            _score(clicks, source, first, min(first + BATCH, stop))
            for first in range(start, stop, BATCH)
        ]
        yield ScoredRows(
            answers={"score": np.concatenate(scores)},
            kept=kept.rows(encoded.kept, start, stop) if encoded.kept else None,
            share=stop / source.num_rows,
        )


def _score(clicks: Clicks, source: SplitBinary, start: int, stop: int) -> np.ndarray:
    rows = Columns.empty(stop - start, source)
    source.read(start, stop, rows)
    ids = np.concatenate([column.reshape(len(column), -1) for column in rows.ids], 1, dtype="i8")
    return clicks(rows.numerical.astype(np.float32), ids)
