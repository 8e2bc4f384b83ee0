"""What every benchmark here shares: its flags, and how its results are written and read."""

import argparse
import json
import multiprocessing
import os
import shlex
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainmark.files import write_atomically
from trainmark.hardware.environment import environment

SCHEMA = "trainmark.benchmark/1"
RESULTS = Path(__file__).resolve().parent / "results"


@dataclass(frozen=True, kw_only=True)
class Options:
    """How a GPU is measured, and where that is written."""

    device: Any
    """As PyTorch has it, which is not loaded here."""
    tiny: bool
    seconds: float
    """Of timed steps in a row."""
    output: Path
    commit: str | None = None
    """What is measured, where git does not know it."""

    def write(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        write_results(name, rows, self.device, folder=self.output, commit=self.commit)


def parser(page: str) -> argparse.ArgumentParser:
    """The flags of a benchmark of a GPU; `page` is what its first lines say."""
    made = argparse.ArgumentParser(description=page.splitlines()[0])
    made.add_argument("--output", type=Path, default=RESULTS, help="folder of the results")
    made.add_argument("--commit", help="what is measured, where git does not know it")
    made.add_argument("--tiny", action="store_true", help="tiny sizes on the CPU: does it run?")
    return made


def in_a_process(work: Callable[[], None]) -> bool:
    """Whether `work` ends well; its crash, and memory that it does not give back, are no matter.

    Forked: importing torch takes seconds. So this process must not touch the GPU itself.
    """

    def guarded() -> None:
        try:
            work()
        except Exception:
            traceback.print_exc()
            os._exit(1)

    process = multiprocessing.get_context("fork").Process(target=guarded)
    process.start()
    process.join()
    return process.exitcode == 0


def command() -> str:
    """What was typed. Of a path that this machine alone has, the last name stays."""
    script, *arguments = sys.argv
    named = [Path(word).name if Path(word).is_absolute() else word for word in arguments]
    return shlex.join(["python", f"benchmarks/{Path(script).name}", *named])


def read_rows(name: str, folder: Path | None = None) -> list[dict[str, Any]]:
    """Those of `results/<name>.json`, or of this file in `folder`; none where there is no file."""
    path = (folder or RESULTS) / f"{name}.json"
    return json.loads(path.read_text())["rows"] if path.exists() else []


def write_results(
    name: str,
    rows: Sequence[Mapping[str, Any]],
    device: Any = "cpu",
    *,
    folder: Path | None = None,
    commit: str | None = None,
) -> Path:
    """Replace `results/<name>.json` by `rows`, with what they were measured on.

    Every row says in `system` what it measured; ours say `trainmark`.

    Args:
        folder: where to write instead of `results`.
        commit: what was measured, for a machine that has a copy of the files but not of git, or an
            older one.
    """
    machine, software = environment(device)
    software |= {"commit": commit or software["commit"], "command": command()}
    document = {
        "schema": SCHEMA,
        "commit": software["commit"],
        "command": command(),
        "hardware": machine,
        "software": software,
        "rows": list(rows),
    }
    folder = folder or RESULTS
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    write_atomically(path, json.dumps(document, indent=2) + "\n")
    return path
