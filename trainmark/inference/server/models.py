"""The models of a server, by name: each with what is loaded, and the requests that wait for it."""

import gc
import sys
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from trainmark.errors import InputError
from trainmark.inference.server.batching import Loaded, Question, Queue
from trainmark.inference.server.limits import Limits, RefusalError
from trainmark.inference.server.metrics import Metrics
from trainmark.scoring import Scorer


@dataclass(frozen=True)
class Source:
    """Where a model comes from."""

    name: str
    newest: Callable[[], Hashable]
    """What there is to load now, told from what there was by `==`."""
    load: Callable[[Any], Scorer]
    """The model of what `newest` gave."""


class Model:
    """A model under its name. Loading happens in a thread of its own, answers go on meanwhile."""

    def __init__(self, source: Source, limits: Limits, metrics: Metrics) -> None:
        self.name, self._source, self._metrics = source.name, source, metrics
        self._held: Hashable = None
        self._failed: Hashable = None
        self._loads = 0
        self._loaded: Loaded | None = None
        scored = metrics.pass_rows.labels(self.name).observe
        self._queue = Queue(self.loaded, limits, scored)
        metrics.waiting.labels(self.name).set_function(lambda: len(self._queue))

    @property
    def is_ready(self) -> bool:
        return self._loaded is not None

    def loaded(self) -> Loaded:
        """What answers now; another one perhaps in the next moment."""
        if self._loaded is None:
            sentence = f"{self.name} is still loading. Ask again in a moment."
            raise RefusalError(HTTPStatus.SERVICE_UNAVAILABLE, sentence)
        return self._loaded

    async def answer(self, question: Question) -> Any:
        self.loaded()
        return await self._queue.answer(question)

    def refresh(self) -> bool:
        """Load what is newer than what answers, if anything is; whether anything was.

        The old one answers until the new one is ready, and finishes the pass that it is in. What
        could not be loaded is tried again once it changes.
        """
        newest = self._source.newest()
        if newest in (self._held, self._failed):
            return False
        try:
            scorer = self._source.load(newest)
            if self._loaded is not None:
                _check_takes_the_same(self._loaded.scorer, scorer)
        except Exception:
            self._failed = newest
            self._metrics.loads.labels(self.name, "failed").inc()
            raise
        self._loads += 1
        step = scorer.facts.get("step")
        self._loaded = Loaded(scorer, str(self._loads if step is None else step))
        self._held = newest
        self._metrics.loads.labels(self.name, "loaded").inc()
        if step is not None:
            self._metrics.step.labels(self.name).set(step)
        return True


def _check_takes_the_same(before: Scorer, newer: Scorer) -> None:
    """Refuse a model that refuses the requests of those who ask now: it has other columns, or lost
    what encodes raw values."""
    try:
        if before.inputs != newer.inputs:
            raise InputError("It has other inputs.")
        newer.score([newer.read(before.example)])
    except InputError as error:
        raise InputError(
            f"the newer one does not take the same requests. {error} To serve it, start the server "
            "again."
        ) from None


class Models:
    """All models, in the order in which they were named."""

    def __init__(self, sources: Sequence[Source], limits: Limits, metrics: Metrics) -> None:
        self._models = {source.name: Model(source, limits, metrics) for source in sources}

    @property
    def is_ready(self) -> bool:
        return all(model.is_ready for model in self.all())

    def all(self) -> list[Model]:
        return list(self._models.values())

    def first(self) -> Model:
        return self.all()[0]

    def named(self, name: str) -> Model:
        if name not in self._models:
            known = ", ".join(self._models)
            sentence = f"There is no model {name!r:.60} here, but {known}."
            raise RefusalError(HTTPStatus.NOT_FOUND, sentence)
        return self._models[name]

    def load(self) -> None:
        """Load all models, at the start."""
        for model in self.all():
            model.refresh()
        _exempt_from_collection()

    def reload(self) -> None:
        """Load what is newer. Where that fails, say so, and keep the old one."""
        news = False
        for model in self.all():
            try:
                changed = model.refresh()
            except Exception as error:
                reason = error if isinstance(error, InputError | OSError) else repr(error)
                print(f"{model.name} stays as it is: {reason}", file=sys.stderr, flush=True)
                continue
            if changed:
                print(f"{model.name}: version {model.loaded().version} answers now", flush=True)
            news = news or changed
        if news:
            gc.unfreeze()
            _exempt_from_collection()


def _exempt_from_collection() -> None:
    """Exempt what is loaded from garbage collection, which would delay requests by 0.2 s."""
    gc.collect()
    gc.freeze()
