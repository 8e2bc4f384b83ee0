"""The endpoints over HTTP. They know no workload: a `Scorer` reads and scores.

POST /score, /models/NAME/score        rows in, scores out
GET  /model, /models/NAME              what is served
GET  /example, /models/NAME/example    a body for /score
GET  /models                           their names
GET  /health                           whether it answers
GET  /metrics                          for Prometheus
...  /v2/...                           the KServe v2 protocol (`v2_web.py`)
"""

from trainmark.errors import InputError
from trainmark.inference.server import keys, own_form, v2_web
from trainmark.inference.server.asgi import Answer, App, Request, Route, as_json
from trainmark.inference.server.bodies import Bodies
from trainmark.inference.server.limits import Limits, status_of
from trainmark.inference.server.metrics import Metrics
from trainmark.inference.server.models import Model, Models

OPEN = {"/health", "/v2/health/live", "/v2/health/ready"}
"""Endpoints that need no key: those of software that starts and stops servers."""


def build_app(
    models: Models, limits: Limits, metrics: Metrics, api_keys: tuple[bytes, ...] = ()
) -> App:
    """The web application."""
    bodies = Bodies(limits)

    def of(request: Request) -> Model:
        name = request.named.get("name")
        return models.first() if name is None else models.named(name)

    async def index(request: Request) -> Answer:
        facts = models.first().loaded().scorer.facts
        told = {key: facts[key] for key in ("name", "requests")}
        return as_json(told | {"endpoints": endpoints})

    async def health(request: Request) -> Answer:
        return as_json({"status": "ok"})

    async def names(request: Request) -> Answer:
        return as_json({"models": [model.name for model in models.all()]})

    async def model(request: Request) -> Answer:
        return as_json(of(request).loaded().scorer.facts)

    async def example(request: Request) -> Answer:
        return as_json(of(request).loaded().scorer.example)

    async def score(request: Request) -> Answer:
        chosen = of(request)
        with metrics.request(chosen.name, "json"):
            async with bodies.of(request) as body:
                answer = await chosen.answer(own_form.question(body, request.has_left))
        return Answer(answer)

    async def tell_metrics(request: Request) -> Answer:
        return Answer(metrics.text(), media_type=b"text/plain; version=0.0.4; charset=utf-8")

    def check(request: Request) -> None:
        if api_keys and request.path not in OPEN:
            keys.check(api_keys, request.header(b"authorization"))

    readable = {
        **{"/": index, "/health": health, "/metrics": tell_metrics, "/models": names},
        **{"/model": model, "/models/{name}": model},
        **{"/example": example, "/models/{name}/example": example},
    }
    routes = [
        Route("/score", score, "POST"),
        *v2_web.routes(models, bodies, metrics),
        Route("/models/{name}/score", score, "POST"),
        *(Route(path, endpoint) for path, endpoint in readable.items()),
    ]
    endpoints = [f"{route.method} {route.path}" for route in routes]
    return App(routes, check, refused)


def refused(request: Request, error: InputError) -> Answer:
    """One sentence, in the form of the protocol that was spoken."""
    v2 = request.path.startswith("/v2")
    status = status_of(error, v2=v2)
    headers = {b"retry-after": b"1"} if status in (429, 503) else {}
    if status == 401:
        headers[b"www-authenticate"] = b"Bearer"
    return as_json({"error" if v2 else "detail": str(error)}, status, headers)
