"""What `trainmark launch` takes, and the shape of a job."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from trainmark.errors import InputError

JOBS = Path("runs") / "launch"
PORT = 29500

Repeated = tyro.conf.UseAppendAction[tuple[str, ...]]


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """Start a run on many devices: trainmark launch [FLAGS] train RUN [FLAGS OF train].

    Or let them evaluate a run, or predict: launch [FLAGS] evaluate|infer FOLDER [FLAGS].
    """

    on: Literal["torchrun", "torchx", "slurm"]
    """torchrun: this machine, or several that run the same line; torchx: TorchX; slurm: a batch
    job."""
    shape: Annotated[str, tyro.conf.arg(aliases=["-j"], metavar="NODESxDEVICES")]
    """Machines and devices of each, as 2x8; one rank per device."""
    rendezvous: str | None = None
    """torchrun on several machines: HOST[:PORT] of one of them, the same on all."""
    max_restarts: int = 0
    """How often to start all ranks again, from the last checkpoint, after one has died."""
    numa: bool = False
    """Bind every rank to the CPUs near its GPU (torchrun's --numa-binding node)."""
    scheduler: Literal["local_cwd", "slurm"] = "local_cwd"
    """torchx: which of its schedulers to use."""
    sbatch: Repeated = ()
    """slurm: an option of sbatch, as partition=gpu or exclusive; may be repeated."""
    srun: Repeated = ()
    """slurm: an option of srun; may be repeated."""
    container: str | None = None
    """slurm: image to run in (needs the cluster's pyxis plugin)."""
    mounts: Repeated = ()
    """slurm: a folder to mount in the container, as /data:/data; may be repeated."""
    dry_run: bool = False
    """Print the command or the batch script, and start nothing."""
    detach: bool = False
    """Print the job's handle and return, instead of following the log."""
    jobs: Path = JOBS
    """Folder for the logs and scripts of jobs."""


@dataclass(frozen=True, kw_only=True)
class JobOptions:
    """Which job."""

    handle: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="HANDLE")]
    """What `launch --detach` printed."""
    jobs: Path = JOBS
    """Folder that the job was started with."""


@dataclass(frozen=True, kw_only=True)
class LogOptions(JobOptions):
    """Which job's log."""

    follow: bool = False
    """Go on until the job ends, and exit with its code."""


@dataclass(frozen=True)
class Shape:
    """How many machines, and how many devices on each."""

    nodes: int
    devices: int

    def __str__(self) -> str:
        return f"{self.nodes}x{self.devices}"

    @classmethod
    def parse(cls, text: str) -> "Shape":
        match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
        if match is None:
            raise InputError(
                f"-j must be NODESxDEVICES, such as 1x8 for one machine with 8 devices. "
                f"Received: {text!r}."
            )
        return cls(int(match[1]), int(match[2]))


def of_each_machine(python: str, options: LaunchOptions, shape: Shape) -> list[str]:
    """The launcher that a scheduler starts on every machine; the command follows.

    What happens on a machine, and how its errors are told, is the same with and without one.
    """
    words = [python, "-m", "trainmark", "launch", "--on", "torchrun", "-j", str(shape)]
    if options.max_restarts:
        words += ["--max-restarts", str(options.max_restarts)]
    if options.numa:
        words += ["--numa"]
    return words


def key_values(flag: str, words: tuple[str, ...]) -> dict[str, str | None]:
    """`K=V` or `K` alone, as SLURM's options are."""
    for word in words:
        if not re.fullmatch(r"[a-z][a-z0-9-]*(=.+)?", word):
            raise InputError(
                f"{flag} must be OPTION=VALUE or OPTION, by its long name without the hyphens, "
                f"such as partition=gpu. Received: {word!r}."
            )
    pairs = (word.partition("=") for word in words)
    return {key: value if equals else None for key, equals, value in pairs}


def endpoint(text: str) -> tuple[str, int]:
    """`HOST` or `HOST:PORT`."""
    host, colon, port = text.partition(":")
    if not host or (colon and not re.fullmatch(r"[0-9]{1,5}", port)) or int(port or 1) > 65535:
        raise InputError(
            f"--rendezvous must be HOST or HOST:PORT, the port at most 65535. Received: {text!r}."
        )
    return host, int(port) if colon else PORT
