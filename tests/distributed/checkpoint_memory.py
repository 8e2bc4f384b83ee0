"""How much memory a rank needs beside the parts of a table that it holds, to save and to load them.

Chunks are made small here, so that a table of some megabytes is a large one.
"""

import ctypes
import gc
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from torch import Tensor

from tests.checkpoint_tensors import save_checkpoint
from trainmark.checkpoint import checkpoints, folders
from trainmark.checkpoint import data_files as checkpoint_files
from trainmark.checkpoint import writer as checkpoint_writer
from trainmark.checkpoint.local_shards import LocalShards
from trainmark.workloads.dlrm.step import DlrmTrainer

ROWS = 400_001  # 12 MiB
CHUNK_BYTES = 2**18
KINDS = ("table_wise", "row_wise", "column_wise")


def check(build: Callable[[str], DlrmTrainer], folder: Path) -> None:
    """Save from every sharding, and load into every one.

    Args:
        build: from a sharding to what trains a table of `ROWS` on this rank.
        folder: for the checkpoints of all ranks.
    """
    gc.freeze()  # what there is by now need not be looked through each time
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint_writer, "CHUNK_BYTES", CHUNK_BYTES)
        for source in KINDS:
            built = build(source)
            with _needs_little_more(f"saving {source}"):
                save_checkpoint(folder / source, 1, built.weights(), {}, keep=1)
        for target in KINDS:
            built = build(target)
            for source in KINDS:
                _load(built, folder / source, f"loading {source} into {target}")


def _load(built: DlrmTrainer, saved: Path, what: str) -> None:
    path, parts = folders.latest(saved), _parts(built)
    assert path is not None
    for part in parts:
        part.zero_()
    with _needs_little_more(what):
        checkpoints.load(path, built.weights(), exact=True)
    assert all(part[-1].all() for part in parts), what


def _parts(built: DlrmTrainer) -> list[Tensor]:
    held: list[object] = list(built.weights().values())
    return [shard.tensor for one in held if isinstance(one, LocalShards) for shard in one.shards]


@contextmanager
def _needs_little_more(what: str) -> Iterator[None]:
    """Chunks pass through the memory of a few workers, 1 MiB in all; threads bring some more."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # else what is free already would not be counted
    Path("/proc/self/clear_refs").write_text("5")  # the peak is now
    before = _status("VmRSS")
    yield
    growth, most = _status("VmHWM") - before, 4 * checkpoint_files.WORKERS * CHUNK_BYTES
    assert growth < most, f"{what} took {growth / 2**20:.1f} MiB beside the rank's own parts"


def _status(name: str) -> int:
    """Bytes, by the kernel's account of this process."""
    found = re.search(rf"^{name}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.M)
    assert found is not None
    return int(found[1]) * 1024
