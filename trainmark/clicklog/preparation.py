"""A dataset without its rows: the vocabularies, transforms and columns that encode raw values.

An exported model carries them in a folder of its own, which `raw_values.open_dataset` and `encode`
take for the dataset.
"""

import os
import shutil
from pathlib import Path

from trainmark import checksums
from trainmark.clicklog.engine.job import VOCABULARY
from trainmark.clicklog.engine.summary import MANIFEST

FOLDER = "preparation"
"""In that of an exported model."""


def carry(dataset: Path, to: Path) -> bool:
    """Copy what encodes raw values to the new folder `to`; False, and no folder, if there is none.

    Vocabularies, which may be large, are linked where the disk is the same.
    """
    vocabularies = dataset / VOCABULARY
    if not (vocabularies / "vocabulary.json").is_file():
        return False
    (to / VOCABULARY).mkdir(parents=True)
    for path in vocabularies.iterdir():
        _link(checksums.check_file(path.absolute()), to / VOCABULARY / path.name)
    for name in (MANIFEST, "feature_spec.yaml"):
        shutil.copyfile(dataset / name, to / name)
    return True


def _link(source: Path, to: Path) -> None:
    try:
        os.link(source.resolve(), to)
    except OSError:  # another disk, or a file system without links
        shutil.copyfile(source, to)
