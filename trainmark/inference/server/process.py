"""The server's process: it listens, loads, answers, reloads, and ends when it is told to."""

import asyncio
import ctypes
import signal
import socket
import ssl
import struct
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from trainmark.errors import InputError
from trainmark.inference.server.limits import Limits
from trainmark.inference.server.metrics import Metrics
from trainmark.inference.server.models import Models, Source
from trainmark.inference.server.web import build_app

MAX_CONNECTIONS = 1024
HEAD_S = 10
"""Seconds for a request's head, from the opening of its connection or its first byte to its end."""
UNDER_WAY_S = 10
"""Seconds for requests that are under way when the server is told to end."""
ENDING_S = 0.25
"""Seconds for what is on its way when the server is told to end: a connection that is being opened,
and a request over an open one."""
MAX_HEAD_BYTES = 64 << 10
"""Largest head of a request, not counting what arrived first."""
SO_ATTACH_FILTER = 26
"""A socket option of Linux that Python has no name for."""
DROP_SYN = (
    (0x30, 0, 0, 13),  # load the flags of the TCP header
    (0x45, 0, 1, 0x02),  # SYN? else skip one
    (0x06, 0, 0, 0),  # drop
    (0x06, 0, 0, 0xFFFFFFFF),  # keep the whole packet
)
"""A filter of packets (BPF): code, steps if true, steps if false, operand."""


@dataclass(frozen=True, kw_only=True)
class Listening:
    """Where a server listens, and to whom."""

    host: str = "127.0.0.1"
    port: int = 0
    grpc_port: int | None = None
    api_keys: tuple[bytes, ...] = ()
    certificate: Path | None = None
    """PEM file with the certificate and its chain."""
    private_key: Path | None = None

    @property
    def scheme(self) -> str:
        return "https" if self.certificate else "http"

    def address(self, port: int) -> str:
        return f"[{self.host}]:{port}" if ":" in self.host else f"{self.host}:{port}"


def serve(
    sources: Sequence[Source], listening: Listening, limits: Limits, reload_every_s: float | None
) -> None:
    """Answer until Ctrl-C or SIGTERM; requests under way are finished."""
    metrics = Metrics()
    models = Models(sources, limits, metrics)
    listener = listen(listening.host, listening.port)
    app = build_app(models, limits, metrics, listening.api_keys)
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        lifespan="off",
        ws="none",
        proxy_headers=False,
        server_header=False,
        limit_concurrency=MAX_CONNECTIONS,
        timeout_graceful_shutdown=UNDER_WAY_S,
        http=ImpatientProtocol,
        ssl_certfile=listening.certificate,
        ssl_keyfile=listening.private_key,
    )
    _load_certificate(config)

    async def run() -> None:
        calls = await _start_calls(models, limits, metrics, listening)
        server = PatientServer(config, calls[0] if calls else None)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        loading = asyncio.create_task(_in_a_thread(models.load))
        await asyncio.wait([serving, loading], return_when=asyncio.FIRST_COMPLETED)
        if loading.done() and loading.exception() is None:
            _announce(models, listening, listener.getsockname()[1], calls)
            watching = asyncio.create_task(_watch(models, reload_every_s))
            await serving
            watching.cancel()
        else:
            server.should_exit = True
            await serving
        if loading.done():
            loading.result()  # raises what was in the way of it

    with _signals_kept(), asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
        runner.run(run())


@contextmanager
def _signals_kept() -> Iterator[None]:
    """uvicorn stops by itself, then raises the signal once more for who had it before: nobody."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, lambda *_: None) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _announce(models: Models, listening: Listening, port: int, calls: Any) -> None:
    for model in models.all():
        facts = model.loaded().scorer.facts
        chosen = f" ({facts['checkpoint']})" if "checkpoint" in facts else ""
        print(f"{model.name}{chosen}: {facts['requests']}")
    if calls is not None:
        print(f"gRPC at {listening.address(calls[1])}")
    print(f"{listening.scheme}://{listening.address(port)} (Ctrl-C stops it)", flush=True)


async def _in_a_thread(work: Callable[[], None]) -> None:
    """Run `work` in a thread; its errors are raised here. A process that ends does not wait."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def tell(error: BaseException | None) -> None:
        if not done.done():
            done.set_result(None) if error is None else done.set_exception(error)

    def guarded() -> None:
        error: BaseException | None = None
        try:
            work()
        except BaseException as raised:
            error = raised
        if not loop.is_closed():
            loop.call_soon_threadsafe(tell, error)

    threading.Thread(target=guarded, daemon=True, name="loading").start()
    await done


async def _watch(models: Models, every_s: float | None) -> None:
    while every_s is not None:
        await asyncio.sleep(every_s)
        await _in_a_thread(models.reload)


# --- HTTP


