"""The KServe v2 protocol over HTTP, as clients of Triton speak it."""

from dataclasses import asdict

import trainmark
from trainmark.errors import InputError
from trainmark.inference.server.asgi import Answer, Request, Route, as_json
from trainmark.inference.server.batching import Loaded
from trainmark.inference.server.bodies import Bodies
from trainmark.inference.server.metrics import Metrics
from trainmark.inference.server.models import Model, Models
from trainmark.inference.server.tensors import InferRequest, check_version

SERVER = {
    "name": "trainmark",
    "version": trainmark.__version__,
    "extensions": ["binary_tensor_data"],
}
PLATFORM = "trainmark"
LENGTH = "Inference-Header-Content-Length"


def routes(models: Models, bodies: Bodies, metrics: Metrics) -> list[Route]:
    """The endpoints of the protocol; inference comes first, where it is found soonest."""

    def loaded(request: Request) -> tuple[str, Loaded]:
        model = models.named(request.named["name"])
        found = model.loaded()
        check_version(_version(request), found, model.name)
        return model.name, found

    async def infer(request: Request) -> Answer:
        model = models.named(request.named["name"])
        version = _version(request)
        with metrics.request(model.name, "v2-http"):
            async with bodies.of(request) as body:
                asked = InferRequest(model.name, version, body, _json_bytes(request))
                answer, json_bytes = await model.answer(asked.question(request.has_left))
        if json_bytes is None:
            return Answer(answer)
        headers = {LENGTH.encode(): str(json_bytes).encode()}
        return Answer(answer, media_type=b"application/octet-stream", headers=headers)

    async def live(request: Request) -> Answer:
        return as_json({"live": True})

    async def ready(request: Request) -> Answer:
        return _ready(models.is_ready)

    async def model_ready(request: Request) -> Answer:
        return _ready(is_served(models.named(request.named["name"]), _version(request)))

    async def server(request: Request) -> Answer:
        return as_json(SERVER)

    async def metadata(request: Request) -> Answer:
        return as_json(describe(*loaded(request)))

    of_models = [("/infer", infer, "POST"), ("/ready", model_ready, "GET"), ("", metadata, "GET")]
    return [
        *(
            Route(f"/v2/models/{{name}}{version}{end}", endpoint, method)
            for end, endpoint, method in of_models
            for version in ("", "/versions/{version}")
        ),
        Route("/v2/health/live", live),
        Route("/v2/health/ready", ready),
        Route("/v2", server),
    ]


def is_served(model: Model, version: str) -> bool:
    """Whether a model answers; refuses another version than the one that does."""
    if model.is_ready:
        check_version(version, model.loaded(), model.name)
    return model.is_ready


def describe(name: str, loaded: Loaded) -> dict[str, object]:
    """A model's metadata."""
    scorer = loaded.scorer
    return {
        "name": name,
        "versions": [loaded.version],
        "platform": PLATFORM,
        "inputs": [asdict(spec) for spec in scorer.inputs],
        "outputs": [asdict(scorer.output)],
    }


def _version(request: Request) -> str:
    return request.named.get("version", "")


def _ready(is_ready: bool) -> Answer:
    return as_json({"ready": is_ready}, 200 if is_ready else 503)


def _json_bytes(request: Request) -> int | None:
    given = request.header(LENGTH.lower().encode())
    if given is None:
        return None
    if not given.isdigit() or len(given) >= 12:
        received = given.decode("latin-1")
        raise InputError(f"{LENGTH} is {received!r:.40}, expected a number of bytes.")
    return int(given)
