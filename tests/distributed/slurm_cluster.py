"""A real SLURM on this machine: munge, one controller, and two nodes that are two daemons.

    python -m tests.distributed.slurm_cluster FOLDER      runs it until Ctrl-C

Needs root and Debian's slurm-wlm and munge; installs nothing, writes to its folder only.
"""

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.waiting import wait_until

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel")
NODES = ("machine1", "machine2")

# Both nodes are this machine: they are told to have more CPUs than there may be.
CONFIGURATION = """
ClusterName=trainmark
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=bf_interval=1
SlurmdParameters=config_overrides
MpiDefault=none
ReturnToService=2
NodeName=machine1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=4
NodeName=machine2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=4
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str | None:
    """Why there can be no cluster here, if so."""
    path = os.environ["PATH"] + ":/usr/sbin:/sbin"
    absent = [name for name in PROGRAMS if shutil.which(name, path=path) is None]
    if absent:
        return f"SLURM is not installed here (no {', '.join(absent)})"
    return None if os.geteuid() == 0 else "SLURM's daemons need root"


@contextmanager
def cluster(folder: Path) -> Iterator[dict[str, str]]:
    """Run the daemons; gives the environment variables to use the cluster with."""
    (folder / "state").mkdir(parents=True)
    folder.chmod(0o755)
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o600)
    configuration = folder / "slurm.conf"
    text = CONFIGURATION.format(folder=folder, ports=_free_ports(3), host=socket.gethostname())
    configuration.write_text(text)
    variables = {"SLURM_CONF": str(configuration)}
    commands = [
        _munged(folder),
        ["slurmctld", "-D", "-i"],
        *(["slurmd", "-D", "-N", n] for n in NODES),
    ]
    environment = os.environ | variables | {"PATH": os.environ["PATH"] + ":/usr/sbin:/sbin"}
    quiet = subprocess.DEVNULL
    daemons: list[subprocess.Popen[bytes]] = []
    try:
        for command in commands:
            daemons.append(subprocess.Popen(command, env=environment, stdout=quiet, stderr=quiet))
            if command[0] == "munged":
                wait_until((folder / "munge.socket").exists)
        wait_until(lambda: _idle_nodes(environment) == len(NODES), pause=0.1)
        yield variables
        # What a test that failed has left would go on without the daemons.
        subprocess.run(["scancel", "--user=root"], env=environment, check=True)
        wait_until(lambda: _idle_nodes(environment) == len(NODES), pause=0.1)
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in daemons:
            with suppress(subprocess.TimeoutExpired):
                daemon.wait(timeout=10)
            daemon.kill()
            daemon.wait()


def _munged(folder: Path) -> list[str]:
    files = {"socket": "munge.socket", "key-file": "munge.key", "log-file": "munged.log",
             "pid-file": "munged.pid", "seed-file": "munge.seed"}  # fmt: skip
    flags = [f"--{flag}={folder / name}" for flag, name in files.items()]
    return ["munged", "--foreground", "--force", *flags]


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for probe in sockets:
        probe.bind(("127.0.0.1", 0))
    ports = [probe.getsockname()[1] for probe in sockets]
    for probe in sockets:
        probe.close()
    return ports


def _idle_nodes(environment: dict[str, str]) -> int:
    shown = subprocess.run(
        ["sinfo", "--noheader", "--Node", "--format=%T"],
        env=environment, capture_output=True, text=True,
    )  # fmt: skip
    return shown.stdout.split().count("idle")


if __name__ == "__main__":
    with cluster(Path(sys.argv[1]).absolute()) as found, suppress(KeyboardInterrupt):
        print(" ".join(f"{name}={value}" for name, value in found.items()), flush=True)
        while True:
            time.sleep(3600)