class JoinedWrites:
    """A transport that sends in one piece what is written in one turn of the event loop: an
    answer's head and its body."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop, self._held = transport, loop, b""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if not self._held:
            self._loop.call_soon(self._send)
        self._held += data

    def close(self) -> None:
        self._send()
        self._transport.close()

    def _send(self) -> None:
        held, self._held = self._held, b""
        if held:
            self._transport.write(held)


class ImpatientProtocol(HttpToolsProtocol):
    """Closes a connection whose request's head does not come, or does not end: others may want its
    place."""

    _head_bytes = 0
    _in_head = _in_body = _had_head = _is_ending = False
    _waiting: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(JoinedWrites(transport, self.loop))  # type: ignore[arg-type]
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        was_in_body, self._had_head = self._in_body, False
        self._head_bytes += len(data)
        super().data_received(data)
        # Most heads come as a whole; line ends before a request begin none.
        if self._in_head or not (was_in_body or self._had_head):
            self._wait_for_head()
        if self._waiting is not None and self._head_bytes > MAX_HEAD_BYTES:
            self.send_400_response(f"A request's head has at most {MAX_HEAD_BYTES} bytes.")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_bytes, self._in_head = 0, True

    def on_headers_complete(self) -> None:
        self._in_head, self._in_body, self._had_head = False, True, True
        self._stop_waiting()
        super().on_headers_complete()
        if self._is_ending:
            self.cycle.keep_alive = False

    def on_message_complete(self) -> None:
        self._in_body = False
        super().on_message_complete()

    def shutdown(self) -> None:
        """No connection is closed in the face of a request that was sent before anyone could know
        of the end, and has not been read yet."""
        self._is_ending = True
        if self.cycle is None or self.cycle.response_complete:
            self.loop.call_later(ENDING_S, super().shutdown)
        else:
            super().shutdown()  # at once: the answer is to say that its connection ends

    def _wait_for_head(self) -> None:
        if self._waiting is None:
            self._waiting = self.loop.call_later(HEAD_S, self._give_up)

    def _stop_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None

    def _give_up(self) -> None:
        self._waiting = None
        if self.cycle is not None and not self.cycle.response_complete:
            self._wait_for_head()  # the request before is still being answered
        else:
            self.transport.close()


class PatientServer(uvicorn.Server):
    """A second signal does not break off the requests under way either.

    Args:
        calls: the server of gRPC, which ends with this one.
    """

    def __init__(self, config: uvicorn.Config, calls: Any = None) -> None:
        super().__init__(config)
        self._calls = calls

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        async with asyncio.TaskGroup() as both:  # neither takes more while the other finishes
            both.create_task(self._shutdown_http(sockets or []))
            if self._calls is not None:
                both.create_task(self._calls.stop(UNDER_WAY_S))

    async def _shutdown_http(self, listeners: list[socket.socket]) -> None:
        """A listener that is closed resets the connections that wait for it: no more may come,
        and those that are there are taken, before it is."""
        for listener in listeners if sys.platform == "linux" else []:
            drop_new_connections(listener)
        for _ in range(2):  # between them the event loop looks at its sockets, however late it is
            await asyncio.sleep(ENDING_S / 2)
        await super().shutdown(listeners)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._captured_signals.append(sig)
        self.should_exit = True


def drop_new_connections(listener: socket.socket) -> None:
    """Ignore new clients. Their systems try again after a second, and are refused, or accepted by
    whatever listens then. Connections that are half open still open."""
    steps = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in DROP_SYN))
    program = struct.pack("HP", len(DROP_SYN), ctypes.addressof(steps))
    # Where there are no filters, one that connects in the very moment of closing may be reset.
    with suppress(OSError):
        listener.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, program)


def listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family)
        # The end of an answer must not wait for the client to acknowledge what came before.
        # Connections inherit this.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listener
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error).rstrip(".")
        raise _cannot_listen(host, port, reason, "--port") from None


def _cannot_listen(host: str, port: int, reason: Any, flag: str) -> InputError:
    return InputError(
        f"Cannot listen at {host}, port {port}: {reason}. Give another {flag} or --host."
    )


def _load_certificate(config: uvicorn.Config) -> None:
    try:
        config.load()
    except (OSError, ssl.SSLError) as error:
        raise InputError(
            f"--tls-certificate {config.ssl_certfile} and --tls-key {config.ssl_keyfile} cannot be "
            f"used: {error}. Expected PEM files that belong together."
        ) from None


# --- gRPC


async def _start_calls(
    models: Models, limits: Limits, metrics: Metrics, listening: Listening
) -> tuple[Any, int] | None:
    """The server of the v2 protocol over gRPC, and its port."""
    if listening.grpc_port is None:
        return None
    import grpc

    from trainmark.inference.server import rpc

    server = rpc.build_server(models, limits, metrics, listening.api_keys)
    address = listening.address(listening.grpc_port)
    try:
        if listening.certificate and listening.private_key:
            pair = (listening.private_key.read_bytes(), listening.certificate.read_bytes())
            port = server.add_secure_port(address, grpc.ssl_server_credentials([pair]))
        else:
            port = server.add_insecure_port(address)
    except RuntimeError:
        port = 0
    if not port:
        raise _cannot_listen(listening.host, listening.grpc_port, "it is taken", "--grpc-port")
    await server.start()
    return server, port
