"""What a server does with clients that are slow, silent, gone, or too many at once."""

import asyncio
import gzip
import importlib
import inspect
import json
import signal
import socket
import threading
from collections.abc import Awaitable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from tests.unit.served import Doubler, Stuck, app_of, client_of, numbers, queue_of, source_of
from tests.waiting import PATIENCE_S
from trainmark.inference.server import asgi, batching, bodies, http_protocol, process
from trainmark.inference.server.limits import Limits

uvicorn = pytest.importorskip("uvicorn")


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, int]]:
    """A server that loses its patience quickly, but only with bodies."""
    monkeypatch.setattr(http_protocol, "HEAD_S", PATIENCE_S)
    monkeypatch.setattr(asgi, "REST_OF_BODY_S", PATIENCE_S)
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(
        app_of(source_of(Doubler()), limits=Limits(seconds=0.2)),
        http=http_protocol.ImpatientProtocol,
        lifespan="off",
        log_level="error",
    )
    running = uvicorn.Server(config)
    thread = threading.Thread(target=running.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    yield listener.getsockname()
    running.should_exit = True
    thread.join(PATIENCE_S)


def _answer(address: tuple[str, int], sent: bytes) -> bytes:
    """All that comes back until the server closes the connection."""
    with socket.create_connection(address, timeout=PATIENCE_S) as client:
        client.sendall(sent)
        received = b""
        while part := client.recv(4096):
            received += part
        return received


def _connection(app: Any) -> tuple[http_protocol.ImpatientProtocol, Mock]:
    """As uvicorn opens one, and what stands for its socket."""
    config = uvicorn.Config(app, lifespan="off")
    config.load()
    protocol = http_protocol.ImpatientProtocol(config, uvicorn.server.ServerState(), {})
    transport = Mock()
    transport.get_extra_info.return_value = None
    transport.is_closing.return_value = False
    protocol.connection_made(transport)
    return protocol, transport


@pytest.mark.parametrize("sent", [b"", b"POST /score HT", b"POST /score HTTP/1.1\r\nHost: x\r\n"])
def test_a_connection_without_a_request_is_closed(
    monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    assert _closed_after(sent, monkeypatch) == []


@pytest.mark.parametrize("sent", [b"GET /hea", b"\r\n"])
def test_patience_is_that_of_every_request(monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    asked = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    (answer,) = _closed_after(sent, monkeypatch, asked)
    assert answer.startswith(b"HTTP/1.1 200")


def _closed_after(sent: bytes, monkeypatch: pytest.MonkeyPatch, *asked: bytes) -> list[bytes]:
    """All that was written until a server without patience closed the connection."""
    monkeypatch.setattr(http_protocol, "HEAD_S", 0.01)

    async def written() -> list[bytes]:
        protocol, transport = _connection(app_of(source_of(Doubler())))
        for request in asked:
            protocol.data_received(request)
            while not protocol.cycle.response_complete:
                await asyncio.sleep(0.01)
        if sent:
            protocol.data_received(sent)
        while not transport.close.called:
            await asyncio.sleep(0.01)
        return [call.args[0] for call in transport.write.call_args_list]

    return asyncio.run(asyncio.wait_for(written(), PATIENCE_S))


def test_a_head_without_an_end_is_not_held() -> None:
    begin = [b"POST /score HTTP/1.1\r\nContent-Length: 1000000\r\nLong: "]
    rest = [b"a" * 30_000] * 3

    async def written(pieces: list[bytes]) -> list[bytes]:
        protocol, transport = _connection(app_of(source_of(Doubler())))
        for piece in pieces:
            protocol.data_received(piece)
        assert transport.close.called == transport.write.called
        return [call.args[0] for call in transport.write.call_args_list]

    (refusal,) = asyncio.run(written([*begin, *rest]))
    assert refusal.startswith(b"HTTP/1.1 400")
    assert b"at most 65536 bytes" in refusal
    assert asyncio.run(written([*begin, b"\r\n\r\n", *rest])) == []  # a body may be long


def test_a_body_that_does_not_come_is_not_waited_for(address: tuple[str, int]) -> None:
    head = b"POST /score HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 100\r\n\r\n"
    answer = _answer(address, head + b'{"numbers": [')
    assert answer.startswith(b"HTTP/1.1 408")


@pytest.mark.parametrize(("path", "status"), [(b"/score", 408), (b"/nowhere", 404)])
def test_who_goes_on_sending_after_the_answer_keeps_no_place(
    monkeypatch: pytest.MonkeyPatch, path: bytes, status: int
) -> None:
    """Its next byte would stop uvicorn's clock for connections that are kept alive."""
    monkeypatch.setattr(asgi, "REST_OF_BODY_S", 0.01)

    async def answer() -> bytes:
        app = app_of(source_of(Doubler()), limits=Limits(seconds=0.01))
        protocol, transport = _connection(app)
        protocol.data_received(b"POST %b HTTP/1.1\r\nContent-Length: 100\r\n\r\n{" % path)
        while not protocol.cycle.response_complete:
            await asyncio.sleep(0.01)
        protocol.data_received(b" ")
        assert transport.close.called
        return b"".join(call.args[0] for call in transport.write.call_args_list)

    answered = asyncio.run(asyncio.wait_for(answer(), PATIENCE_S))
    assert answered.startswith(b"HTTP/1.1 %d" % status)
    assert b"connection: close" in answered


def test_a_request_that_meets_the_end_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three open connections, one brings a request just before the server is told to end, and
    one just after."""
    monkeypatch.setattr(http_protocol, "ENDING_S", 0.01)

    async def end() -> list[Mock]:
        connections = [_connection(app_of(source_of(Doubler()))) for _ in range(3)]
        (before, _), (after, _), (_, idle) = connections
        request = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
        before.data_received(request)
        for protocol, _ in connections:
            protocol.shutdown()
        after.data_received(request)
        assert not idle.close.called
        while not all(transport.close.called for _, transport in connections):
            await asyncio.sleep(0.01)
        return [transport for _, transport in connections]

    *asked, idle = asyncio.run(asyncio.wait_for(end(), PATIENCE_S))
    for transport in asked:
        (answer,) = [call.args[0] for call in transport.write.call_args_list]
        assert answer.startswith(b"HTTP/1.1 200")
        assert b"connection: close" in answer
    assert not idle.write.called


def test_an_answer_reaches_a_client_that_is_still_sending(address: tuple[str, int]) -> None:
    """Were the connection closed before its body has come, the answer would be lost with it."""
    size = 40 << 20
    head = f"POST /score HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {size}\r\n\r\n"
    answer = _answer(address, head.encode() + bytes(size))
    assert answer.startswith(b"HTTP/1.1 413")
    assert answer.endswith(b'Send fewer rows at a time."}')


def test_bodies_of_all_requests_together_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    client = client_of(source_of(Doubler()))
    body = json.dumps({"numbers": [1, 2, 3]})
    monkeypatch.setattr(bodies, "MAX_HELD_BYTES", len(body))
    for _ in range(3):  # what was answered is held no longer
        assert client.post("/score", content=body).json() == {"doubled": [2, 4, 6]}
    monkeypatch.setattr(bodies, "MAX_HELD_BYTES", len(body) - 1)
    answer = client.post("/score", content=body)
    assert answer.status_code == 503
    assert "again in a moment" in answer.json()["detail"]


def test_requests_whose_clients_have_left_are_not_scored() -> None:
    scorer = Doubler()

    async def ask() -> list[Any]:
        queue = queue_of(scorer)
        asked = [queue.answer(numbers(n, has_left=n == 1)) for n in range(3)]
        return await asyncio.gather(*asked, return_exceptions=True)

    first, left, last = asyncio.run(ask())
    assert [json.loads(first), json.loads(last)] == [{"doubled": [0]}, {"doubled": [4]}]
    assert "has left" in str(left)
    assert [row for call in scorer.calls for row in call] == [0, 2]


def test_a_client_that_closes_its_connection_has_left() -> None:
    """By uvicorn's own knowledge, which costs no question to the event loop."""
    connection = SimpleNamespace(disconnected=False, more_body=True)
    receive: Any = type(connection).__init__.__get__(connection)
    request = asgi.Request({"path": "/score", "headers": []}, receive)
    assert not request.has_left()
    assert not request.has_come
    connection.disconnected, connection.more_body = True, False
    assert request.has_left()
    assert request.has_come
    for name in ("h11_impl", "httptools_impl"):
        protocol = importlib.import_module(f"uvicorn.protocols.http.{name}")
        made = inspect.getsource(protocol.RequestResponseCycle.__init__)
        assert "self.disconnected = " in made
        assert "self.more_body = " in made


def test_quick_passes_are_made_in_the_event_loop_and_others_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is up to twice as large as what was quick; a slow one sends its size to the thread."""
    clock: Any = SimpleNamespace(now_s=0.0, perf_counter=lambda: clock.now_s)
    monkeypatch.setattr(batching, "time", clock)
    in_loop: list[bool] = []

    class Measured(Doubler):
        def score(self, requests: Sequence[Any]) -> Any:
            in_loop.append(threading.current_thread() is threading.main_thread())
            clock.now_s += -1 in requests[0]
            return super().score(requests)

    asked = [7, 7, 123456789.0123456789, 7, -1, -1, 7, 7]

    async def ask() -> list[Any]:
        queue = queue_of(Measured())
        return [json.loads(await queue.answer(numbers(number))) for number in asked]

    assert asyncio.run(ask()) == [{"doubled": [2 * number]} for number in asked]
    assert in_loop == [False, True, False, True, True, False, False, True]


def test_the_event_loop_takes_so_many_requests_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as are quick together; the others wait for the next turn, not for a thread."""
    monkeypatch.setattr(batching, "QUICK_S", PATIENCE_S)
    scorer = Doubler()

    async def ask() -> list[Any]:
        queue = queue_of(scorer)
        await queue.answer(numbers(5))
        asked = [queue.answer(numbers(number)) for number in range(8)]
        return await asyncio.gather(*asked)

    assert [json.loads(answer)["doubled"][0] for answer in asyncio.run(ask())] == [
        2 * number for number in range(8)
    ]
    assert [len(call) for call in scorer.calls] == [1, 2, 4, 2]


def test_a_model_that_raises_what_no_future_takes_answers_the_next_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In its thread, the first time, and in the event loop."""
    monkeypatch.setattr(batching, "QUICK_S", PATIENCE_S)

    class Ending(Doubler):
        def score(self, requests: Sequence[Any]) -> Any:
            if -1 in requests[0]:
                raise StopIteration
            return super().score(requests)

    async def ask() -> list[Any]:
        queue = queue_of(Ending(), Limits(seconds=PATIENCE_S))
        asked = [queue.answer(numbers(number)) for number in (-1, 7, -1, 7)]
        return [await asyncio.wait_for(_outcome(one), PATIENCE_S) for one in asked]

    found = asyncio.run(ask())
    assert [str(error) for error in found[::2]] == ["the model raised StopIteration"] * 2
    assert [json.loads(answer) for answer in found[1::2]] == [{"doubled": [14]}] * 2


async def _outcome(asked: Awaitable[Any]) -> Any:
    try:
        return await asked
    except Exception as error:
        return error


def test_more_requests_than_may_wait_are_sent_away() -> None:
    scorer = Stuck()

    async def ask() -> list[Any]:
        queue = queue_of(scorer, Limits(waiting=2))
        first = asyncio.create_task(queue.answer(numbers(0)))
        await asyncio.to_thread(scorer.working.wait, PATIENCE_S)
        others = [asyncio.create_task(queue.answer(numbers(n))) for n in range(1, 5)]
        await asyncio.sleep(0)
        scorer.go_on.set()
        return await asyncio.gather(first, *others, return_exceptions=True)

    *answered, third, fourth = asyncio.run(ask())
    assert [json.loads(answer)["doubled"] for answer in answered] == [[0], [2], [4]]
    assert [third.status, fourth.status] == [429, 429]


def test_an_answer_that_takes_too_long_is_given_up() -> None:
    scorer = Stuck()

    async def ask() -> list[Any]:
        queue = queue_of(scorer, Limits(seconds=0.05))
        asked = [asyncio.create_task(queue.answer(numbers(n))) for n in range(3)]
        found = await asyncio.gather(*asked, return_exceptions=True)
        scorer.go_on.set()
        return found

    found = asyncio.run(ask())
    assert [error.status for error in found] == [504] * 3
    assert "longer than 0.05 s" in str(found[0])


def test_statuses_over_http() -> None:
    client = client_of(source_of(Doubler()), limits=Limits(rows=2))
    assert client.post("/score", json={"numbers": [1, 2, 3]}).status_code == 413
    packed = gzip.compress(json.dumps({"numbers": [4]}).encode())
    answer = client.post("/score", content=packed, headers={"Content-Encoding": "gzip"})
    assert answer.json() == {"doubled": [8]}
    for damaged, part in [(packed[:-8], "ends within"), (packed + b"x", "goes on behind")]:
        answer = client.post("/score", content=damaged, headers={"Content-Encoding": "gzip"})
        assert answer.status_code == 422
        assert part in answer.json()["detail"]
    bomb = gzip.compress(bytes(40 << 20))
    answer = client.post("/score", content=bomb, headers={"Content-Encoding": "gzip"})
    assert answer.status_code == 413
    for encoding in ("gzip", "br"):
        answer = client.post("/score", content=b"xyz", headers={"Content-Encoding": encoding})
        assert answer.status_code == 422


def test_paths_and_methods() -> None:
    client = client_of(source_of(Doubler()))
    assert client.get("/v2/models/doubler/ready/").status_code == 200
    assert client.head("/v2/health/live").status_code == 200
    for method, path, status in [
        ("GET", "/score", 405),
        ("POST", "/models", 405),
        ("GET", "/scores", 404),
        ("GET", "/models//example", 404),
        ("GET", "/v2/models/doubler/more/than/there/is", 404),
    ]:
        answer = client.request(method, path)
        assert answer.status_code == status
        assert list(answer.json()) == ["error" if path.startswith("/v2") else "detail"]


def test_a_client_that_leaves_in_its_body_is_no_error() -> None:
    async def receive() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        pass

    scope = {
        "type": "http", "method": "POST", "path": "/score", "raw_path": b"/score",
        "query_string": b"", "headers": [(b"content-length", b"9")], "http_version": "1.1",
    }  # fmt: skip
    app = app_of(source_of(Doubler()))
    asyncio.run(app(scope, receive, send))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_breaks_off_nothing(number: int) -> None:
    running = process.PatientServer(uvicorn.Config(app_of(source_of(Doubler()))))
    for _ in range(2):
        running.handle_exit(number, None)
    assert running.should_exit
    assert not running.force_exit


def test_grpc_takes_no_calls_while_http_finishes(monkeypatch: pytest.MonkeyPatch) -> None:
    async def end() -> None:
        stopped = asyncio.Event()

        class Calls:
            async def stop(self, grace: float) -> None:
                stopped.set()

        async def finish(server: Any, sockets: Any) -> None:
            await asyncio.wait_for(stopped.wait(), PATIENCE_S)

        monkeypatch.setattr(uvicorn.Server, "shutdown", finish)
        await process.PatientServer(
            uvicorn.Config(app_of(source_of(Doubler()))), Calls()
        ).shutdown()

    asyncio.run(end())
