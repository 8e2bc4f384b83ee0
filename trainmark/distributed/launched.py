"""A rank's side of a launch: how it joins, whose error is told, and how it leaves.

When one rank dies, the others fail a moment later, because they lost their partner in a collective.
Only the first error explains anything. So a rank that fails leaves its error with the launcher's
store; the ones that fail after it keep quiet.
"""

import contextlib
import json
import os
import re
import socket
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import NoReturn

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from trainmark.errors import in_words
from trainmark.hardware import backends

ECHO_GRACE_S = 10.0
"""How long a rank that lost its partner waits for the partner's own error."""
YIELD_S = 2.0
"""How long a rank that was not the first to fail waits for the first one to end: the launcher takes
the first end for the cause."""
LOST_RANK = 75
"""Exit code where a rank fell silent (EX_TEMPFAIL: the same line may work later)."""
STORE_TIMEOUT = timedelta(seconds=5)


def is_restart() -> bool:
    """Whether torchrun has started the ranks again after one of them died."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def run_rank(main: Callable[..., int]) -> int:
    """`trainmark` as one rank of several."""
    get_error_handler().initialize()
    try:
        return main(tell=tell)
    except Exception as error:
        tell(error, debug=True)
        return 1


def leave(code: int) -> NoReturn:
    """End this process; by `os._exit` where its ranks met over gloo, or have not parted.

    A thread of gloo may still have to release the last collective's tensor, and needs the
    interpreter for that. Up to Python 3.13, an interpreter that is ending kills such a thread, and
    C++ answers with SIGABRT, after a complete result. NCCL has no such threads, but waits for ranks
    that it has not parted from. Profilers of GPUs need Python's usual end.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    if backends.is_in_use() and not dist.is_initialized():
        sys.exit(code)
    os._exit(code)


def join(backend: str) -> None:
    """Make this process a rank.

    torchrun keeps one store through its restarts, and the ranks of the next attempt would look for
    those of the last one at the addresses that they left there. On one machine, the number of the
    attempt keeps them apart. Several machines count restarts each for itself; there `trainmark
    launch` asks torchrun for a store of its own per attempt.
    """
    kept = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if not kept or _several_machines():
        dist.init_process_group(backend)
        return
    dist.init_process_group(
        backend,
        store=dist.PrefixStore(key("ranks"), _launchers_store()),
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
    )


def _several_machines() -> bool:
    ranks = os.environ.get("WORLD_SIZE", "1")
    return os.environ.get("LOCAL_WORLD_SIZE", ranks) != ranks


# --- errors


def tell(error: Exception, debug: bool) -> None:
    """Say why this rank ends, unless another one has said so already."""
    store = connect()
    if is_echo(error):
        cause = _wait_for_cause(store)
        if cause is not None:
            _yield_to(cause)
            return
        error = ConnectionError(
            "the connection to another rank was lost. That rank was most likely killed (out of "
            "memory?), or its machine is gone; its own log tells more. "
            f"Seen here: {_first_line(error)}"
        )
    if not is_first(store):
        _yield_to(first_cause(store))
        return
    get_error_handler().record_exception(error)
    leave_cause(store, error)
    say(error, debug)


def say(error: Exception, debug: bool) -> None:
    trace = traceback.format_exception(error) if debug and error.__traceback__ else []
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    who = f"rank {os.environ['RANK']} on {socket.gethostname()}: " if ranks > 1 else ""
    # One write, so that the lines of several ranks do not mix.
    sys.stderr.write("".join(trace) + f"trainmark: {who}{in_words(error)}\n")
    sys.stderr.flush()


def _yield_to(cause: dict[str, str] | None) -> None:
    """Wait, so that the rank that failed first also ends first."""
    repeat(cause)
    time.sleep(YIELD_S)


def repeat(cause: dict[str, str] | None) -> None:
    """Tell another rank's error, once, on a machine that it is not on."""
    if cause and cause["machine"] != _machine() and os.environ.get("LOCAL_RANK", "0") == "0":
        text = f"rank {cause['rank']} on {cause['host']}: {cause['error']}"
        sys.stderr.write(f"trainmark: {text}\n")
        sys.stderr.flush()


def _machine() -> str:
    """torchrun's number of this machine: names may be the same."""
    return os.environ.get("GROUP_RANK", "0")


def is_echo(error: Exception) -> bool:
    """Whether this is what a rank sees of another one's death: a failed collective."""
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and re.search(_ECHOES, str(error)) is not None
    )


# Of gloo, and of NCCL where its watchdog is not the first to notice.
_ECHOES = r"gloo|NCCL [Ee]rror|ncclRemoteError|Connection (closed|reset) by peer|Broken pipe"


def _wait_for_cause(store: dist.Store | None) -> dict[str, str] | None:
    """The error of the rank that failed first, where there is one.

    A killed rank leaves none. If it was on this machine, the launcher notices and ends this
    process, too, while it waits here.
    """
    deadline = time.monotonic() + ECHO_GRACE_S
    while time.monotonic() < deadline:
        if cause := first_cause(store):
            return cause
        time.sleep(0.2)
    return None


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


# --- the launcher's store


def connect() -> dist.Store | None:
    """A connection of its own: that of the process group may be in use by another thread."""
    try:
        return _launchers_store(timeout=STORE_TIMEOUT)
    except RuntimeError:
        return None  # the launcher is gone: every rank speaks for itself


def _launchers_store(timeout: timedelta = timedelta(minutes=5)) -> dist.Store:  # torch's own
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)


def key(name: str) -> str:
    """A name in the store that no earlier attempt has used."""
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return f"trainmark/{0 if _several_machines() else restarts}/{name}"


def is_first(store: dist.Store | None) -> bool:
    try:
        return store is None or store.add(key("failures"), 1) == 1
    except RuntimeError:
        return True


def leave_cause(store: dist.Store | None, error: Exception) -> None:
    left = {
        "rank": os.environ["RANK"],
        "machine": _machine(),
        "host": socket.gethostname(),
        "error": str(error),
    }
    if store is not None:
        with contextlib.suppress(RuntimeError):  # then nobody is left to read it
            store.set(key("cause"), json.dumps(left))


def first_cause(store: dist.Store | None) -> dict[str, str] | None:
    try:
        if store is None or not store.check([key("cause")]):
            return None
        found: dict[str, str] = json.loads(store.get(key("cause")))
        return found
    except RuntimeError:
        return None
