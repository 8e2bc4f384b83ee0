"""Raw files for a trained model: encoded by the vocabularies of what it learned from, and scored.

A trainer scores what `encode_files` wrote. `score_files` needs none: for an exported model, which
carries what encodes its features, and for a run that a CPU computes in one pass.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from trainmark import checksums
from trainmark.clicklog.encode import encode
from trainmark.clicklog.engine import kept, summary
from trainmark.clicklog.engine.summary import MANIFEST
from trainmark.clicklog.preparation import FOLDER
from trainmark.config import SYNTHETIC, filled
from trainmark.errors import InputError
from trainmark.files import read_json
from trainmark.scoring import EncodedFiles, RawFiles, ScoredRows, Served
from trainmark.workloads.dlrm import one_pass, serving
from trainmark.workloads.dlrm.description import description
from trainmark.workloads.dlrm.requests import Clicks
from trainmark.workloads.dlrm.resolve import check_data
from trainmark.workloads.dlrm.rows import SplitBinary
from trainmark.workloads.dlrm.runs import DlrmRun

BATCH = 1 << 14
PART_ROWS = 1 << 18


def encode_files(cfg: DlrmRun, raw: RawFiles, folder: Path) -> EncodedFiles:
    """Encode raw files as the run's dataset was, into `folder`."""
    data = filled(cfg.data)
    if data == SYNTHETIC or not Path(data).is_dir():
        where = "It was made in memory."
        if data != SYNTHETIC:
            where = f"{data} is not there now; an export of the run carries them for predict."
        raise InputError(
            f"--input needs the vocabularies of the dataset that the run was trained on. {where}"
        )
    check_data(cfg, data)  # before hours of encoding
    return _encode_by(Path(data), raw, folder)


def _encode_by(data: Path, raw: RawFiles, folder: Path) -> EncodedFiles:
    """Encode raw files as the dataset `data` was, of which the vocabularies and settings do."""
    encode(
        raw.patterns,
        data,
        folder,
        bad_rows=raw.bad_rows,
        labelled=raw.labelled,
        keep=raw.keep,
        memory=raw.memory,
    )
    facts = read_json(folder / MANIFEST)
    shares = {name: feature["rare_share"] for name, feature in facts["features"].items()}
    if warning := summary.unknown_warning(shares, summary.rare_shares(data / MANIFEST)):
        summary.warn(warning)
    return EncodedFiles(
        folder=folder,
        kept=folder / kept.FILE if raw.keep else None,
        unknown_share=shares,
        bad_rows=facts["bad_rows"],
    )


def score_files(
    served: Served[DlrmRun], raw: RawFiles, folder: Path, done: int
) -> Iterator[ScoredRows] | None:
    """See `contract.Definition.score_files`."""
    if served.run is None:
        weights = serving.of_export(served.folder)  # refuses other formats before hours of encoding
        config = serving.described(served.folder)
        encoded = _encoded_by_export(served.folder, raw, folder / "data")
        serving.check_same_tables(served.folder / FOLDER, encoded.folder, config)
    else:
        config = description(served.run)
        weights = serving.of_checkpoint(filled(served.checkpoint))
        if served.device != "cpu" or not one_pass.suits(config, weights.kinds):
            return None
        encoded = encode_files(served.run, raw, folder / "data")
    return _scores(serving.clicks_of(config, weights, served.device), encoded, done)


def _encoded_by_export(exported: Path, raw: RawFiles, folder: Path) -> EncodedFiles:
    data = exported / FOLDER
    if not data.is_dir():
        raise InputError(
            f"{exported} does not carry the vocabularies that encode raw values: its dataset "
            "had none, or was not there. Export the run again where its dataset is, or use the run."
        )
    checksums.check(exported)
    return _encode_by(data, raw, folder)


def _scores(clicks: Clicks, encoded: EncodedFiles, done: int) -> Iterator[ScoredRows]:
    source = SplitBinary(encoded.folder, "test")
    source.check_bytes()
    for start in range(done, source.num_rows, PART_ROWS):
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
    rows = source.kind.room(stop - start)
    source.read(start, stop, rows)
    columns = [column.reshape(len(column), -1) for column in rows.ids]
    none = np.empty((len(rows.numerical), 0), "i8")  # a model of numbers alone has no other
    ids = np.concatenate([none, *columns], 1, dtype="i8")
    return clicks(rows.numerical.astype(np.float32), ids)
