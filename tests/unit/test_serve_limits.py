"""What a server does with clients that are slow, silent, gone, or too many at once."""

import asyncio
import json
import signal
import socket
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("fastapi")
import uvicorn

from tests.unit.served import TestClient
from trainmark.inference import server

WAIT_S = 60


class Doubler:
    """Numbers in, twice the numbers out."""

    answer = "doubled"
    facts = {"name": "doubler", "requests": "Numbers."}  # noqa: RUF012
    example: dict[str, Any] = {"numbers": [1]}  # noqa: RUF012

    def __init__(self) -> None:
        self.calls: list[list[Any]] = []

    def read(self, body: dict[str, Any]) -> list[Any]:
        numbers: list[Any] = body["numbers"]
        return numbers

    def score(self, rows: list[Any]) -> list[Any]:
        self.calls.append(rows)
        return [2 * row for row in rows]


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, int]]:
    """A server that loses its patience quickly."""
    monkeypatch.setattr(server, "PATIENCE_S", 0.2)
    monkeypatch.setattr(server, "BODY_S", 0.2)
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(
        server.build_app(Doubler()),
        http=server.ImpatientProtocol,
        lifespan="off",
        log_level="error",
    )
    running = uvicorn.Server(config)
    thread = threading.Thread(target=running.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    yield listener.getsockname()
    running.should_exit = True
    thread.join(WAIT_S)


def _answer(address: tuple[str, int], sent: bytes) -> bytes:
    """All that comes back until the server closes the connection."""
    with socket.create_connection(address, timeout=WAIT_S) as client:
        client.sendall(sent)
        received = b""
        while part := client.recv(4096):
            received += part
        return received


@pytest.mark.parametrize("sent", [b"", b"POST /score HT", b"POST /score HTTP/1.1\r\nHost: x\r\n"])
def test_a_connection_without_a_request_is_closed(address: tuple[str, int], sent: bytes) -> None:
    assert _answer(address, sent) == b""


def test_a_body_that_does_not_come_is_not_waited_for(address: tuple[str, int]) -> None:
    head = b"POST /score HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 100\r\n\r\n"
    answer = _answer(address, head + b'{"numbers": [')
    assert answer.startswith(b"HTTP/1.1 408")


def test_bodies_of_all_requests_together_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    client = TestClient(server.build_app(Doubler()))
    body = json.dumps({"numbers": [1, 2, 3]})
    monkeypatch.setattr(server, "MAX_HELD_BYTES", len(body))
    for _ in range(3):  # what was answered is held no longer
        assert client.post("/score", content=body).json() == {"doubled": [2, 4, 6]}
    monkeypatch.setattr(server, "MAX_HELD_BYTES", len(body) - 1)
    answer = client.post("/score", content=body)
    assert answer.status_code == 503
    assert "again in a moment" in answer.json()["detail"]


def test_requests_whose_clients_have_left_are_not_scored() -> None:
    scorer = Doubler()

    def request(gone: bool) -> Any:
        async def is_disconnected() -> bool:
            return gone

        return SimpleNamespace(is_disconnected=is_disconnected)

    async def ask() -> list[Any]:
        queue = server.Queue(scorer)
        bodies = [json.dumps({"numbers": [n]}).encode() for n in range(3)]
        asked = [queue.score(b, request(gone=n == 1)) for n, b in enumerate(bodies)]
        return await asyncio.gather(*asked, return_exceptions=True)

    first, left, last = asyncio.run(ask())
    assert [json.loads(first), json.loads(last)] == [{"doubled": [0]}, {"doubled": [4]}]
    assert "has left" in str(left)
    assert [row for call in scorer.calls for row in call] == [0, 2]


def test_all_clients_are_asked_at_once_whether_they_have_left() -> None:
    """One after the other, each question waits for a pass of the event loop, with all its work."""
    clients = 50

    async def ask() -> list[Any]:
        queue, all_asked = server.Queue(Doubler()), asyncio.Barrier(clients)

        async def is_disconnected() -> bool:
            await all_asked.wait()
            return False

        request: Any = SimpleNamespace(is_disconnected=is_disconnected)
        asked = [
            queue.score(json.dumps({"numbers": [n]}).encode(), request) for n in range(clients)
        ]
        async with asyncio.timeout(WAIT_S):
            return await asyncio.gather(*asked)

    assert [json.loads(answer)["doubled"][0] for answer in asyncio.run(ask())] == [
        2 * n for n in range(clients)
    ]


def test_a_client_that_leaves_in_its_body_is_no_error() -> None:
    async def receive() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        pass

    scope = {
        "type": "http", "method": "POST", "path": "/score", "raw_path": b"/score",
        "query_string": b"", "headers": [(b"content-length", b"9")], "http_version": "1.1",
    }  # fmt: skip
    app: Any = server.build_app(Doubler())
    asyncio.run(app(scope, receive, send))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_breaks_off_nothing(number: int) -> None:
    running = server.PatientServer(uvicorn.Config(server.build_app(Doubler())))
    for _ in range(2):
        running.handle_exit(number, None)
    assert running.should_exit
    assert not running.force_exit
