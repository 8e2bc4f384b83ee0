"""How much a server takes, and the statuses of what it refuses. No torch here."""

from dataclasses import dataclass
from http import HTTPStatus

from trainmark.bounds import Count, Positive
from trainmark.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How much a server takes."""

    rows: Count = 16_384
    """Most rows of a request; more get status 413."""
    body_mib: Count = 16
    """Largest body of a request, in MiB; a larger one gets status 413."""
    waiting: Count = 1024
    """Most requests that wait for a model; others get status 429."""
    seconds: Positive = 30.0
    """Longest that a body may take to arrive (status 408), and then the answer (504)."""

    @property
    def body_bytes(self) -> int:
        return self.body_mib << 20


class RefusalError(InputError):
    """A request that is not answered, with the HTTP status that says so."""

    def __init__(self, status: HTTPStatus, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


class LeftError(InputError):
    """Nobody waits for the answer any longer."""

    def __init__(self) -> None:
        super().__init__("The client has left.")


def status_of(error: InputError, *, v2: bool) -> int:
    """The status of a refusal, or of a request that cannot be read: the v2 protocol has 400 for it,
    our own 422."""
    if isinstance(error, RefusalError):
        return error.status
    return HTTPStatus.BAD_REQUEST if v2 else HTTPStatus.UNPROCESSABLE_ENTITY
