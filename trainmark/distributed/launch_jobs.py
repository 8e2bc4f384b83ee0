"""Jobs that outlive the command that started them: their handles, states and logs.

A job keeps four files beside each other in one folder: HANDLE.json says what it is, HANDLE.log is
what it printed; a SLURM job has its script HANDLE.sh, a process on this machine its HANDLE.exit.
"""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, TextIO

import psutil

from trainmark.distributed import launch_slurm as slurm
from trainmark.distributed.launch_slurm import State
from trainmark.errors import InputError
from trainmark.files import read_json, write_atomically
from trainmark.validation import parse

Kind = Literal["process", "slurm"]
POLL_S = 1.0

# Ends when the command does, and keeps its exit code. The trap lets it outlive the signal that
# stops the command.
_KEEP_EXIT_CODE = """trap : TERM INT; "$@"; echo $? > "$0" """


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job that was started; all that is needed to ask for it again."""

    handle: str
    kind: Kind
    id: str
    """Process id, or SLURM's job id."""
    logs: list[str]
    command: list[str]
    started: str
    process_started: str | None = None
    """When the process began: its id alone may be another's by now."""


# --- handles


def new(handle: str, kind: Kind, job_id: str, logs: list[str], command: list[str]) -> Job:
    """A job that has just been started."""
    started = datetime.now(UTC).isoformat(timespec="seconds")
    return Job(handle=handle, kind=kind, id=job_id, logs=logs, command=command, started=started)


def save(folder: Path, job: Job) -> Job:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{job.handle}.json"
    write_atomically(path, json.dumps(dataclasses.asdict(job), indent=2) + "\n")
    return job


def find(folder: Path, handle: str) -> Job:
    """The job with this handle."""
    path = folder / f"{handle}.json"
    if Path(handle).name != handle or not path.is_file():
        known = sorted(found.stem for found in folder.glob("*.json"))
        jobs = f"Known: {', '.join(known)}." if known else "There are no jobs."
        raise InputError(f"There is no job {handle!r} in {folder}. {jobs}")
    return parse(Job, read_json(path), str(path))


# --- a process of its own on this machine


def start_process(folder: Path, kind: str, command: list[str]) -> Job:
    """Run a command that goes on when this one ends; its output goes to the job's log."""
    folder.mkdir(parents=True, exist_ok=True)
    handle = f"{kind}-{datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}"
    log = folder.absolute() / f"{handle}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            ["sh", "-c", _KEEP_EXIT_CODE, str(_exit_file(folder.absolute(), handle)), *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    job = new(handle, "process", str(process.pid), [str(log)], command)
    return save(folder, dataclasses.replace(job, process_started=_began(process.pid)))


def _exit_file(folder: Path, handle: str) -> Path:
    return folder / f"{handle}.exit"


def _began(pid: int) -> str:
    """When a process began, in ticks since a boot, and which boot that was: a clock may be set
    anew, these not."""
    try:
        ticks = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:  # gone, or a system without /proc
        return str(psutil.Process(pid).create_time())
    return f"{ticks} {boot}"


def _is_alive(job: Job) -> bool:
    try:
        process = psutil.Process(int(job.id))
        is_same = _began(process.pid) == job.process_started
        return is_same and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _process_state(folder: Path, job: Job) -> State:
    alive = _is_alive(job)  # first: the exit code is written before the process ends
    path = _exit_file(folder, job.handle)
    text = path.read_text() if path.is_file() else ""
    if text.endswith("\n"):
        code = int(text)
        return State("COMPLETED" if code == 0 else "FAILED", code)
    return State("RUNNING", None) if alive else State("KILLED", 137)


# --- what can be asked of any job


def state(folder: Path, job: Job) -> State:
    return slurm.state(job.id) if job.kind == "slurm" else _process_state(folder, job)


def stop(folder: Path, job: Job) -> None:
    """Ask a job to save and end, if it has not ended already."""
    if state(folder, job).exit_code is not None:
        return
    if job.kind == "slurm":
        slurm.stop(job.id)
    else:
        os.killpg(int(job.id), signal.SIGTERM)


def follow(folder: Path, job: Job, output: TextIO) -> int:
    """Print a job's log until it ends; its exit code."""
    tails = [Tail(Path(log), output) for log in job.logs]
    told = "RUNNING"
    while True:
        found = state(folder, job)  # before the log is read, so that its end is not missed
        if found.exit_code is None and found.name != told:
            told = found.name  # why a job waits in the queue
            print(f"trainmark: {job.handle} {told}", file=sys.stderr)
        for tail in tails:
            tail.print_new()
        if found.exit_code is not None:
            return found.exit_code
        time.sleep(POLL_S)


def print_logs(job: Job, output: TextIO) -> None:
    """Print what there is of a job's log."""
    missing = [Tail(Path(log), output).print_new() for log in job.logs].count(False)
    if missing == len(job.logs):
        raise InputError(f"{job.handle} has written no log yet ({', '.join(job.logs)}).")


class Tail:
    """The part of a file that was not printed yet."""

    def __init__(self, path: Path, output: TextIO) -> None:
        self._path, self._output, self._position = path, output, 0

    def print_new(self) -> bool:
        """Print what was added; whether the file is there."""
        if not self._path.is_file():
            return False
        with self._path.open("rb") as file:
            file.seek(self._position)
            added = file.read()
        self._position += len(added)
        self._output.write(added.decode(errors="replace"))
        self._output.flush()
        return True
