"""SLURM: from a launch line to a batch script, and from a job's id to its state."""

import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass

from trainmark.distributed.launch_options import LaunchOptions, Shape, key_values, of_each_machine
from trainmark.errors import InputError

_OURS = {
    "nodes": "-j", "ntasks": "-j", "ntasks-per-node": "-j", "output": "--jobs", "error": "--jobs",
    "array": "one job per launch",
}  # fmt: skip
_RUNNING = ("CONFIGURING", "RUNNING", "SUSPENDED", "COMPLETING", "REQUEUED", "RESIZING")

# The batch script runs on the first node, where all launchers meet. Two jobs may share a node.
_MEETING_PLACE = '"$(hostname):$((20000 + SLURM_JOB_ID % 20000))"'


@dataclass(frozen=True)
class State:
    """Where a job stands; the exit code is None until it has ended."""

    name: str
    exit_code: int | None


# --- the script


def script(options: LaunchOptions, shape: Shape, name: str, command: list[str]) -> str:
    """The batch script for `command` (the words after `trainmark`)."""
    sbatch, folder = _sbatch(options, shape, name), options.jobs.absolute()
    srun = {"kill-on-bad-exit": "1", "cpus-per-task": sbatch["cpus-per-task"]}
    if options.container:
        srun |= {"container-image": options.container}
    if options.mounts:
        srun |= {"container-mounts": ",".join(_checked_mounts(options))}
    srun |= key_values("--srun", options.srun)
    words = [f"#SBATCH {_one_line(_flag(key, value))}" for key, value in sbatch.items()]
    flags = " ".join(_flag(key, value) for key, value in srun.items())
    return "\n".join(
        [
            "#!/bin/bash",
            *words,
            "",
            "# One launcher per node; if one fails, all are ended, and the first one says why.",
            f"export TORCHELASTIC_ERROR_FILE={shlex.quote(str(folder))}/slurm-$SLURM_JOB_ID.error",
            f"srun {flags} \\",
            f"    {_launcher(options, shape)} {shlex.join(command)}",
            "code=$?  # the highest of all launchers', not that of the first to fail",
            'if [ -f "$TORCHELASTIC_ERROR_FILE" ]; then',
            """    code=$(sed -E 's/.*"errorCode": ([0-9]+).*/\\1/' "$TORCHELASTIC_ERROR_FILE")""",
            "fi",
            "exit $code",
            "",
        ]
    )


def _sbatch(options: LaunchOptions, shape: Shape, name: str) -> dict[str, str | None]:
    given = key_values("--sbatch", options.sbatch)
    for key in given:
        if key in _OURS:
            raise InputError(f"--sbatch {key}: this is set by {_OURS[key]}; leave it out.")
    return {
        "job-name": name,
        "nodes": str(shape.nodes),
        "ntasks-per-node": "1",
        # SLURM's default is one CPU for all ranks of a node. srun does not take it from sbatch.
        "cpus-per-task": str(shape.devices),
        "output": str(options.jobs.absolute() / "slurm-%j.log"),
    } | given


def _checked_mounts(options: LaunchOptions) -> tuple[str, ...]:
    if not options.container:
        raise InputError("--mounts is for --container IMAGE, which is not given.")
    for mount in options.mounts:
        if not re.fullmatch(r"[^:,]+:[^:,]+(:[^:,]+)?", mount):
            raise InputError(f"--mounts must be HERE:THERE. Received: {mount!r}.")
    return options.mounts


def _launcher(options: LaunchOptions, shape: Shape) -> str:
    python = "python" if options.container else sys.executable
    line = shlex.join(of_each_machine(python, options, shape))
    return line if shape.nodes == 1 else f"{line} --rendezvous {_MEETING_PLACE}"


def _flag(key: str, value: str | None) -> str:
    return shlex.quote(f"--{key}" if value is None else f"--{key}={value}")


def _one_line(word: str) -> str:
    """A comment ends with its line: bash would run what follows."""
    if len(word.splitlines()) > 1 or not word.isprintable():
        raise InputError(
            f"An #SBATCH line holds one line of printable characters. Received: {word!r}. Give "
            "--jobs a folder, and --sbatch values, without others."
        )
    return word


# --- the job


def need(program: str, why: str) -> None:
    if shutil.which(program) is None:
        raise InputError(
            f"{why}: there is no {program} on this machine. Run this where SLURM jobs are "
            "submitted (a login node), or use --on torchrun."
        )


def submit(text: str) -> str:
    """Hand a script to SLURM; the job's id."""
    done = subprocess.run(["sbatch", "--parsable"], input=text, capture_output=True, text=True)
    if done.returncode != 0:
        raise InputError(f"sbatch refused the job: {_last_line(done.stderr)}")
    return done.stdout.strip().partition(";")[0]  # ID or ID;CLUSTER


def state(job_id: str) -> State:
    """What SLURM knows of a job: from its memory, then from its accounting."""
    need("scontrol", "launch status")
    shown = subprocess.run(
        ["scontrol", "--oneliner", "show", "job", job_id], capture_output=True, text=True
    )
    found = re.search(r"\bJobState=(\S+) Reason=(\S+).*\bExitCode=(\d+):(\d+)", shown.stdout)
    if shown.returncode == 0 and found and found[1] == "PENDING":
        return State("PENDING" if found[2] == "None" else f"PENDING ({found[2]})", None)
    if shown.returncode == 0 and found:
        return _state(found[1], int(found[3]), int(found[4]))
    if "Invalid job id" not in shown.stderr:
        return State("UNKNOWN: " + _last_line(shown.stderr), None)  # the controller is away
    kept = subprocess.run(
        ["sacct", "-nPXj", job_id, "--format=State,ExitCode"], capture_output=True, text=True
    )
    found = re.match(r"(\w+)[^|]*\|(\d+):(\d+)", kept.stdout)
    if not found:
        raise InputError(f"SLURM does not know job {job_id} (any longer).")
    return _state(found[1], int(found[2]), int(found[3]))


def _state(name: str, code: int, signal_number: int) -> State:
    if name in _RUNNING:
        return State(name, None)
    if name == "COMPLETED":
        return State(name, 0)
    return State(name, code or (128 + signal_number if signal_number else 1))


def stop(job_id: str) -> None:
    """Ask the ranks to save and end; a job that waits in the queue just ends.

    A plain scancel would leave the ranks the cluster's KillWait only, 30 s, to save.
    """
    if state(job_id).name == "RUNNING":
        cancel("--signal=TERM", job_id)
    else:
        cancel(job_id)


def cancel(*words: str) -> None:
    """End a job, saved or not; the words after `scancel`."""
    done = subprocess.run(["scancel", *words], capture_output=True, text=True)
    if done.returncode != 0:
        raise InputError(f"scancel: {_last_line(done.stderr)}")


def _last_line(text: str) -> str:
    """The last line of an error message, which has the reason; without advice to read the help."""
    lines = [line for line in text.strip().splitlines() if not line.startswith("Try ")]
    return lines[-1] if lines else "no reason given"
