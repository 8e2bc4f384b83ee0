"""The HTTP side of `trainmark serve`. It knows no workload: a `Scorer` reads and scores.

    POST /score      rows in, scores out
    GET  /model      what is served
    GET  /example    a body for /score
    GET  /health     whether it answers

Requests that arrive while the model is busy are scored together as soon as it is free: a lone
client waits for nobody, and many clients share the cost of a pass through the model.
"""

import asyncio
import gc
import json
import signal
import socket
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.requests import ClientDisconnect
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from trainmark.contract import Scorer
from trainmark.errors import InputError

MAX_BODY_BYTES = 16 << 20
MAX_ROWS = 16_384
"""Of one request."""
TOGETHER_BYTES = 1 << 20
"""Requests are scored together up to this size."""
MAX_CONNECTIONS = 1024
PATIENCE_S = 10
"""How long requests under way may take once the server is told to stop, and a connection until its
first request."""
BODY_S = 30
"""How long a body may take to arrive."""
GONE = "The client has left."
MAX_HELD_BYTES = 256 << 20
"""Of all bodies that have arrived, in whole or in part, and are not answered yet."""


# --- endpoints


def build_app(scorer: Scorer) -> FastAPI:
    """The web application."""
    app = FastAPI(title="trainmark serve", description=str(__doc__))
    queue, bodies = Queue(scorer), Bodies()

    @app.get("/")
    async def index() -> dict[str, Any]:
        endpoints = ["POST /score", "GET /model", "GET /example", "GET /health"]
        return {key: scorer.facts[key] for key in ("name", "requests")} | {"endpoints": endpoints}

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/model")
    async def model() -> dict[str, Any]:
        return scorer.facts

    @app.get("/example")
    async def example() -> dict[str, Any]:
        return scorer.example

    # Not a typed argument: to check large nested lists by a schema takes longer than to score them.
    content = {"application/json": {"schema": {"type": "object", "example": scorer.example}}}

    @app.post("/score", openapi_extra={"requestBody": {"required": True, "content": content}})
    async def score(request: Request) -> Response:
        held = Held(bodies)
        try:
            async with asyncio.timeout(BODY_S):
                body = await _body(request, held)
            answer = await queue.score(body, request)
        except TimeoutError:
            return JSONResponse({"detail": f"The body took longer than {BODY_S} s."}, 408)
        except ClientDisconnect:
            return JSONResponse({"detail": GONE}, 422)  # which nobody gets
        except InputError as error:
            return JSONResponse({"detail": str(error)}, getattr(error, "status", 422))
        finally:
            held.release()
        return Response(answer, media_type="application/json")

    return app


class TooLargeError(InputError):
    """A body that is not read to its end."""

    status = 413


class BusyError(InputError):
    """More bodies at once than are held."""

    status = 503


@dataclass
class Bodies:
    """What all requests hold."""

    held_bytes: int = 0


class Held:
    """What one request holds of it."""

    def __init__(self, bodies: Bodies) -> None:
        self._bodies, self._bytes = bodies, 0

    def take(self, count: int) -> None:
        if self._bodies.held_bytes + count > MAX_HELD_BYTES:
            raise BusyError("Too many requests are waiting. Send this one again in a moment.")
        self._bodies.held_bytes += count
        self._bytes += count

    def release(self) -> None:
        self._bodies.held_bytes -= self._bytes


async def _body(request: Request, held: Held) -> bytes:
    size = int(request.headers.get("content-length", 0))
    body = bytearray()
    if size <= MAX_BODY_BYTES:
        async for part in request.stream():
            held.take(len(part))
            body += part
            if len(body) > MAX_BODY_BYTES:
                break
    if max(size, len(body)) > MAX_BODY_BYTES:
        raise TooLargeError(
            f"The body has {max(size, len(body)):,} bytes or more, expected at most "
            f"{MAX_BODY_BYTES:,}. Send fewer rows at a time."
        )
    return bytes(body)


# --- scoring


