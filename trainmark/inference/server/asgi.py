"""HTTP requests and answers as uvicorn hands them over (ASGI), and which function answers which.

There is no framework in between: its layers would take longer than a small model does.
"""

import asyncio
import contextlib
import re
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import pydantic_core

from trainmark.errors import InputError
from trainmark.inference.server.limits import LeftError, RefusalError

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

REST_OF_BODY_S = 10.0
"""Seconds for the rest of a body whose request has been answered."""


class Request:
    """A request's head; its body is still to come."""

    def __init__(self, scope: Mapping[str, Any], receive: Receive) -> None:
        self.path: str = scope["path"]
        self.named: Mapping[str, str] = {}
        """Parts of the path, by the names that the route gives them."""
        self._receive, self._has_ended = receive, False
        self._headers: dict[bytes, bytes] = dict(scope["headers"])

    def header(self, name: bytes) -> bytes | None:
        """The value of a header, by its name in lower case."""
        return self._headers.get(name)

    async def part(self) -> tuple[bytes, bool]:
        """The next part of the body, and whether there are more."""
        message = await self._receive()
        if message["type"] == "http.disconnect":
            raise LeftError
        self._has_ended = not message.get("more_body", False)
        return message.get("body", b""), not self._has_ended

    async def let_pass(self) -> None:
        """The rest of the body, which nobody reads.

        Who is still sending it would lose the answer with the connection, if that were closed now.
        """
        with contextlib.suppress(TimeoutError, LeftError):
            async with asyncio.timeout(REST_OF_BODY_S):
                while not self._has_ended:
                    await self.part()

    # uvicorn's object that has the method `receive` knows more than ASGI has questions for.

    @property
    def has_come(self) -> bool:
        """Whether all of the body is here."""
        return self._has_ended or not getattr(
            getattr(self._receive, "__self__", None), "more_body", True
        )

    def has_left(self) -> bool:
        """Whether the client has gone, without waiting for anything."""
        return bool(getattr(getattr(self._receive, "__self__", None), "disconnected", False))


@dataclass(frozen=True)
class Answer:
    """The answer to a request."""

    body: bytes
    status: int = 200
    media_type: bytes = b"application/json"
    headers: Mapping[bytes, bytes] = field(default_factory=dict)


def as_json(value: Any, status: int = 200, headers: Mapping[bytes, bytes] | None = None) -> Answer:
    return Answer(pydantic_core.to_json(value), status, headers=headers or {})


@dataclass(frozen=True)
class Route:
    """Requests that a function answers."""

    path: str
    """Parts of it may be `{names}`, which match anything."""
    endpoint: Callable[[Request], Awaitable[Answer]]
    method: str = "GET"


class App:
    """What uvicorn calls for every request.

    Args:
        routes: the first whose path fits is taken.
        check: raises what speaks against any answer.
        refused: the answer where an `InputError` was raised.
    """

    def __init__(
        self,
        routes: Sequence[Route],
        check: Callable[[Request], None],
        refused: Callable[[Request, InputError], Answer],
    ) -> None:
        self._check, self._refused = check, refused
        self._routes = [
            (re.compile(re.sub(r"{(\w+)}", r"(?P<\1>[^/]+)", route.path)), route)
            for route in routes
        ]

    async def __call__(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        try:
            self._check(request)
            answer = await self._route(request, scope["method"]).endpoint(request)
        except InputError as error:
            answer = self._refused(request, error)
        headers = [
            (b"content-length", str(len(answer.body)).encode()),
            (b"content-type", answer.media_type),
            *answer.headers.items(),
        ]
        if not request.has_come:  # uvicorn has no timeout for a body that outlasts its answer
            headers.append((b"connection", b"close"))
        start = {"type": "http.response.start", "status": answer.status, "headers": headers}
        await send(start)
        body = {"type": "http.response.body", "body": answer.body}
        if not request.has_come and answer.status != HTTPStatus.REQUEST_TIMEOUT:
            await send(body | {"more_body": True})
            await request.let_pass()
            body["body"] = b""
        await send(body)

    def _route(self, request: Request, method: str) -> Route:
        """What answers a request, whose parts get their names."""
        path = request.path.rstrip("/") or "/"
        for pattern, route in self._routes:
            if found := pattern.fullmatch(path):
                if method not in (route.method, "HEAD" if route.method == "GET" else ""):
                    sentence = f"{path!r:.80} takes {route.method}, not {method:.20}."
                    raise RefusalError(HTTPStatus.METHOD_NOT_ALLOWED, sentence)
                request.named = found.groupdict()
                return route
        raise RefusalError(HTTPStatus.NOT_FOUND, f"There is no {request.path!r:.80}.")
