"""All GPU tests, in several processes on one GPU: what compiles or starts ranks waits for CPUs.

python -m tests.gpu [--quick] [--processes 12] [--report FOLDER] [arguments of pytest...]
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

from tests import rank_processes
from tests.distributed import joining

QUICK, ALL = "gpu and not gpu_full", "gpu"
LOOK_S = 0.2
PATIENCE_S = 60
PROGRAMS = "/usr/local/nvidia/bin"
"""Where the driver's programs are in some containers."""


def _arguments() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu")
    parser.add_argument("--quick", action="store_true", help="without those marked gpu_full")
    parser.add_argument("--processes", type=int, default=min(12, os.cpu_count() or 1))
    parser.add_argument("--report", type=Path, help="keep what each process prints in this folder")
    return parser.parse_known_args()


def _files() -> list[str]:
    """Those with GPU tests: the others need packages that a GPU machine may lack."""
    tests = Path(__file__).parents[1]
    found = [path for path in sorted(tests.rglob("test_*.py")) if "mark.gpu" in path.read_text()]
    return [str(path) for path in found]


def _start(shard: str, marker: str, words: list[str], log: Path) -> "subprocess.Popen[bytes]":
    line = ["-m", "pytest", "-m", marker, "--shard", shard, "--durations", "5", "-rfE", *words]
    with log.open("wb") as file:
        return subprocess.Popen([sys.executable, *line], stdout=file, stderr=subprocess.STDOUT)


def _ranks_can_add_up(folder: Path) -> bool:
    """Within a minute; how long it takes is printed."""
    with tempfile.TemporaryDirectory(dir=folder) as store:
        ranks = rank_processes.start(joining.add_up, 2, Path(store) / "store", "cuda", world=2)
        try:
            rank_processes.finish(ranks, patience_s=PATIENCE_S)
        except (AssertionError, ProcessExitedException, ProcessRaisedException) as error:
            print(error, flush=True)
            return False
    return True


@contextmanager
def _multi_process_service(folder: Path) -> Iterator[None]:
    """Have it where it is installed, and works."""
    path = os.environ.get("PATH", "") + os.pathsep + PROGRAMS
    control, listens = shutil.which("nvidia-cuda-mps-control", path=path), str(joining.MPS)
    if control is None:
        print("ranks take turns on the GPU: this machine has no nvidia-cuda-mps-control")
        yield
        return
    joining.MPS.mkdir(exist_ok=True)
    places = {"CUDA_MPS_PIPE_DIRECTORY": listens, "CUDA_MPS_LOG_DIRECTORY": listens, "PATH": path}

    def tell(*words: str, order: str = "") -> None:
        with (folder / "mps.log").open("ab") as log:  # the service would hold our own output open
            subprocess.run(
                [control, *words],
                env=os.environ | places,
                input=order.encode(),
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def end() -> None:
        tell(order="quit -t 5")
        shutil.rmtree(joining.MPS, ignore_errors=True)

    tell("-d")
    try:
        if not _ranks_can_add_up(folder):
            print("ranks take turns on the GPU: its Multi-Process Service does not work here")
            end()
        yield
    finally:
        end()


def main() -> int:
    chosen, words = _arguments()
    began = time.monotonic()
    folder = chosen.report or Path(tempfile.mkdtemp(prefix="gpu-tests-"))
    folder.mkdir(parents=True, exist_ok=True)
    # The quick part has hardly any ranks: to try the service would take longer than it saves.
    with nullcontext() if chosen.quick else _multi_process_service(folder):
        failed = _run(chosen, words, folder)
    print(f"{'FAILED' if failed else 'passed'} after {time.monotonic() - began:.0f} s; {folder}")
    if failed and (folder / "mps.log").exists():
        print(
            "Under the Multi-Process Service, a rank that dies may take those of other tests too."
        )
    return int(failed)


def _run(chosen: argparse.Namespace, words: list[str], folder: Path) -> bool:
    """Whether any test failed."""
    count = chosen.processes
    if not any(Path(word.partition("::")[0]).exists() for word in words):
        words += _files()
    logs = [folder / f"shard-{number + 1}.log" for number in range(count)]
    marker = QUICK if chosen.quick else ALL
    running = {
        log: _start(f"{number + 1}/{count}", marker, words, log) for number, log in enumerate(logs)
    }
    failed = False
    while running:
        time.sleep(LOOK_S)
        for log, process in list(running.items()):
            if (code := process.poll()) is None:
                continue
            del running[log]
            failed |= code not in (0, 5)  # 5: none of the tests was chosen
            lines = log.read_text(errors="replace").strip().splitlines()
            tables = [line for line in lines if line.startswith("|")]
            print(f"{log.stem}: {''.join(lines[-1:])}", *tables, sep="\n", flush=True)
            if code not in (0, 5):
                print(log.read_text(errors="replace"), flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