class Queue:
    """Requests that wait for the model, which works in a thread of its own."""

    def __init__(self, scorer: Scorer) -> None:
        self._scorer = scorer
        self._waiting: deque[_Waiting] = deque()
        self._thread = ThreadPoolExecutor(1)
        self._task: asyncio.Task[None] | None = None

    async def score(self, body: bytes, request: Request | None = None) -> bytes:
        """The answer to a request; raises what is wrong with it."""
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Waiting(body, future, request))
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._work())
        return await future

    async def _work(self) -> None:
        loop = asyncio.get_running_loop()
        while self._waiting:
            taken = self._take()
            # All at once: an event loop with many clients takes its time for each question.
            gone = await asyncio.gather(*map(self._has_gone, taken))
            taken = [one for one, has_gone in zip(taken, gone, strict=True) if not has_gone]
            bodies = [one.body for one in taken]
            found = await loop.run_in_executor(self._thread, answers, self._scorer, bodies)
            for one, answer in zip(taken, found, strict=True):
                if one.future.done():  # the client has gone
                    continue
                if isinstance(answer, Exception):
                    one.future.set_exception(answer)
                else:
                    one.future.set_result(answer)

    async def _has_gone(self, one: "_Waiting") -> bool:
        """Whether nobody waits for the answer any longer: it is not worth a pass."""
        if one.request is None or not await one.request.is_disconnected():
            return False
        if not one.future.done():
            one.future.set_exception(InputError(GONE))
        return True

    def _take(self) -> list["_Waiting"]:
        taken = [self._waiting.popleft()]
        size = len(taken[0].body)
        while self._waiting and size + len(self._waiting[0].body) <= TOGETHER_BYTES:
            taken.append(self._waiting.popleft())
            size += len(taken[-1].body)
        return taken


@dataclass(frozen=True)
class _Waiting:
    body: bytes
    future: "asyncio.Future[bytes]"
    request: Request | None


def answers(scorer: Scorer, bodies: list[bytes]) -> list[bytes | Exception]:
    """To each request, its scores or what went wrong; all rows go through the model together."""
    requests = [_attempt(_read, scorer, body) for body in bodies]
    rows = [row for request in requests if isinstance(request, list) for row in request]
    try:
        scores = iter(scorer.score(rows) if rows else [])
    except Exception as error:  # whoever's fault it is
        if len(bodies) == 1:
            return [error]
        return [answer for body in bodies for answer in answers(scorer, [body])]
    return [
        _attempt(_to_json, scorer, list(islice(scores, len(request))))
        if isinstance(request, list)
        else request
        for request in requests
    ]


def _attempt(function: Any, *arguments: Any) -> Any:
    """What a function returns or raises: an error of one request is no other's."""
    try:
        return function(*arguments)
    except Exception as error:
        return error


def _read(scorer: Scorer, body: bytes) -> list[Any]:
    try:
        data = json.loads(body, parse_constant=NoNumber)
        if b"\\ud" in body.lower():  # an escape of half a character, perhaps without the other
            json.dumps(data, ensure_ascii=False, default=repr).encode()
    except (ValueError, RecursionError) as error:
        raise InputError(f"The body is not JSON: {error}.") from None
    if not isinstance(data, dict):
        raise InputError(f"The body is a {type(data).__name__}, expected a JSON object.")
    rows = scorer.read(data)
    if not rows:
        raise InputError("The request has no rows, expected at least one.")
    if len(rows) > MAX_ROWS:
        raise InputError(f"The request has {len(rows):,} rows, expected at most {MAX_ROWS:,}.")
    return rows


class NoNumber:
    """NaN or an infinity, which are no JSON: a value that no feature takes."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return self._name


def _to_json(scorer: Scorer, scores: list[Any]) -> bytes:
    return json.dumps({scorer.answer: scores}, allow_nan=False).encode()


# --- the server


def serve(scorer: Scorer, host: str, port: int) -> None:
    """Answer until Ctrl-C or SIGTERM; requests under way are finished."""
    listener = _listen(host, port)
    config = uvicorn.Config(
        build_app(scorer),
        log_level="warning",
        access_log=False,
        lifespan="off",
        limit_concurrency=MAX_CONNECTIONS,
        timeout_graceful_shutdown=PATIENCE_S,
        http=ImpatientProtocol,
    )
    # uvicorn stops by itself, then raises the signal once more for who had it before.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    gc.collect()
    gc.freeze()  # what is loaded stays: looking through it again and again delays requests by 0.2 s
    shown = f"[{host}]" if ":" in host else host
    chosen = f" ({scorer.facts['checkpoint']})" if "checkpoint" in scorer.facts else ""
    print(f"{scorer.facts['name']}{chosen}: {scorer.facts['requests']}")
    print(f"http://{shown}:{listener.getsockname()[1]} (Ctrl-C stops it)", flush=True)
    PatientServer(config).run(sockets=[listener])


class ImpatientProtocol(AutoHTTPProtocol):  # type: ignore[misc,valid-type]
    """Closes a connection whose first request does not come: others may want its place."""

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        asyncio.get_running_loop().call_later(PATIENCE_S, self._give_up)

    def _give_up(self) -> None:
        if self.cycle is None and not self.transport.is_closing():
            self.transport.close()


class PatientServer(uvicorn.Server):
    """A second signal does not break off the requests under way either."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._captured_signals.append(sig)
        self.should_exit = True


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family)
        # An answer is written in two pieces, of which the second must not wait for the client to
        # acknowledge the first. Connections inherit this.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listener
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(
            f"Cannot listen at {host}, port {port}: {reason}. Give another --port or --host."
        ) from None
