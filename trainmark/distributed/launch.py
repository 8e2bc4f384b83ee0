"""`trainmark launch`: builds the command or the batch script, prints it, runs it, follows its log.

The same `train RUN` runs on a laptop and on a cluster; only the launch line differs. So do
`evaluate` and `infer`.
"""

import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType

from trainmark.distributed import launch_jobs as jobs
from trainmark.distributed import launch_slurm as slurm
from trainmark.distributed import launch_torchrun as torchrun
from trainmark.distributed import launch_torchx as torchx
from trainmark.distributed.launch_options import JobOptions, LaunchOptions, LogOptions, Shape
from trainmark.errors import InputError, raise_all


def launch(options: LaunchOptions, name: str, flags: list[str], command: list[str]) -> int:
    """Start a run as `options` say; the job's exit code.

    Args:
        options: parsed from `flags`.
        name: of the run, for the job.
        flags: the words between `launch` and the command.
        command: `train`, `evaluate` or `infer`, and the words after it.
    """
    shape = Shape.parse(options.shape)
    raise_all(_misplaced(options, shape))
    text, start = _prepared(options, shape, name, flags, command)
    if not options.dry_run and "slurm" in (options.on, options.scheduler):
        slurm.need("sbatch", f"--{'on' if options.on == 'slurm' else 'scheduler'} slurm")
    print(text, flush=True)
    return 0 if options.dry_run else start()


def _prepared(
    options: LaunchOptions, shape: Shape, name: str, flags: list[str], command: list[str]
) -> tuple[str, Callable[[], int]]:
    """The command or the batch script, and what runs it."""
    if options.on == "slurm":
        script = slurm.script(options, shape, name, command)
        return script, lambda: _look_after(options, _submit(options, script, command))
    if options.on == "torchrun":
        words = torchrun.arguments(options, shape, command)
        variables = torchrun.environment(options, words)
        text = shlex.join([*(f"{k}={v}" for k, v in variables.items()), "torchrun", *words])
        run_here = partial(torchrun.run, words, variables)
    else:
        made = torchx.app(options, shape, name, command)
        if options.scheduler == "slurm":
            asked = torchx.request(options, made)
            return str(asked), lambda: _look_after(options, torchx.submit(options, made, asked))
        text, run_here = torchx.describe(made), partial(torchx.run_here, made)
    if not options.detach:
        return text, run_here
    again = [word for word in flags if word != "--detach"]
    line = [sys.executable, "-m", "trainmark", "launch", *again, *command]
    return text, lambda: _look_after(options, jobs.start_process(options.jobs, options.on, line))


def _misplaced(options: LaunchOptions, shape: Shape) -> Iterator[str]:
    """Flags that the chosen launcher has no use for."""
    if options.rendezvous and options.on != "torchrun":
        yield "--rendezvous is for --on torchrun; schedulers know where their machines meet."
    elif options.rendezvous and shape.nodes == 1:
        yield f"--rendezvous is where several machines meet, and -j {shape} is one: leave it out."
    if options.scheduler == "slurm" and options.on != "torchx":
        yield "--scheduler is for --on torchx."
    if options.on != "slurm":
        given = {"--srun": options.srun, "--container": options.container}
        for flag, value in ({**given, "--mounts": options.mounts}).items():
            if value:
                yield f"{flag} is for --on slurm."
    if options.sbatch and "slurm" not in (options.on, options.scheduler):
        yield "--sbatch is for --on slurm, or --on torchx --scheduler slurm."
    if options.jobs.exists() and not options.jobs.is_dir():
        yield f"--jobs {options.jobs} is a file; give a folder."
    if options.max_restarts < 0:
        yield f"--max-restarts must not be negative. Received: {options.max_restarts}."


def _submit(options: LaunchOptions, script: str, command: list[str]) -> jobs.Job:
    options.jobs.mkdir(parents=True, exist_ok=True)
    job_id = slurm.submit(script)
    handle = f"slurm-{job_id}"
    (options.jobs / f"{handle}.sh").write_text(script)
    log = options.jobs.absolute() / f"{handle}.log"
    return jobs.save(options.jobs, jobs.new(handle, "slurm", job_id, [str(log)], command))


# --- a job that runs elsewhere


def _look_after(options: LaunchOptions, job: jobs.Job) -> int:
    """Follow a job to its end, or leave it alone; Ctrl-C ends it, saved."""
    if options.detach:
        print(job.handle, flush=True)
        return 0
    print(f"trainmark: job {job.handle}; Ctrl-C stops it.", file=sys.stderr)
    with _sigterm_as_ctrl_c():
        try:
            return jobs.follow(options.jobs, job, sys.stdout)
        except KeyboardInterrupt:
            print("trainmark: the job saves and ends; Ctrl-C again kills it.", file=sys.stderr)
        try:
            jobs.stop(options.jobs, job)
            return jobs.follow(options.jobs, job, sys.stdout)
        except KeyboardInterrupt:
            slurm.cancel(job.id)
            return 130


@contextmanager
def _sigterm_as_ctrl_c() -> Iterator[None]:
    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def status(options: JobOptions) -> int:
    """Print where a job stands."""
    job = jobs.find(options.jobs, options.handle)
    found = jobs.state(options.jobs, job)
    ended = "" if found.exit_code is None else f", exit code {found.exit_code}"
    print(f"{job.handle}: {found.name}{ended}; started {job.started}; log {' '.join(job.logs)}")
    return 0


def logs(options: LogOptions) -> int:
    """Print a job's log."""
    job = jobs.find(options.jobs, options.handle)
    if options.follow:
        return jobs.follow(options.jobs, job, sys.stdout)
    jobs.print_logs(job, sys.stdout)
    return 0


def stop(options: JobOptions) -> int:
    """Ask a job to save and end."""
    job = jobs.find(options.jobs, options.handle)
    if jobs.state(options.jobs, job).exit_code is not None:
        raise InputError(f"{job.handle} has ended already.")
    jobs.stop(options.jobs, job)
    return 0
