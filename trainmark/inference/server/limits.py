"""How much a server takes, and the statuses of what it refuses. No torch here."""

from dataclasses import dataclass

from trainmark.bounds import Count, Positive
from trainmark.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How much a server takes."""

    rows: Count = 16_384
    """Of one request; more get status 413."""
    body_mib: Count = 16
    """Of one request; more gets status 413."""
    waiting: Count = 1024
    """Requests that wait for a model; others get status 429."""
    seconds: Positive = 30.0
    """That a body may take to arrive (status 408), and then the answer (504)."""

    @property
    def body_bytes(self) -> int:
        return self.body_mib << 20


class RefusalError(InputError):
    """A request that is not answered, with the status that says so."""

    status = 422


class BadKeyError(RefusalError):
    status = 401


class NotFoundError(RefusalError):
    status = 404


class WrongMethodError(RefusalError):
    """GET where POST is meant, or the other way round."""

    status = 405


class TooSlowError(RefusalError):
    """A body that does not come."""

    status = 408


class TooLargeError(RefusalError):
    """A body that is not read to its end, or too many rows."""

    status = 413


class TooManyError(RefusalError):
    """More requests than may wait."""

    status = 429


class UnavailableError(RefusalError):
    """The model is still loading, or memory for bodies is used up."""

    status = 503


class TooLateError(RefusalError):
    """An answer that took too long."""

    status = 504


class LeftError(RefusalError):
    """Nobody waits for the answer any longer."""

    def __init__(self) -> None:
        super().__init__("The client has left.")


def status_of(error: InputError, *, v2: bool) -> int:
    """That of a refusal, or of a request that cannot be read; of the v2 protocol, or our own."""
    status = error.status if isinstance(error, RefusalError) else RefusalError.status
    return 400 if v2 and status == RefusalError.status else status
