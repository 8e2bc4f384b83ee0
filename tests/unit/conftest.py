"""What several files of unit tests share."""

from pathlib import Path

import pytest

from tests.small import train
from trainmark.checkpoint import writer as checkpoint_writer


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An undisturbed run of 8 steps, with everything that a run can write."""
    output = tmp_path_factory.mktemp("runs") / "small"
    assert train(output, "--tensorboard", "--log-every", "3") == 0
    return output


@pytest.fixture(scope="session")
def clicks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `data` in Criteo's format, and with `run`, which was trained on it."""
    from tests.unit.served import train_on_clicks

    return train_on_clicks(tmp_path_factory.mktemp("clicks"))


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> int:
    """The most bytes of a checkpoint's chunk, so that a small tensor has many."""
    monkeypatch.setattr(checkpoint_writer, "CHUNK_BYTES", 128)
    return 128
