"""`trainmark serve`: bad requests are told why, many are answered at once, and it stops."""

import asyncio
import json
import re
import shlex
import shutil
import signal
import socket
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests import small, small_distilbert
from tests.docs.commands import ROOT
from tests.unit.refusals import refused
from tests.unit.served import (
    Doubler,
    Stuck,
    TestClient,
    assert_refused,
    client_of,
    numbers,
    process,
    question,
    queue_of,
    served,
    source_of,
)
from tests.waiting import PATIENCE_S
from trainmark import workloads
from trainmark.cli import main
from trainmark.config import to_plain
from trainmark.errors import InputError
from trainmark.inference import serving
from trainmark.inference.server import batching
from trainmark.inference.server.limits import Limits

# --- bad requests


def changed(**changes: Any) -> dict[str, Any]:
    """A good row of the example's form, but for some of its features."""
    row = {f"I{i}": 1 for i in range(1, 14)} | {f"C{i}": "0a" for i in range(1, 27)}
    return {"rows": [row, row | changes]}


def without(name: str) -> dict[str, Any]:
    body = changed()
    body["rows"][1] = {key: value for key, value in body["rows"][1].items() if key != name}
    return body


@pytest.mark.parametrize(
    ("body", "parts"),
    [
        (changed(I3=1.5), ["Row 1: I3 is 1.5, expected a whole number"]),
        (changed(C7="xyz"), ["Row 1: C7 is 'xyz', expected up to 8 hexadecimal digits"]),
        (changed(C7=7), ["Row 1: C7 is 7,"]),
        (changed(C_7="0a"), ["Row 1: Unknown feature 'C_7'. Did you mean 'C7'?"]),
        (without("C20"), ["Row 1 has no 'C20'", "39 features", "null"]),
        ({"rows": [[1]]}, ["Row 0 is a list, expected an object"]),
        ({"rows": {}}, ["'rows' is a dict, expected a list"]),
        ({"rows": []}, ["no rows"]),
        ({}, ["The body has nothing; expected 'rows', or 'numerical' and 'categorical'"]),
        ({"rows": [], "columns": []}, ["'rows', 'columns'; expected"]),
        ({"numerical": [[1] * 13], "categorical": [["a"] * 25]}, ["Row 0", "25 values", "26"]),
        ({"numerical": [[1] * 13], "categorical": [["a"] * 26] * 2}, ["1 rows", "has 2"]),
        ({"categorical": [["a"] * 26]}, ["Row 0: 'numerical' has 0 values", "13"]),
        ({"numerical": [1], "categorical": [["a"] * 26]}, ["Row 0: 'numerical' has a int"]),
        ({"numerical": 1, "categorical": 2}, ["'numerical' is a int, expected a list of rows"]),
    ],
)
def test_bad_rows(clicks_client: TestClient, body: dict[str, Any], parts: list[str]) -> None:
    assert_refused(clicks_client.post("/score", json=body), *parts)


@pytest.fixture(scope="module")
def clicks_client(clicks: Path) -> TestClient:
    return served(clicks / "run")


@pytest.mark.parametrize(
    ("body", "parts"),
    [
        (b"", ["not JSON"]),
        (b"{", ["not JSON", "line 1 column 2"]),
        (b"\xff", ["not JSON"]),
        (b"[1]", ["is a list, expected a JSON object"]),
        (b"[" * 100_000, ["not JSON"]),
        (b'{"rows": ' + b"9" * 5000 + b"}", ["not JSON"]),
        (json.dumps(changed(I1=float("nan"))).encode(), ["Row 1: I1 is NaN, expected"]),
        (json.dumps(changed(C1=float("-inf"))).encode(), ["Row 1: C1 is -Infinity, expected"]),
        (json.dumps(changed(C1="\ud83d")).encode(), ["surrogates"]),
    ],
)
def test_bad_bodies(clicks_client: TestClient, body: bytes, parts: list[str]) -> None:
    assert_refused(clicks_client.post("/score", content=body), *parts)


@pytest.mark.parametrize(
    ("feature", "value", "parts"),
    [
        ("cat_1.bin", 7, ["Row 1: cat_1.bin is 7, expected a whole number from 0 to 6"]),
        ("cat_1.bin", -1, ["cat_1.bin is -1"]),
        ("cat_1.bin", 1.0, ["cat_1.bin is 1.0"]),
        ("cat_1.bin", "1", ["cat_1.bin is '1'"]),
        ("cat_1.bin", None, ["cat_1.bin is null"]),
        ("cat_1.bin", [1], ["cat_1.bin is [1]"]),
        ("cat_1.bin", 2**70, [f"cat_1.bin is {2**70}"]),
        ("num_12", "a", ["Row 1: num_12 is 'a', expected a finite number"]),
        ("num_12", None, ["num_12 is null"]),
        ("num_12", 1e300, ["num_12 is 1e+300"]),
        ("num_12", float("nan"), ["num_12 is NaN"]),
    ],
)
def test_bad_prepared_values(finished: Path, feature: str, value: Any, parts: list[str]) -> None:
    client = served(finished)
    body = client.get("/example").json()
    body["rows"] = [body["rows"][0], body["rows"][0] | {feature: value}]
    assert_refused(client.post("/score", content=json.dumps(body)), *parts)


