"""Input files elsewhere: s3://, gs:// and hdfs://, through Arrow's filesystems.

A `RemoteFile` does what sources ask of a path. It is read in the process that began the run, which
unpacks it (unpack.py): the connections of these filesystems do not survive a fork. What follows a
question mark in an address are Arrow's options (endpoint_override=..., region=...).
"""

import fnmatch
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import Any, cast

from trainmark.errors import InputError, no_file_matches

SCHEMES = ("s3://", "gs://", "gcs://", "hdfs://", "abfs://", "abfss://")
READ_BYTES = 2 << 20
"""What is read at a time of a packed file: each part is a request where the file is elsewhere, and
who unpacks it asks for 8 KiB."""
RETRY_S = 60
"""How long a connection to gs:// is tried, unless the address says it."""


def is_remote(pattern: str) -> bool:
    return pattern.startswith(SCHEMES)


def without_secrets(address: str) -> str:
    """As it may be kept: without options and password; a path of this machine as it is."""
    if not is_remote(address):
        return address
    scheme, _, rest = address.partition("?")[0].partition("://")
    server, slash, path = rest.partition("/")
    user, at, host = server.rpartition("@")
    return f"{scheme}://{user.partition(':')[0]}{at}{host}{slash}{path}"


def filesystem(uri: str) -> tuple[Any, str]:
    """Arrow's filesystem for an address, and the path in it."""
    from pyarrow import fs

    if uri.startswith(("gs://", "gcs://")) and "retry_limit_seconds" not in uri:
        # Else a quarter of an hour goes by before it is told that there are no credentials.
        uri += f"{'&' if '?' in uri else '?'}retry_limit_seconds={RETRY_S}"
    with _reached(uri):
        found, path = fs.FileSystem.from_uri(uri)
    return found, path


@contextmanager
def _reached(uri: str) -> Iterator[None]:
    from pyarrow import ArrowException

    try:
        yield
    except (ArrowException, OSError, ValueError, ImportError) as error:
        # Behind the first line is all that was tried.
        reason = str(error).partition("\n")[0].rstrip(".")
        raise InputError(f"{uri} cannot be reached: {reason}.") from None


@dataclass(frozen=True)
class RemoteFile:
    """A file by its address."""

    uri: str

    def __str__(self) -> str:
        return self.uri

    @property
    def name(self) -> str:
        return self._path.name

    @property
    def suffix(self) -> str:
        return self._path.suffix

    @property
    def _path(self) -> PurePosixPath:
        return PurePosixPath(self.uri.partition("?")[0])

    @cached_property
    def _status(self) -> Any:
        files, path = filesystem(self.uri)
        with _reached(self.uri):
            return files.get_file_info(path)

    def exists(self) -> bool:
        return self.is_file()

    def is_file(self) -> bool:
        return bool(self._status.is_file)

    def stat(self) -> SimpleNamespace:
        changed = self._status.mtime_ns or 0
        return SimpleNamespace(
            st_size=self._status.size, st_mtime=changed / 1e9, st_mtime_ns=changed
        )

    def open(self, mode: str = "rb", buffering: int = 0) -> Any:
        files, path = filesystem(self.uri)
        with _reached(self.uri):
            return files.open_input_file(path)


def find(pattern: str, flag: str) -> list[Path]:
    """The files that match an address, in which the last parts may be patterns."""
    if not re.search(r"[*\[]", pattern.partition("?")[0]):
        found = [RemoteFile(pattern)]
        if not found[0].is_file():
            raise no_file_matches(pattern, flag)
    else:
        found = [RemoteFile(uri) for uri in _matching(pattern)]
        if not found:
            raise no_file_matches(pattern, flag)
    return cast(list[Path], found)  # as far as sources use one


def _matching(pattern: str) -> list[str]:
    from pyarrow import fs

    address, mark, options = pattern.partition("?")
    fixed = re.split(r"[*\[]", address)[0].rpartition("/")[0]
    files, folder = filesystem(f"{fixed}{mark}{options}")
    wanted = address[len(fixed) + 1 :]
    # One level for each part of the pattern.
    selector = fs.FileSelector(folder, recursive="/" in wanted)
    with _reached(pattern):
        infos = files.get_file_info(selector)
    names = [info.path.removeprefix(folder).lstrip("/") for info in infos if info.is_file]
    return sorted(
        f"{fixed}/{name}{mark}{options}"
        for name in names
        if name.count("/") == wanted.count("/") and fnmatch.fnmatchcase(name, wanted)
    )
