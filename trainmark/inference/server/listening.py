"""Where a server listens, and how it stops to."""

import ctypes
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainmark.errors import InputError

SO_ATTACH_FILTER = 26
"""A socket option of Linux that Python has no name for."""
DROP_SYN = (
    (0x30, 0, 0, 13),  # load the flags of the TCP header
    (0x45, 0, 1, 0x02),  # SYN? else skip one
    (0x06, 0, 0, 0),  # drop
    (0x06, 0, 0, 0xFFFFFFFF),  # keep the whole packet
)
"""A filter of packets (BPF): code, steps if true, steps if false, operand."""


@dataclass(frozen=True, kw_only=True)
class Listening:
    """Where a server listens, and to whom."""

    host: str = "127.0.0.1"
    port: int = 0
    grpc_port: int | None = None
    api_keys: tuple[bytes, ...] = ()
    certificate: Path | None = None
    """PEM file with the certificate and its chain."""
    private_key: Path | None = None

    @property
    def scheme(self) -> str:
        return "https" if self.certificate else "http"

    def address(self, port: int) -> str:
        return f"[{self.host}]:{port}" if ":" in self.host else f"{self.host}:{port}"


def drop_new_connections(listener: socket.socket) -> None:
    """Ignore new clients. Their systems try again after a second, and are refused, or accepted by
    whatever listens then. Connections that are half open still open."""
    steps = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in DROP_SYN))
    program = struct.pack("HP", len(DROP_SYN), ctypes.addressof(steps))
    # Where there are no filters, one that connects in the very moment of closing may be reset.
    with suppress(OSError):
        listener.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, program)


def listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family)
        # The end of an answer must not wait for the client to acknowledge what came before.
        # Connections inherit this.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listener
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error).rstrip(".")
        raise cannot_listen(host, port, reason, "--port") from None


def cannot_listen(host: str, port: int, reason: Any, flag: str) -> InputError:
    return InputError(
        f"Cannot listen at {host}, port {port}: {reason}. Give another {flag} or --host."
    )
