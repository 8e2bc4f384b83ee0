"""The bodies of HTTP requests: how much of them is held, for how long, and whether anyone waits."""

import asyncio
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from starlette.requests import Request

from trainmark.errors import InputError
from trainmark.inference.server.limits import (
    Limits,
    TooLargeError,
    TooSlowError,
    UnavailableError,
)

MAX_HELD_BYTES = 256 << 20
"""Of all bodies that have arrived, in whole or in part, and are not answered yet."""
ENCODINGS = {"gzip": 31, "deflate": 15}
"""Compressions, and zlib's numbers for them."""


class Bodies:
    """What all requests hold."""

    def __init__(self, limits: Limits) -> None:
        self.limits, self._held_bytes = limits, 0

    @asynccontextmanager
    async def of(self, request: Request) -> AsyncIterator[bytes]:
        """The body of a request, until it is answered."""
        held = Held(self)
        try:
            async with asyncio.timeout(self.limits.seconds):
                body = await _read(request, held, self.limits.body_bytes)
        except TimeoutError:
            held.release()
            raise TooSlowError(f"The body took longer than {self.limits.seconds:g} s.") from None
        except BaseException:
            held.release()
            raise
        try:
            yield body
        finally:
            held.release()

    def take(self, count: int) -> None:
        """Hold so many more bytes, or refuse to."""
        if self._held_bytes + count > MAX_HELD_BYTES:
            raise UnavailableError(
                "Too many requests are waiting. Send this one again in a moment."
            )
        self._held_bytes += count

    def give_back(self, count: int) -> None:
        self._held_bytes -= count


class Held:
    """What one request holds."""

    def __init__(self, bodies: Bodies) -> None:
        self._bodies, self._bytes = bodies, 0

    def take(self, count: int) -> None:
        self._bodies.take(count)
        self._bytes += count

    def release(self) -> None:
        self._bodies.give_back(self._bytes)
        self._bytes = 0


def has_left(request: Request) -> Callable[[], bool]:
    """Whether the client of a request has gone, without waiting for anything.

    uvicorn knows it, and its object has the method `receive`; Starlette's question costs a pass of
    the event loop.
    """
    connection = getattr(request.receive, "__self__", None)
    return lambda: bool(getattr(connection, "disconnected", False))


async def _read(request: Request, held: Held, most: int) -> bytes:
    size = int(request.headers.get("content-length", 0))
    body = bytearray()
    if size <= most:
        async for part in request.stream():
            held.take(len(part))
            body += part
            if len(body) > most:
                break
    if max(size, len(body)) > most:
        raise _too_large(max(size, len(body)), most)
    encoding = request.headers.get("content-encoding", "identity")
    if encoding == "identity":
        return bytes(body)
    plain = await asyncio.to_thread(_decompress, bytes(body), encoding, most)
    held.take(len(plain))
    return plain


def _decompress(body: bytes, encoding: str, most: int) -> bytes:
    if encoding not in ENCODINGS:
        known = " or ".join(ENCODINGS)
        raise InputError(f"The body has the encoding {encoding!r:.40}, expected {known}, or none.")
    reader = zlib.decompressobj(ENCODINGS[encoding])
    try:
        plain = reader.decompress(body, most + 1)
    except zlib.error as error:
        raise InputError(f"The body is not {encoding}: {error}.") from None
    if len(plain) > most:
        raise _too_large(len(plain), most)
    if not reader.eof or reader.unused_data:
        what = "goes on behind the end of" if reader.eof else "ends within"
        raise InputError(f"The body {what} its {encoding} data. Send all of it, and nothing else.")
    return plain


def _too_large(found: int, most: int) -> TooLargeError:
    return TooLargeError(
        f"The body has {found:,} bytes or more, expected at most {most:,}. Send fewer rows at a "
        "time."
    )
