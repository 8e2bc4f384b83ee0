"""torchrun, as a library: its agent runs in this process, so that its errors can be told here."""

import argparse
import contextlib
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from typing import TYPE_CHECKING

from trainmark.distributed.launch_options import LaunchOptions, Shape, endpoint
from trainmark.errors import InputError
from trainmark.hardware import backends

if TYPE_CHECKING:
    import psutil
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

RANK = ["-m", "trainmark"]
"""What torchrun starts as every rank; the command follows."""
LOOK_S = 3.0
SAVE_S = 600
"""How long ranks may take to save when they are asked to stop; torchrun's own patience is 30 s."""
PARTING_S = 30.0
"""How long a machine that has ended waits for the others to end, too: a rank that has lost its
partners ends well within this."""
ENDED = "trainmark/ended"


def arguments(options: LaunchOptions, shape: Shape, command: list[str]) -> list[str]:
    """The words after `torchrun` for `command` (the words after `trainmark`)."""
    words = ["--nnodes", str(shape.nodes), "--nproc-per-node", str(shape.devices)]
    if shape.nodes == 1:
        words += ["--standalone"]
    else:
        words += _meeting(options)
    if options.max_restarts:
        words += ["--max-restarts", str(options.max_restarts)]
    if options.numa:
        words += _numa(options)
    if _knows("--shutdown-timeout"):  # since torch 2.12
        words += ["--shutdown-timeout", str(SAVE_S)]
    return [*words, *RANK, *command]


def _meeting(options: LaunchOptions) -> list[str]:
    if options.rendezvous is None:
        raise InputError(
            "torchrun on several machines needs --rendezvous HOST[:PORT], the name of one of them, "
            "and the same line on each machine. On a SLURM cluster use --on slurm."
        )
    host, port = endpoint(options.rendezvous)
    words = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{host}:{port}"]
    words += ["--rdzv-id", "trainmark"]
    if options.dry_run:  # perhaps far from the machines that meet: names there mean nothing here
        return words
    address = own_address(host, port)
    if address is None:
        return words
    # torchrun knows the host of the meeting by its name only, not by any of its addresses.
    hosts = address == socket.gethostbyname(host) and host != socket.gethostname()
    return [*words, "--local-addr", address, *(["--rdzv-conf", "is_host=1"] if hosts else [])]


def own_address(host: str, port: int) -> str | None:
    """This machine's address on the way to `host`; None where the way is the loopback.

    Machines often know their own name as 127.0.1.1, which no other machine can use.
    """
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, port))  # sends nothing
            address = str(probe.getsockname()[0])
    except OSError as error:
        raise InputError(f"--rendezvous {host}: {error.strerror or error}.") from None
    return None if address.startswith("127.") else address


def interface_of(address: str) -> str | None:
    """The network interface with this address."""
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if any(found.address == address for found in addresses):
            return name
    return None


