"""Connections over HTTP: how long they may take, and how their answers are sent."""

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_S = 10
"""Seconds for a request's head, from the opening of its connection or its first byte to its end."""
ENDING_S = 0.25
"""Seconds for what is on its way when the server is told to end: a connection that is being opened,
and a request over an open one."""
MAX_HEAD_BYTES = 64 << 10
"""Largest head of a request, not counting what arrived first."""


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
