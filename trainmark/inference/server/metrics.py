"""Counts and times of a server, for Prometheus."""

import time
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from trainmark.errors import InputError
from trainmark.inference.server.limits import status_of

SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10)
ROWS = tuple(4**power for power in range(9))
OF_MODEL = ("model",)
OF_REQUEST = ("model", "protocol")


class Metrics:
    """What is counted, each by the name of the model."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        named: Any = {"namespace": "trainmark_serve", "registry": self._registry}
        self._found: dict[tuple[str, str, int], tuple[Any, Any]] = {}
        self.requests = Counter(
            "requests", "Requests that were answered.", (*OF_REQUEST, "status"), **named
        )
        self.seconds = Histogram(
            "seconds", "From a request's head to its answer.", OF_REQUEST, buckets=SECONDS, **named
        )
        self.pass_rows = Histogram(
            "pass_rows", "Rows of a pass through the model.", OF_MODEL, buckets=ROWS, **named
        )
        self.waiting = Gauge("waiting", "Requests that wait for the model.", OF_MODEL, **named)
        self.loads = Counter("loads", "Loads of the model.", ("model", "outcome"), **named)
        self.step = Gauge("step", "Training step of what is served.", OF_MODEL, **named)

    def of(self, model: str, protocol: str, status: int) -> tuple[Any, Any]:
        """The counter and the histogram of such requests."""
        key = (model, protocol, status)
        if key not in self._found:  # by the library, which takes longer
            seconds = self.seconds.labels(model, protocol)
            self._found[key] = self.requests.labels(*key), seconds
        return self._found[key]

    def request(self, model: str, protocol: str) -> "Counted":
        """Count what is answered inside, by its status, and how long that took."""
        return Counted(self, model, protocol)

    def text(self) -> bytes:
        """What Prometheus reads."""
        return generate_latest(self._registry)


class Counted:
    """A request under way."""

    def __init__(self, metrics: Metrics, model: str, protocol: str) -> None:
        self._metrics, self._model, self._protocol = metrics, model, protocol

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        status = 200 if error is None else 500
        if isinstance(error, InputError):
            status = status_of(error, v2=self._protocol.startswith("v2"))
        requests, seconds = self._metrics.of(self._model, self._protocol, status)
        requests.inc()
        seconds.observe(time.perf_counter() - self._began)
