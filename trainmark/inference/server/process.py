"""The server's process: it listens, loads, answers, reloads, and ends when it is told to."""

import asyncio
import signal
import socket
import ssl
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import uvicorn

from trainmark.errors import InputError
from trainmark.inference.server.http_protocol import ENDING_S, ImpatientProtocol
from trainmark.inference.server.limits import Limits
from trainmark.inference.server.listening import (
    Listening,
    cannot_listen,
    drop_new_connections,
    listen,
)
from trainmark.inference.server.metrics import Metrics
from trainmark.inference.server.models import Models, Source
from trainmark.inference.server.web import build_app

MAX_CONNECTIONS = 1024
UNDER_WAY_S = 10
"""Seconds for requests that are under way when the server is told to end."""


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
        raise cannot_listen(listening.host, listening.grpc_port, "it is taken", "--grpc-port")
    await server.start()
    return server, port
