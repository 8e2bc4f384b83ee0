"""Raw files as a dataset for a trained model: by the vocabularies of what it learned from."""

from pathlib import Path

from trainmark.clicklog.encode import encode
from trainmark.clicklog.engine import kept
from trainmark.clicklog.engine.summary import MANIFEST
from trainmark.config import SYNTHETIC, filled
from trainmark.errors import InputError
from trainmark.files import read_json
from trainmark.scoring import EncodedFiles, RawFiles
from trainmark.workloads.dlrm.runs import DlrmRun


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
    return encode_by(Path(data), raw, folder)


def encode_by(data: Path, raw: RawFiles, folder: Path) -> EncodedFiles:
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
    return EncodedFiles(
        folder=folder,
        kept=folder / kept.FILE if raw.keep else None,
        unknown_share=shares,
        bad_rows=facts["bad_rows"],
    )
