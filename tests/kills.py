"""Commands of every kind, killed (SIGKILL) at random instants and started again until they end.

    python -m tests.kills --kills 1000 [--shard 3/14] [--seed 0] [--folder FOLDER]

What is left must be, byte for byte, what an undisturbed command leaves. Kills are spread over
training on 1, 2 and 4 ranks (of ranks, one is killed, then the others, as a launcher does), saving,
preparing, exporting, scoring files and sweeping. Printed are, for each kind, the kills that hit a
process at work (tried), the commands that did not go on afterwards (lost), and ends that differ
(differing).

Processes are forked from this one, which has imported everything and computed nothing: importing
takes longer than most of them live. `make test-slow` runs some dozens.
"""

import argparse
import itertools
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from tests import small, small_distilbert
from trainmark.checkpoint import folders
from trainmark.cli import main as trainmark
from trainmark.distributed.launched import leave, run_rank

MOST_IN_A_ROW = 6
"""Kills of a command before it is left alone to end."""
PATIENCE_S = 300.0
SLOW_FSYNC_S = 0.005  # much of a run's time goes into writing checkpoints
FIRST_PORT = 21_000
EVERY_STEP = ("--checkpoint-every", "1 steps", "--log-every", "3", "--evals-per-epoch", "2")
End = dict[str, Any]


@dataclass(frozen=True)
class Work:
    """A command that is killed.

    Attributes:
        words: from the place of its output to the command.
        end: from this place to what must not differ.
    """

    words: Callable[[Path], list[str]]
    end: Callable[[Path], End]
    ranks: int = 1


@dataclass
class Counts:
    tried: int = 0
    lost: int = 0
    differing: int = 0
    ends: int = 0
    faults: list[str] = field(default_factory=list)


# --- what must be the same


