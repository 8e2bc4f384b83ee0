"""TorchX: one role whose replicas are the machines, on its local or its SLURM scheduler."""

import json
import shlex
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainmark.distributed import launch_jobs as jobs
from trainmark.distributed.launch_options import (
    PORT,
    LaunchOptions,
    Shape,
    key_values,
    of_each_machine,
)
from trainmark.errors import InputError, require

if TYPE_CHECKING:
    from torchx.runner import Runner
    from torchx.specs import AppDef, AppDryRunInfo

ROLE = "trainmark"
_CONFIG = ("partition", "time", "comment", "constraint", "mail-user", "mail-type")
_RESOURCE = {"cpus-per-task": "cpu", "gpus-per-node": "gpu", "mem": "memMB"}


def runner() -> "Runner":
    """TorchX with the two schedulers that are tested here."""
    from torchx.runner import Runner
    from torchx.schedulers import local_scheduler, slurm_scheduler

    factories = {
        "local_cwd": local_scheduler.create_scheduler,
        "slurm": slurm_scheduler.create_scheduler,
    }
    return Runner("trainmark", factories)


def app(options: LaunchOptions, shape: Shape, name: str, command: list[str]) -> "AppDef":
    """What TorchX is asked to run: one launcher per machine."""
    require("--on torchx", "torchx", extra="launch")
    from torchx.specs import AppDef, Resource, Role, macros

    line = _escaped(shlex.join(of_each_machine(sys.executable, options, shape)))
    if shape.nodes > 1:
        line += f' --rendezvous "$${{{macros.rank0_env}}}:{PORT}"'
    _, resource = scheduler_config(options)
    resource = {"cpu": shape.devices, "gpu": 0, "memMB": 0} | resource
    role = Role(
        name=ROLE,
        image="",
        entrypoint="bash",
        args=["-c", f"exec {line} {_escaped(shlex.join(command))}"],
        num_replicas=shape.nodes,
        resource=Resource(**resource),
    )
    return AppDef(name=name, roles=[role])


def _escaped(text: str) -> str:
    """TorchX fills in `${...}`; a dollar of the user's stays one."""
    return text.replace("$", "$$")


def scheduler_config(options: LaunchOptions) -> tuple[dict[str, Any], dict[str, int]]:
    """`--sbatch` as TorchX's SLURM scheduler takes it: its configuration, and resources."""
    given = key_values("--sbatch", options.sbatch)
    known = (*_CONFIG, *_RESOURCE)
    for key, value in given.items():
        if key not in known or not value:
            raise InputError(
                f"TorchX passes on no --sbatch {key}; it knows {', '.join(known)}, each with a "
                "value. --on slurm takes every option."
            )
        if key in _RESOURCE and not value.isdecimal():
            raise InputError(f"--sbatch {key} must be a whole number. Received: {value!r}.")
    resource = {_RESOURCE[key]: int(value or 0) for key, value in given.items() if key in _RESOURCE}
    return {key: value for key, value in given.items() if key in _CONFIG}, resource


# --- running it


def describe(made: "AppDef") -> str:
    """What every replica runs."""
    (role,) = made.roles
    return shlex.join([role.entrypoint, *role.args])


def run_here(made: "AppDef") -> int:
    """Run on this machine to the end, printing what the replicas print; the exit code."""
    with runner() as session:
        from torchx.schedulers.local_scheduler import SignalException

        handle = session.run(made, "local_cwd", {})
        printers = [
            threading.Thread(target=_print_lines, args=(session, handle, replica), daemon=True)
            for replica in range(made.roles[0].num_replicas)
        ]
        for printer in printers:
            printer.start()
        try:
            status = session.wait(handle, wait_interval=1)
        except SignalException as stop:
            session.cancel(handle)
            return 128 + int(stop.sigval)
        finally:
            for printer in printers:
                printer.join(timeout=5)
        return _exit_code(status)


def _print_lines(session: "Runner", handle: str, replica: int) -> None:
    for line in session.log_lines(handle, ROLE, replica, should_tail=True):
        sys.stdout.write(line)
        sys.stdout.flush()


def _exit_code(status: Any) -> int:
    if status is not None and status.state.name == "SUCCEEDED":
        return 0
    try:
        return int(json.loads(status.structured_error_msg)["message"]["errorCode"])
    except (AttributeError, ValueError, KeyError, TypeError):
        return 1  # no replica has left a report


def request(options: LaunchOptions, made: "AppDef") -> "AppDryRunInfo":
    """What to submit to SLURM; as text, its script."""
    with runner() as session:
        return session.dryrun(made, "slurm", scheduler_config(options)[0])


def submit(options: LaunchOptions, made: "AppDef", asked: "AppDryRunInfo") -> jobs.Job:
    """Submit to SLURM through TorchX. It is a SLURM job like any other from then on."""
    with runner() as session:
        try:
            job_id = session.schedule(asked).rpartition("/")[2]
        except subprocess.CalledProcessError as error:
            raise InputError(
                f"sbatch refused the job, with exit code {error.returncode} and the reason above."
            ) from None
    names = [f"slurm-{job_id}-{ROLE}-{replica}" for replica in range(made.roles[0].num_replicas)]
    logs = [str(Path.cwd() / f"{name}.{kind}") for name in names for kind in ("out", "err")]
    job = jobs.new(f"slurm-{job_id}", "slurm", job_id, logs, made.roles[0].args)
    return jobs.save(options.jobs, job)