def test_limits(clicks: Path) -> None:
    body = changed()
    client = served(clicks / "run", limits=Limits(rows=2, body_mib=1))
    assert client.post("/score", json=body).status_code == 200
    answer = client.post("/score", json={"rows": body["rows"] * 2})
    assert answer.status_code == 413
    assert "4 rows, expected at most 2" in answer.json()["detail"]
    text = json.dumps(body).encode() + b" " * (1 << 20)
    in_pieces = (text[start : start + 2**16] for start in range(0, len(text), 2**16))
    for content in (text, in_pieces):  # with a Content-Length, and without
        answer = client.post("/score", content=content)
        assert answer.status_code == 413
        assert "Send fewer rows" in answer.json()["detail"]


# --- several requests at once


def asked(scorer: Stuck, bodies: list[Any]) -> list[Any]:
    """Answers, or exceptions, to requests of which all but the first wait for it."""

    async def ask() -> list[Any]:
        queue = queue_of(scorer)
        sent = [question(body) for body in bodies]
        first = asyncio.create_task(queue.answer(sent[0]))
        await asyncio.to_thread(scorer.working.wait, PATIENCE_S)
        others = [asyncio.create_task(queue.answer(one)) for one in sent[1:]]
        await asyncio.sleep(0)  # in which all of them are queued
        scorer.go_on.set()
        return await asyncio.gather(first, *others, return_exceptions=True)

    return [
        json.loads(answer)["doubled"] if isinstance(answer, bytes) else answer
        for answer in asyncio.run(ask())
    ]


def test_requests_that_wait_are_scored_together_and_answered_apart() -> None:
    scorer = Stuck()
    bodies = [{"numbers": [n, n + 100]} for n in range(9)]
    answers = asked(scorer, [*bodies, {"none": 0}, {"numbers": [19]}])
    assert answers[:9] == [[2 * n, 2 * n + 200] for n in range(9)]
    assert isinstance(answers[9], InputError)
    assert "not finite" in str(answers[10])
    assert [len(call) for call in scorer.calls] == [2, 17]


@pytest.mark.parametrize(("bad", "error"), [(13, InputError), (17, RuntimeError)])
def test_one_bad_request_is_no_other_clients_business(bad: int, error: type[Exception]) -> None:
    scorer = Stuck()
    answers = asked(scorer, [{"numbers": [n]} for n in (1, 2, bad, 3)])
    assert [answers[0], answers[1], answers[3]] == [[2], [4], [6]]
    assert isinstance(answers[2], error)
    assert scorer.calls == [[1], [2, bad, 3], [2], [bad], [3]]


def test_a_client_that_leaves_keeps_nobody_waiting() -> None:
    scorer = Stuck()

    async def ask() -> list[Any]:
        queue = queue_of(scorer)
        tasks = [asyncio.create_task(queue.answer(numbers(n))) for n in range(4)]
        await asyncio.to_thread(scorer.working.wait, PATIENCE_S)
        tasks[1].cancel()
        await asyncio.sleep(0)
        scorer.go_on.set()
        found = asyncio.gather(*tasks, return_exceptions=True)
        return await asyncio.wait_for(found, PATIENCE_S)

    answers = asyncio.run(ask())
    assert isinstance(answers.pop(1), asyncio.CancelledError)
    assert [json.loads(answer)["doubled"] for answer in answers] == [[0], [4], [6]]


def test_large_requests_are_not_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batching, "TOGETHER_BYTES", 60)
    scorer = Stuck()
    sizes = (1, 30, 2, 1)
    answers = asked(scorer, [{"numbers": [5] * size} for size in sizes])
    assert answers == [[10] * size for size in sizes]
    assert [len(call) for call in scorer.calls] == [1, 30, 3]


def test_a_bug_is_no_fault_of_the_client() -> None:
    client = client_of(source_of(Doubler()))
    assert client.post("/score", json={"numbers": [17]}).status_code == 500
    assert client.post("/score", json={"numbers": [2]}).json() == {"doubled": [4]}


# --- the page


def test_the_page_says_how_to_ask(clicks_client: TestClient) -> None:
    """Its curl lines are answered, in their order, and its table has all endpoints."""
    page = (ROOT / "docs" / "inference.md").read_text().partition("## Serving")[2]
    lines = [shlex.split(line, comments=True) for line in re.findall(r"^curl .*", page, re.M)]
    assert len(lines) == 3
    saved: dict[str, bytes] = {}
    for words in lines:
        (url,) = [word for word in words if word.startswith("localhost:8000/")]
        path = url.removeprefix("localhost:8000")
        if "-d" in words:
            sent = saved[words[words.index("-d") + 1].removeprefix("@")]
            answer = clicks_client.post(path, content=sent)
        else:
            answer = clicks_client.get(path)
        assert answer.status_code == 200, words
        if ">" in words:
            saved[words[words.index(">") + 1]] = answer.content
    named = set(re.findall(r"`((?:GET|POST) /\S*)`", page))
    assert named == set(clicks_client.get("/").json()["endpoints"])