def of_a_run(output: Path) -> End:
    """Weights, optimiser, losses, metrics."""
    newest = folders.latest(output / "checkpoints")
    assert newest is not None, f"{output} has no checkpoint"
    found: End = {"curve": (output / "loss.csv").read_bytes(), "step": newest.name}
    for path in sorted(newest.glob("rank-*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118  (no mapping)
                found[f"{path.name} {name}"] = file.get_tensor(name).numpy().tobytes()
    result = small.result(output)
    found |= {key: result[key] for key in ("samples", "loss", "config")}
    found["metrics"] = [
        (e["at_sample"], e["split"], json.dumps(e["metrics"])) for e in result["evaluations"]
    ]
    return found


def of_files(output: Path) -> End:
    """Every file, and that nothing unfinished lies beside."""
    kept = {name: data for name, data in small.snapshot(output).items() if not _has_times(name)}
    return kept | {"beside": sorted(path.name for path in output.parent.iterdir())}


def _has_times(name: str) -> bool:
    """Files that say when, or how fast, they were made, and the checksums of these."""
    return name.endswith(("prepare.json", "checksums.json", ".lock"))


def of_a_sweep(output: Path) -> End:
    return {"trials": json.loads((output / "sweep.json").read_text())["trials"]}


# --- kinds of work


def _train(run: str, *flags: str) -> Callable[[Path], list[str]]:
    return lambda output: ["train", run, *flags, *EVERY_STEP, "--output", str(output)]


DLRM = ("--epochs", "2", "--shuffle", "rows", "--shuffle-window", "700")
LLAMA3 = ("--train-samples", "96", "--device", "cpu", "--warmup-clock", "1", "--micro-batch", "4")
SWEEP = (
    *(*small.FLAGS, "--checkpoint-every", "1 steps", "--evals-per-epoch", "2"),
    *("--over", "lr=0.1,0.3", "optimizer.name=sgd,adagrad", "--max-steps", "4"),
)
SPLITS = {1: "PP1DP1TP1", 2: "PP1DP2TP1", 4: "PP2DP2TP1"}


def all_work(folder: Path) -> dict[str, Work]:
    """Every kind, by name; what commands read is made in `folder`."""
    work = {}
    for ranks in (1, 2, 4):
        rule = ("--optimizer.name", "adam", *(("--precision", "fp16") if ranks == 1 else ()))
        bert = ("--micro-batch", str(16 // ranks) if ranks == 4 else "8")
        of = {
            "dlrm": _train("dlrm-demo", *small.FLAGS, *DLRM, *rule),
            "distilbert": _train("distilbert-demo", *small_distilbert.FLAGS, *bert),
            "llama3": _train("llama3-demo", *LLAMA3, "--parallel", SPLITS[ranks]),
        }
        for name, words in of.items():
            work[f"train {name}, ranks: {ranks}"] = Work(words, of_a_run, ranks)
    work |= {f"prepare {n}": Work(w, of_files) for n, w in _preparations(folder).items()}
    for name in ("dlrm", "llama3"):  # DistilBERT's runs end with their export
        run = folder / name
        _in_a_child(work[f"train {name}, ranks: 1"].words(run))
        words = partial(_export, run)
        work[f"export {name}"] = Work(words, of_files)
    if "prepare csv" in work:
        work["predict"] = _prediction(folder)
    work["sweep"] = Work(
        lambda output: ["sweep", "dlrm-demo", *SWEEP, "--output", str(output)], of_a_sweep
    )
    return work


def _export(run: Path, output: Path) -> list[str]:
    return ["export", str(run), "--output", str(output)]


def _preparations(folder: Path) -> dict[str, Callable[[Path], list[str]]]:
    try:
        import pyarrow as pa
        import pyarrow.parquet
    except ImportError:
        print("no preparation is killed: pyarrow is not installed here")
        return {}
    raw = folder / "raw"
    make = ["prepare", "synthetic", "--rows", "20000", "--days", "3", "--workers", "1"]
    _in_a_child([*make, "--output", str(raw)])
    draw = random.Random(0)
    lines = [
        f"{draw.random() < 0.3:d},{draw.gauss(0, 1):.3f},{draw.randrange(99)}\n"
        for _ in range(30_000)
    ]
    (folder / "log.csv").write_text("click,age,city\n" + "".join(lines))
    table = pa.table({"click": [1, 0] * 9000, "age": [1.5, 2.5] * 9000, "city": ["x", "y"] * 9000})
    pyarrow.parquet.write_table(table, folder / "log.parquet")
    columns = ["--columns", "label=click numerical=age categorical=city"]
    words = {
        "criteo": ["criteo", "--input", f"{raw}/day_*", "--memory", "1G"],
        "csv": ["csv", "--input", f"{folder}/log.csv", *columns],
        "parquet": ["parquet", "--input", f"{folder}/log.parquet", *columns],
        "synthetic": [*make[1:], "--format", "split_binary"],
    }
    return {name: partial(_prepare, found) for name, found in words.items()}


def _prediction(folder: Path) -> Work:
    """Scores for the rows of the CSV log, in several parts."""
    from trainmark.inference import predict

    predict.PART_ROWS = 1 << 12
    data, run, log = folder / "scored-data", folder / "scored", str(folder / "log.csv")
    columns = ["--columns", "label=click numerical=age categorical=city"]
    _in_a_child(["prepare", "csv", "--input", log, *columns, "--output", str(data)])
    network = ["--model.embedding-dim", "8", "--model.bottom-mlp", "8", "--model.top-mlp", "8", "1"]
    sizes = ["--global-batch", "64", "--eval-batch", "1024", "--max-steps", "3", "--device", "cpu"]
    train = ["train", "dlrm-demo", "--data", str(data), *network, *sizes]
    _in_a_child([*train, "--output", str(run)])
    words = ["predict", str(run), "--input", log, "--keep", "city", "--device", "cpu", "--output"]
    return Work(lambda output: [*words, str(output / "scores.parquet")], of_files)


def _prepare(words: list[str], output: Path) -> list[str]:
    return ["prepare", *words, "--output", str(output)]


# --- processes


def _start(words: list[str], ranks: int, log: Path, port: int) -> list[int]:
    """Process ids of the ranks of a command."""
    return [_fork(words, rank, ranks, log, port) for rank in range(ranks)]


def _fork(words: list[str], rank: int, ranks: int, log: Path, port: int) -> int:
    child = os.fork()
    if child:
        return child
    try:
        kept = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(kept, 1)
        os.dup2(kept, 2)
        os.fsync = _slow_fsync  # type: ignore[assignment]
        if ranks == 1:
            os._exit(trainmark(words))
        place = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": ranks}
        os.environ |= {name: str(value) for name, value in place.items()}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        leave(run_rank(partial(trainmark, words)))
    except BaseException as error:
        os.write(2, f"{type(error).__name__}: {error}\n".encode())
    os._exit(70)


def _slow_fsync(descriptor: int, fsync: Callable[[int], None] = os.fsync) -> None:
    time.sleep(SLOW_FSYNC_S)
    fsync(descriptor)


def _wait(processes: list[int], seconds: float) -> list[int] | None:
    """Exit codes; None where one is still at work after so many seconds."""
    deadline = time.monotonic() + seconds
    codes: dict[int, int] = {}
    while len(codes) < len(processes):
        for process in set(processes) - codes.keys():
            ended, status = os.waitpid(process, os.WNOHANG)
            if ended:
                codes[process] = os.waitstatus_to_exitcode(status)
        if any(codes.values()) or time.monotonic() >= deadline:
            break
        time.sleep(0.002)
    for process in codes:
        processes.remove(process)
    return list(codes.values()) if not processes or any(codes.values()) else None


def _kill(processes: list[int], draw: random.Random) -> None:
    """One first; a launcher needs a moment to see it, and kills the others."""
    draw.shuffle(processes)
    for number, process in enumerate(processes):
        if number == 1:
            time.sleep(draw.uniform(0, 0.05))
        os.kill(process, signal.SIGKILL)
    for process in processes:
        os.waitpid(process, 0)


def _in_a_child(words: list[str]) -> None:
    """A command that is not killed."""
    log = Path(tempfile.gettempdir()) / f"kills-{os.getpid()}.log"
    codes = _wait(_start(words, 1, log, 0), PATIENCE_S)
    assert codes == [0], log.read_text()[-2000:]
    log.unlink()


# --- killing


def undisturbed(work: Work, folder: Path, ports: Iterator[int]) -> tuple[End, float]:
    """What a command leaves that nobody kills, and how long it takes."""
    output, began = folder / "undisturbed" / "output", time.monotonic()
    output.parent.mkdir(parents=True)
    log = folder / "undisturbed.log"
    codes = _wait(_start(work.words(output), work.ranks, log, next(ports)), PATIENCE_S)
    assert codes == [0] * work.ranks, f"{folder.name}: {codes}: {log.read_text()[-2000:]}"
    return work.end(output), time.monotonic() - began


def kill_until_it_ends(
    work: Work, folder: Path, usual_s: float, draw: random.Random, ports: Iterator[int]
) -> tuple[int, list[int] | None, Path]:
    """Kills of one command, its exit codes at last, and where its output is."""
    output = folder / "output"
    folder.mkdir(parents=True)
    for kills in range(MOST_IN_A_ROW + 1):
        log = folder.with_suffix(".log")
        processes = _start(work.words(output), work.ranks, log, next(ports))
        patience = draw.uniform(0, 0.8 * usual_s) if kills < MOST_IN_A_ROW else PATIENCE_S
        codes = _wait(processes, patience)
        if codes is not None or kills == MOST_IN_A_ROW:
            break
        _kill(processes, draw)
    if processes:
        _kill(processes, draw)
    return kills, codes, output


def count(
    name: str, work: Work, kills: int, folder: Path, draw: random.Random, ports: Iterator[int]
) -> Counts:
    """Kill a kind of work so many times."""
    found = Counts()
    expected, usual_s = undisturbed(work, folder, ports)
    for number in itertools.count():
        if found.tried >= kills:
            return found
        place = folder / str(number)
        hits, codes, output = kill_until_it_ends(work, place, usual_s, draw, ports)
        found.tried, found.ends = found.tried + hits, found.ends + 1
        usual_s *= 1.0 if hits else 0.7  # a first time takes longer than others
        if not codes or any(codes):
            found.lost += 1
            found.faults.append(f"{name}: {codes}: {place.with_suffix('.log').read_text()[-1500:]}")
            print(found.faults[-1])
        elif (end := work.end(output)) != expected:
            found.differing += 1
            differ = [
                key for key in end.keys() | expected.keys() if end.get(key) != expected.get(key)
            ]
            found.faults.append(f"{name}: {sorted(differ)[:8]} differ")
        shutil.rmtree(place)
    raise AssertionError


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.kills")
    parser.add_argument("--kills", type=int, default=1000, help="of all kinds together")
    parser.add_argument("--shard", default="1/1", help="I/N: the Ith of N equal parts")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="for what commands write")
    parser.add_argument("--only", default="", help="kinds whose names contain this")
    chosen = parser.parse_args()
    torch.set_num_threads(1)  # a fork takes no other thread along
    from trainmark.run import runner  # noqa: F401  (imported once for all)

    part, _, parts = chosen.shard.partition("/")
    draw, folder = random.Random(f"{chosen.seed} {part}"), chosen.folder or Path(tempfile.mkdtemp())
    ports = itertools.cycle(range(FIRST_PORT + 900 * int(part), FIRST_PORT + 900 * (int(part) + 1)))
    work = {name: one for name, one in all_work(folder).items() if chosen.only in name}
    each = -(-chosen.kills // (int(parts) * len(work)))
    total = Counts()
    print(f"{'':28} tried  lost  differing  ends", flush=True)
    for name, one in work.items():
        place = folder / "killed" / name.replace(" ", "-").replace(",", "").replace(":", "")
        found = count(name, one, each, place, draw, ports)
        print(
            f"{name:28} {found.tried:5} {found.lost:5} {found.differing:10} {found.ends:5}",
            flush=True,
        )
        for key in ("tried", "lost", "differing", "ends", "faults"):
            setattr(total, key, getattr(total, key) + getattr(found, key))
        shutil.rmtree(place)
    print(f"{'all':28} {total.tried:5} {total.lost:5} {total.differing:10} {total.ends:5}")
    print("\n".join(total.faults))
    return int(bool(total.faults))


if __name__ == "__main__":
    sys.exit(main())
