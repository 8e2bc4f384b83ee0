"""The endpoints over HTTP. They know no workload: a `Scorer` reads and scores.

POST /score, /models/NAME/score        rows in, scores out
GET  /model, /models/NAME              what is served
GET  /example, /models/NAME/example    a body for /score
GET  /models                           their names
GET  /health                           whether it answers
GET  /metrics                          for Prometheus
...  /v2/...                           the KServe v2 protocol (`v2_web.py`)
"""

from collections.abc import Awaitable, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from trainmark.errors import InputError
from trainmark.inference.server import keys, own_form, v2_web
from trainmark.inference.server.batching import GONE
from trainmark.inference.server.bodies import Bodies, has_left
from trainmark.inference.server.limits import Limits, NotFoundError, status_of
from trainmark.inference.server.metrics import Metrics
from trainmark.inference.server.models import Model, Models

OPEN = {"/health", "/v2/health/live", "/v2/health/ready"}
"""What is told to anyone: whoever starts and stops servers has no key."""


def build_app(
    models: Models, limits: Limits, metrics: Metrics, api_keys: tuple[bytes, ...] = ()
) -> Starlette:
    """The web application."""
    bodies = Bodies(limits)

    def of(request: Request) -> Model:
        name = request.path_params.get("name")
        return models.first() if name is None else models.named(name)

    async def index(request: Request) -> Response:
        facts = models.first().loaded().scorer.facts
        told = {key: facts[key] for key in ("name", "requests")}
        return JSONResponse(told | {"endpoints": endpoints})

    async def health(request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def names(request: Request) -> Response:
        return JSONResponse({"models": [model.name for model in models.all()]})

    async def model(request: Request) -> Response:
        return JSONResponse(of(request).loaded().scorer.facts)

    async def example(request: Request) -> Response:
        return JSONResponse(of(request).loaded().scorer.example)

    async def score(request: Request) -> Response:
        chosen = of(request)
        with metrics.request(chosen.name, "json"):
            async with bodies.of(request) as body:
                answer = await chosen.answer(own_form.question(body, has_left(request)))
        return Response(answer, media_type="application/json")

    async def tell_metrics(request: Request) -> Response:
        return Response(metrics.text(), media_type="text/plain; version=0.0.4")

    routes = [
        Route("/score", score, methods=["POST"]),
        *v2_web.routes(models, bodies, metrics),
        Route("/models/{name}/score", score, methods=["POST"]),
        *_readable({"/": index, "/health": health, "/metrics": tell_metrics, "/models": names}),
        *_readable({"/model": model, "/models/{name}": model}),
        *_readable({"/example": example, "/models/{name}/example": example}),
    ]
    endpoints = [f"{_verb(route)} {route.path}" for route in routes]
    return Starlette(
        routes=routes,
        middleware=[Middleware(Guard, api_keys=api_keys)] if api_keys else [],
        exception_handlers={
            InputError: refused,
            ClientDisconnect: _left,
            HTTPException: _no_such_endpoint,
        },
    )


def _readable(endpoints: dict[str, Callable[[Request], Awaitable[Response]]]) -> list[Route]:
    return [Route(path, endpoint) for path, endpoint in endpoints.items()]


def _verb(route: Route) -> str:
    return "POST" if "POST" in (route.methods or ()) else "GET"


# --- what is refused


def refused(request: Request, error: Exception) -> Response:
    """One sentence, in the form of the protocol that was spoken."""
    v2 = request.url.path.startswith("/v2")
    status = status_of(error, v2=v2) if isinstance(error, InputError) else 500
    headers = {"Retry-After": "1"} if status in (429, 503) else {}
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if v2:
        return JSONResponse({"error": str(error)}, status, headers)
    return JSONResponse({"detail": str(error)}, status, headers)


def _left(request: Request, error: Exception) -> Response:
    return JSONResponse({"detail": GONE}, 422)  # which nobody gets


def _no_such_endpoint(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException) and error.status_code == 404:
        return refused(request, NotFoundError(f"There is no {request.url.path!r:.80}."))
    status = getattr(error, "status_code", 500)
    return JSONResponse({"detail": getattr(error, "detail", "")}, status)


class Guard:
    """Lets in who has a key."""

    def __init__(self, app: ASGIApp, api_keys: tuple[bytes, ...]) -> None:
        self._app, self._keys = app, api_keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN:
            given: dict[bytes, Any] = dict(scope["headers"])
            try:
                keys.check(self._keys, given.get(b"authorization"))
            except InputError as error:
                await refused(Request(scope), error)(scope, receive, send)
                return
        await self._app(scope, receive, send)
