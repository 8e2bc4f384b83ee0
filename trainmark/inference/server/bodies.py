"""The bodies of HTTP requests: how much of them is held, for how long, and whether anyone waits."""

import asyncio
import zlib
from http import HTTPStatus

from trainmark.errors import InputError
from trainmark.inference.server.asgi import Request
from trainmark.inference.server.limits import Limits, RefusalError

MAX_HELD_BYTES = 256 << 20
"""Most bytes of all bodies that have arrived, in whole or in part, and are not answered yet."""
ENCODINGS = {"gzip": 31, "deflate": 15}
"""Compressions, and zlib's numbers for them."""


class Bodies:
    """What all requests hold."""

    def __init__(self, limits: Limits) -> None:
        self.limits, self._held_bytes = limits, 0

    def of(self, request: Request) -> "Held":
        """The body of a request, until it is answered."""
        return Held(self, request)

    def take(self, count: int) -> None:
        """Hold so many more bytes, or refuse to."""
        if self._held_bytes + count > MAX_HELD_BYTES:
            raise RefusalError(
                HTTPStatus.SERVICE_UNAVAILABLE,
                "Too many requests are waiting. Send this one again in a moment.",
            )
        self._held_bytes += count

    def give_back(self, count: int) -> None:
        self._held_bytes -= count


class Held:
    """What one request holds."""

    def __init__(self, bodies: Bodies, request: Request) -> None:
        self._bodies, self._request, self._bytes = bodies, request, 0

    async def __aenter__(self) -> bytes:
        limits = self._bodies.limits
        try:
            if self._request.has_come:
                return await _read(self._request, self, limits.body_bytes)
            async with asyncio.timeout(limits.seconds):
                return await _read(self._request, self, limits.body_bytes)
        except TimeoutError:
            self.release()
            sentence = f"The body took longer than {limits.seconds:g} s."
            raise RefusalError(HTTPStatus.REQUEST_TIMEOUT, sentence) from None
        except BaseException:
            self.release()
            raise

    async def __aexit__(self, *error: object) -> None:
        self.release()

    def take(self, count: int) -> None:
        self._bodies.take(count)
        self._bytes += count

    def release(self) -> None:
        self._bodies.give_back(self._bytes)
        self._bytes = 0


async def _read(request: Request, held: Held, most: int) -> bytes:
    size = int(request.header(b"content-length") or 0)
    if size > most:
        raise _too_large(size, most)
    parts, size, more = [], 0, True
    while more:
        part, more = await request.part()
        held.take(len(part))
        parts.append(part)
        size += len(part)
        if size > most:
            raise _too_large(size, most)
    body = b"".join(parts)
    encoding = (request.header(b"content-encoding") or b"identity").decode("latin-1")
    if encoding == "identity":
        return body
    plain = await asyncio.to_thread(_decompress, body, encoding, most)
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


def _too_large(found: int, most: int) -> RefusalError:
    return RefusalError(
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
        f"The body has {found:,} bytes or more, expected at most {most:,}. Send fewer rows at a "
        "time.",
    )