def environment(options: LaunchOptions, words: list[str]) -> dict[str, str]:
    """What libraries must be told by environment variables, unless the user tells them."""
    # Of a dead rank, NCCL's threads tell many lines, with stacks; the launcher tells a sentence.
    variables = {"TORCH_CPP_LOG_LEVEL": "FATAL"}
    if "--local-addr" in words:  # gloo would look for this machine by its name
        interface = interface_of(words[words.index("--local-addr") + 1])
        if interface is not None:
            variables["GLOO_SOCKET_IFNAME"] = interface
    if options.rendezvous and options.max_restarts:  # a store of its own for every attempt
        variables["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    return {name: value for name, value in variables.items() if name not in os.environ}


def _numa(options: LaunchOptions) -> list[str]:
    import torch

    if not _knows("--numa-binding"):
        raise InputError(f"--numa: torch {torch.__version__}'s torchrun cannot bind; use 2.11 on.")
    if not options.dry_run and backends.here() != "cuda":
        raise InputError("--numa binds ranks to the CPUs near their GPU; there is no GPU here.")
    return ["--numa-binding", "node"]


def _knows(flag: str) -> bool:
    from torch.distributed.run import get_args_parser

    return flag in get_args_parser()._option_string_actions


def run(words: list[str], variables: dict[str, str]) -> int:
    """Run torchrun's agent here until all ranks have ended; the first failure's exit code."""
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError

    os.environ.update(variables)
    arguments = torchrun.parse_args(words)
    # Its log is repeated below, except for the death of a rank that leads to a restart.
    level = logging.ERROR if "--max-restarts" in words else logging.CRITICAL
    for name in [n for n in logging.root.manager.loggerDict if n.startswith("torch.distributed")]:
        logging.getLogger(name).setLevel(level)
    threading.Thread(target=_end_what_hangs, daemon=True).start()
    try:
        torchrun.run(arguments)
    except (ChildFailedError, SignalException) as end:
        code = _tell_signal(end) if isinstance(end, SignalException) else _tell(end)
        _wait_for_other_machines(arguments, code)  # `end` keeps the agent and its store alive
        return code
    except RendezvousError as error:
        raise InputError(
            f"The machines of this job did not find, or have lost, one another ({error}). Check "
            "that the same --rendezvous is given on each and can be reached from each."
        ) from None
    return 0


def _end_what_hangs() -> None:
    """End stopped ranks once another has ended, and an agent that has not seen that.

    A stopped rank is deaf to the agent's SIGTERM, and the agent waits for it as long as for one
    that saves. The agent itself looks after its ranks every tenth of a second, unless it waits for
    an answer from another machine, for many minutes. Nothing but another thread ends it then.
    """
    import psutil

    from trainmark.distributed.launched import LOST_RANK

    looks, most = 0, 0
    while looks < 2:
        time.sleep(LOOK_S)
        ranks = psutil.Process().children()
        living = [rank for rank in ranks if _status(rank) != psutil.STATUS_ZOMBIE]
        most = max(most, len(living))
        if len(living) < most:
            for rank in living:
                if _status(rank) == psutil.STATUS_STOPPED:
                    rank.kill()
        unseen = any(_exit_code_unseen(rank.pid) == LOST_RANK for rank in ranks)
        looks = looks + 1 if unseen else 0
    for rank in ranks:
        rank.kill()
    _say("other ranks cannot be reached; this machine gives up.")
    os._exit(LOST_RANK)


def _status(process: "psutil.Process") -> str:
    import psutil

    try:
        return process.status()
    except psutil.NoSuchProcess:
        return psutil.STATUS_ZOMBIE


def _exit_code_unseen(child: int) -> int | None:
    """The exit code of a child that nobody has waited for yet; it stays to be seen."""
    try:
        ended = os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    return None if ended is None else ended.si_status


def _wait_for_other_machines(arguments: argparse.Namespace, code: int) -> None:
    """Stay until all machines have ended, because one of them has the store where they meet.

    Were it to leave first, the agents of the others could take that for the end of the network, and
    their ranks could not read there whose error has ended them. Where all ranks succeed, torchrun
    waits itself.
    """
    import torch.distributed as dist
    from torch.distributed.elastic.multiprocessing.api import SignalException

    from trainmark.distributed.launched import LOST_RANK, STORE_TIMEOUT

    machines, deadline = int(arguments.nnodes), time.monotonic() + PARTING_S
    if machines == 1 or code == LOST_RANK:
        return
    host, port = endpoint(arguments.rdzv_endpoint)
    # RuntimeError: the store has left, as it may once all have ended. A second Ctrl-C ends at once.
    with contextlib.suppress(RuntimeError, SignalException):
        store = dist.TCPStore(
            host, port, is_master=False, wait_for_workers=False, timeout=STORE_TIMEOUT
        )
        ended = store.add(ENDED, 1)
        while ended < machines and time.monotonic() < deadline:
            time.sleep(0.1)
            ended = store.add(ENDED, 0)


def _tell_signal(stop: "SignalException") -> int:
    _say(f"stopped by {signal.Signals(stop.sigval).name}.")
    return 128 + int(stop.sigval)


def _tell(error: "ChildFailedError") -> int:
    """Name the rank that failed first. What it had to say, it has printed itself."""
    rank, failure = error.get_first_failure()
    if failure.exitcode < 0:
        ended = f"(process {failure.pid}) was killed by {failure.signal_name()}"
        code = 128 - failure.exitcode
    else:
        ended, code = f"ended with exit code {failure.exitcode}", failure.exitcode
    hint = " Linux does so when memory runs out." if failure.exitcode == -signal.SIGKILL else ""
    sentence = f"rank {rank} {ended}, so all ranks were stopped.{hint}"
    _say(sentence)
    _tell_scheduler(sentence, code)
    return code


def _say(sentence: str) -> None:
    print(f"trainmark: {sentence}", file=sys.stderr)


def _tell_scheduler(sentence: str, code: int) -> None:
    """Leave the error where TorchX, or our batch script, looks for it; the first one stays."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    extra = {"timestamp": str(int(time.time()))}
    content = {"message": {"message": sentence, "errorCode": code, "extraInfo": extra}}
    with contextlib.suppress(OSError):  # it is there already, or its folder is outside a container
        if path:
            with open(path, "x") as file:
                json.dump(content, file)
