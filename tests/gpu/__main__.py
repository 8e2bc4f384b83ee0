"""All GPU tests, in several processes on one GPU: what compiles or starts ranks waits for CPUs.

python -m tests.gpu [--quick] [--processes 12] [--report FOLDER] [arguments of pytest...]
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

QUICK, ALL = "gpu and not gpu_full", "gpu"
LOOK_S = 0.2


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


def main() -> int:
    chosen, words = _arguments()
    began, count = time.monotonic(), chosen.processes
    if not any(Path(word.partition("::")[0]).exists() for word in words):
        words += _files()
    folder = chosen.report or Path(tempfile.mkdtemp(prefix="gpu-tests-"))
    folder.mkdir(parents=True, exist_ok=True)
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
            last = log.read_text(errors="replace").strip().splitlines()[-1:]
            print(f"{log.stem}: {''.join(last)}", flush=True)
            if code not in (0, 5):
                print(log.read_text(errors="replace"), flush=True)
    print(f"{'FAILED' if failed else 'passed'} after {time.monotonic() - began:.0f} s; {folder}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
