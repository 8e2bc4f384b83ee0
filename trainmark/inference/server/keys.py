"""Access by key: a file has one on each line, and a request must bring one of them."""

import hmac
from http import HTTPStatus
from pathlib import Path

from trainmark.errors import InputError
from trainmark.inference.server.limits import RefusalError

SHORTEST = 16
"""Characters of a key: fewer could be guessed."""


def read_keys(path: Path) -> tuple[bytes, ...]:
    """The keys of a file; several, so that a new one can be handed out before the old one ends."""
    try:
        lines = path.read_bytes().split()
    except OSError as error:
        raise InputError(f"--api-key {path} cannot be read: {error.strerror}.") from None
    if not lines or min(map(len, lines)) < SHORTEST:
        raise InputError(
            f"--api-key {path}: expected one key a line, each of at least {SHORTEST} characters."
        )
    return tuple(lines)


def check(keys: tuple[bytes, ...], authorization: bytes | None) -> None:
    """Refuse a request whose header is not `Authorization: Bearer KEY`."""
    if not keys:
        return
    scheme, _, given = (authorization or b"").partition(b" ")
    # All are compared, each in a time that tells nothing of it.
    known = [hmac.compare_digest(key, given) for key in keys]
    if scheme != b"Bearer" or not any(known):
        sentence = "Send the header 'Authorization: Bearer KEY' with one of the keys."
        raise RefusalError(HTTPStatus.UNAUTHORIZED, sentence)
