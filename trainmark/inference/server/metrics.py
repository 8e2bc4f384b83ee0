"""Counts and times of a server, for Prometheus."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
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

    @contextmanager
    def request(self, model: str, protocol: str) -> Iterator[None]:
        """Count what is answered inside, by its status, and how long that took."""
        began, status = time.perf_counter(), 200
        try:
            yield
        except InputError as error:
            status = status_of(error, v2=protocol.startswith("v2"))
            raise
        except BaseException:
            status = 500
            raise
        finally:
            self.requests.labels(model, protocol, status).inc()
            self.seconds.labels(model, protocol).observe(time.perf_counter() - began)

    def text(self) -> bytes:
        """What Prometheus reads."""
        return generate_latest(self._registry)