# --- the verb

SERVE = ["serve", "--port", "0"]  # the usual one may be taken


def test_what_cannot_be_served(
    clicks: Path, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(clicks / "run")
    refused(capsys, [*SERVE, str(tmp_path)], "holds no model", "trainmark export")
    refused(capsys, [*SERVE, run, "--device", "gpu"], "--device", lines=None)
    refused(capsys, [*SERVE, run, "--data", str(tmp_path / "gone")], "is not here", "--values")
    other = small.write_dataset(tmp_path / "other")
    shutil.copytree(clicks / "data" / "vocabulary", other / "vocabulary")
    shutil.copy(clicks / "data" / "prepare.json", other)
    refused(capsys, [*SERVE, run, "--data", str(other)], "not what the model was trained on")
    empty = tmp_path / "empty"
    shutil.copytree(clicks / "run", empty, ignore=shutil.ignore_patterns("checkpoints"))
    refused(capsys, [*SERVE, str(empty)], "no complete checkpoint")
    if not torch.cuda.is_available():
        refused(capsys, [*SERVE, run, "--device", "cuda"], "finds no CUDA device")
    onnx = tmp_path / "onnx"
    onnx.mkdir()
    (onnx / "config.json").write_text('{"model_type": "dlrm", "numerical_features": 0, '
                                      '"table_rows": [1]}')  # fmt: skip
    refused(capsys, [*SERVE, str(onnx)], "holds no model*.safetensors", "--format safetensors")


def test_a_language_model_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    of_run = to_plain(workloads.named_run("llama3-demo"))
    for described in (of_run, {"model_type": "llama"}):
        (tmp_path / "config.json").write_text(json.dumps(described))
        refused(capsys, [*SERVE, str(tmp_path)], "llama3", "no model to score rows with")


def test_sentences_without_a_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    flags = ("--output", str(run), "--max-steps", "1")
    assert main(["train", "distilbert-demo", *small_distilbert.FLAGS, *flags]) == 0
    refused(capsys, [*SERVE, str(run)], "has no tokenizer", "tokenizer.json or vocab.txt")
    refused(capsys, [*SERVE, str(run), "--values", "raw"], "are for a DLRM")


def test_a_model_that_does_not_fit(
    finished: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=1000))
    arguments = [*SERVE, str(finished), "--device", "cpu"]
    refused(capsys, arguments, "The model takes", "this machine has 1000 bytes free")


def test_an_encoder_is_no_classifier(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    described = {"model_type": "distilbert", "architectures": ["DistilBertModel"]}
    (tmp_path / "config.json").write_text(json.dumps(described))
    refused(capsys, [*SERVE, str(tmp_path)], "no trained sentence classifier", "DistilBertModel")


def test_without_the_extra(
    finished: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "PACKAGES", ("uvicorn", "no_such_package"))
    said = refused(capsys, [*SERVE, str(finished)], "pip install 'trainmark[serve]'")
    assert "needs no_such_package:" in said


@pytest.mark.parametrize("port", ["taken", "70000"])
def test_a_port_that_cannot_be_had(
    finished: Path, port: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        number = str(listener.getsockname()[1]) if port == "taken" else port
        refused(capsys, ["serve", str(finished), "--port", number], number, "another --port")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_server_process_answers_and_stops(clicks: Path, number: int) -> None:
    with process(str(clicks / "run")) as (running, url, lines):
        assert len(lines) == 2
        with urllib.request.urlopen(f"{url}/example", timeout=PATIENCE_S) as answer:
            body = answer.read()
        with urllib.request.urlopen(f"{url}/score", data=body, timeout=PATIENCE_S) as answer:
            (score,) = json.load(answer)["scores"]
        assert 0 < score < 1
        running.send_signal(number)
        assert running.wait(PATIENCE_S) == 0
        assert running.stderr is not None
        assert running.stderr.read() == ""


def test_no_connection_that_was_opened_is_reset_at_the_end(clicks: Path) -> None:
    """Of clients that open one for every request, until the server refuses them."""

    def ask(address: tuple[str, int]) -> int:
        answered = 0
        while True:
            try:
                client = socket.create_connection(address, timeout=PATIENCE_S)
            except ConnectionRefusedError:
                return answered
            with client:  # what goes wrong from here on is an answer that was lost
                client.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
                assert client.recv(4096).startswith(b"HTTP/1.1 200")
            answered += 1

    with process(str(clicks / "run")) as (running, url, _), ThreadPoolExecutor(8) as threads:
        host, port = url.removeprefix("http://").split(":")
        asked = [threads.submit(ask, (host, int(port))) for _ in range(8)]
        urllib.request.urlopen(f"{url}/health", timeout=PATIENCE_S).close()
        running.send_signal(signal.SIGTERM)
        assert running.wait(PATIENCE_S) == 0
        assert all(one.result(PATIENCE_S) for one in asked)
