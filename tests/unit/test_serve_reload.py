"""`trainmark serve` goes over to a newer model, and stops, without a lost or mixed answer."""

import json
import re
import shutil
import socket
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from tests.unit.served import process, served, train
from tests.waiting import PATIENCE_S, wait_until
from trainmark.cli import main
from trainmark.inference.server.batching import Loaded
from trainmark.inference.server.limits import Limits
from trainmark.inference.server.metrics import Metrics
from trainmark.inference.server.models import Model, Models, Source
from trainmark.scoring import TensorSpec

tritonclient = pytest.importorskip("tritonclient.http")
NAME = "dlrm-demo"
ROWS: dict[str, Any] = {
    "numerical": np.linspace(-1, 1, 40 * 13, dtype=np.float32).reshape(40, 13),
    "categorical": np.zeros((40, 26), np.int64),
}


@pytest.fixture(scope="module")
def versions(clicks: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints of two steps."""
    run = tmp_path_factory.mktemp("versions") / "run"
    flags = ("--checkpoint-every", "4 steps", "--lr", "2", "--schedule.warmup-steps", "0")
    train(clicks / "data", run, *flags)
    old, new = (expected(run, step) for step in steps_of(run))
    assert np.abs(old - new).max() > 1e-4  # they can be told apart
    return run


def steps_of(run: Path) -> list[str]:
    first, last = sorted(path.name for path in (run / "checkpoints").glob("step-*"))
    return [first, last]


def split_off(run: Path, folder: Path) -> tuple[Path, Path, Path]:
    """A copy of the run without its last checkpoint, where that is, and where it belongs."""
    copy = shutil.copytree(run, folder / "run")
    last = copy / "checkpoints" / steps_of(copy)[1]
    aside = folder / "aside"
    last.rename(aside)
    return copy, aside, last


def inputs() -> list[Any]:
    kinds = {"numerical": "FP32", "categorical": "INT64"}
    found = []
    for name, array in ROWS.items():
        found.append(tritonclient.InferInput(name, list(array.shape), kinds[name]))
        found[-1].set_data_from_numpy(array)
    return found


def expected(run: Path, step: str) -> Any:
    client = served(run, values="prepared", checkpoint=step)
    body = {name: array.tolist() for name, array in ROWS.items()}
    return np.array(client.post("/score", json=body).json()["scores"], np.float32)


def test_a_newer_checkpoint_without_a_lost_or_mixed_answer(versions: Path, tmp_path: Path) -> None:
    run, aside, place = split_off(versions, tmp_path)
    scores: dict[str, Any] = {}
    answers: Counter[str] = Counter()
    errors: list[BaseException] = []
    done = threading.Event()

    def ask() -> None:
        client = tritonclient.InferenceServerClient(address)
        try:
            while not done.is_set():
                answer = client.infer(NAME, inputs())
                version = answer.get_response()["model_version"]
                np.testing.assert_allclose(answer.as_numpy("clicks"), scores[version], atol=1e-6)
                answers[version] += 1
        except BaseException as error:
            errors.append(error)

    words = (str(run), "--values", "prepared", "--reload-every", "0.1")
    for step in steps_of(versions):
        scores[str(int(step.removeprefix("step-")))] = expected(versions, step)
    old, new = scores
    with process(*words) as (running, url, _):
        address = url.removeprefix("http://")
        threads = [threading.Thread(target=ask, daemon=True) for _ in range(4)]
        for thread in threads:
            thread.start()
        wait_until(lambda: answers[old] > 20 or errors)
        aside.rename(place)
        wait_until(lambda: answers[new] > 20 or errors)
        done.set()
        for thread in threads:
            thread.join(PATIENCE_S)
        assert errors == []
        running.terminate()
        assert running.wait(PATIENCE_S) == 0
        assert running.stdout is not None
        assert f"{NAME}: version {new} answers now" in running.stdout.read()


def test_a_newer_export(versions: Path, tmp_path: Path) -> None:
    """Written anew in its place; while it is away or broken, the old one stays."""
    from tests.unit.served import options_for
    from trainmark.inference import serving

    target = tmp_path / "exported"
    steps = steps_of(versions)

    def export(step: str) -> None:
        shutil.rmtree(target, ignore_errors=True)
        flags = ["--output", str(target), "--checkpoint", step]
        assert main(["export", str(versions), *flags]) == 0

    export(steps[0])
    metrics = Metrics()
    models = Models(serving.sources(options_for(target, values="prepared")), Limits(), metrics)
    models.load()
    model = models.first()

    def scores() -> Any:
        scorer = model.loaded().scorer
        return scorer.score([scorer.read_tensors(ROWS)])

    np.testing.assert_allclose(scores(), expected(versions, steps[0]), atol=1e-6)
    models.reload()
    assert model.loaded().version == "1"  # nothing is new
    shutil.rmtree(target)
    models.reload()
    np.testing.assert_allclose(scores(), expected(versions, steps[0]), atol=1e-6)
    export(steps[1])
    weights = next(target.glob("model*.safetensors"))
    good = weights.read_bytes()
    weights.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    models.reload()
    assert model.loaded().version == "1"
    weights.write_bytes(good)
    models.reload()
    assert model.loaded().version == "2"
    np.testing.assert_allclose(scores(), expected(versions, steps[1]), atol=1e-6)
    told = metrics.text().decode()
    assert 'trainmark_serve_loads_total{model="exported",outcome="failed"} 1.0' in told
    assert 'trainmark_serve_loads_total{model="exported",outcome="loaded"} 2.0' in told


def test_a_newer_model_that_refuses_what_clients_send_does_not_answer_them(
    clicks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Such as an export that was written where its vocabularies were not."""
    from tests.unit.served import options_for
    from trainmark.inference import serving

    target = tmp_path / "exported"
    assert main(["export", str(clicks / "run"), "--output", str(target)]) == 0
    models = Models(serving.sources(options_for(target)), Limits(), Metrics())
    models.load()
    shutil.rmtree(target / "preparation")
    (target / "checksums.json").unlink()
    models.reload()
    loaded = models.first().loaded()
    assert (loaded.version, loaded.scorer.facts["values"]) == ("1", "raw")
    told = capsys.readouterr().err
    assert "exported stays as it is: the newer one does not take the same requests." in told


class Constant:
    """Scores every row the same."""

    answer, output = "scores", TensorSpec(name="scores", datatype="FP32", shape=(-1,))

    def __init__(self, score: int) -> None:
        self.facts = {"name": "constant", "requests": "", "step": score}
        self.example: dict[str, Any] = {}
        self.inputs: Sequence[TensorSpec] = ()
        self._score = score

    def read(self, body: dict[str, Any]) -> list[Any]:
        return []

    def read_tensors(self, tensors: Any) -> list[Any]:
        return []

    def score(self, requests: Any) -> Any:
        return np.full(sum(map(len, requests)), self._score)


def test_what_cannot_be_loaded_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    newest = 1

    def load(newest: int) -> Constant:
        if newest == 2:
            raise KeyError("weights")
        return Constant(newest)

    models = Models([Source(name="c", newest=lambda: newest, load=load)], Limits(), Metrics())
    models.load()
    newest = 2
    for _ in range(3):
        models.reload()
    assert models.first().loaded().version == "1"
    assert capsys.readouterr().err == "c stays as it is: KeyError('weights')\n"
    newest = 3
    models.reload()
    assert models.first().loaded().version == "3"


def test_a_pass_is_by_one_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if a new one comes between reading and scoring."""
    import asyncio

    from trainmark.inference.server.batching import Question

    newest = 1
    source = Source(name="c", newest=lambda: newest, load=Constant)
    model = Model(source, Limits(), Metrics())
    model.refresh()

    def read(loaded: Loaded) -> list[int]:
        nonlocal newest
        newest = 2
        assert model.refresh()
        return [0, 0]

    def write(loaded: Loaded, scores: Any) -> tuple[str, list[int]]:
        return loaded.version, scores.tolist()

    first = Question(size=1, read=read, write=write)
    second = Question(size=1, read=lambda loaded: [0], write=write)

    async def ask() -> list[Any]:
        return list(await asyncio.gather(model.answer(first), model.answer(second)))

    assert asyncio.run(ask()) == [("1", [1, 1]), ("1", [1])]
    assert model.loaded().version == "2"


# --- the end


def test_a_request_under_way_is_answered_before_the_end(clicks: Path) -> None:
    with process(str(clicks / "run")) as (running, url, _):
        host, _, port = url.removeprefix("http://").partition(":")
        with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as client:
            client.sendall(b"GET /example HTTP/1.1\r\nHost: x\r\n\r\n")
            body = _body(client)
            asked = f"Host: x\r\nExpect: 100-continue\r\nContent-Length: {len(body)}"
            client.sendall(f"POST /score HTTP/1.1\r\n{asked}\r\n\r\n".encode())
            assert client.recv(4096).startswith(b"HTTP/1.1 100")  # the request is under way
            running.terminate()
            wait_until(lambda: not _listens(psutil.Process(running.pid)))
            client.sendall(body)
            (score,) = json.loads(_body(client))["scores"]
        assert 0 < score < 1
        assert running.wait(PATIENCE_S) == 0


def _listens(server: psutil.Process) -> bool:
    return any(one.status == psutil.CONN_LISTEN for one in server.net_connections("tcp"))


def _body(client: socket.socket) -> bytes:
    received = b""
    while b"\r\n\r\n" not in received:
        received += client.recv(65536)
    head, _, body = received.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200"), head
    length = int(re.findall(rb"content-length: (\d+)", head.lower())[0])
    while len(body) < length:
        body += client.recv(65536)
    return body
