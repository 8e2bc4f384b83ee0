"""Settings that the data choose: each candidate is tried, and the best one is trained.

A trial is an ordinary run in the folder `trials` of the run's own folder, and can be continued.
When all have ended, the choice is written to `choice.json`, and the folder is removed.
"""

import shutil
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from trainmark import checksums
from trainmark.config import AnyRun, Better, to_plain
from trainmark.distributed.mesh import Mesh, of_all_ranks
from trainmark.files import read_json, write_atomically
from trainmark.run.result import Best, Result
from trainmark.run.run_folder import CHOICE, TRIALS


def choose(
    candidates: Mapping[str, AnyRun],
    train: Callable[[AnyRun, Path], Result],
    output: Path,
    mesh: Mesh,
) -> AnyRun:
    """The candidate whose best weights validate best; the first one if a metric is missing.

    Args:
        candidates: resolved runs, by the flags that choose them.
        train: trains one of them into a folder.
        output: the run's folder.
    """
    plain = {flags: to_plain(candidate) for flags, candidate in candidates.items()}
    known = _read(output, mesh)
    if known.get("candidates") == plain:  # chosen before a kill
        if mesh.is_main:
            shutil.rmtree(output / TRIALS, ignore_errors=True)
        return candidates[known["chosen"]]
    began = time.perf_counter()
    found: dict[str, Best | None] = {}
    for number, (flags, candidate) in enumerate(candidates.items()):
        if mesh.is_main:
            of_all = f"Trial {number + 1} of {len(candidates)}, to choose settings by"
            print(f"{of_all}: {flags}", file=sys.stderr)
        found[flags] = train(candidate, output / TRIALS / str(number)).best
        if found[flags] is None:  # then no candidate has a metric
            break
    chosen, why = _best(found, next(iter(candidates.values())).better)
    why += f" The trials took {time.perf_counter() - began:.1f} s, which no time here includes."
    mesh.barrier()
    if mesh.is_main:
        document = {"chosen": chosen, "why": why, "candidates": plain}
        write_atomically(output / CHOICE, checksums.dumps(document))
        shutil.rmtree(output / TRIALS)
    mesh.barrier()
    return candidates[chosen]


def reasons(output: Path, mesh: Mesh) -> list[str]:
    """Why trials chose what the run in a folder has, as sentences; none without trials."""
    known = _read(output, mesh)
    return [known["why"]] if known else []


def clear(output: Path) -> None:
    """Remove what trials have left, for a run that begins afresh."""
    shutil.rmtree(output / TRIALS, ignore_errors=True)
    (output / CHOICE).unlink(missing_ok=True)


def _read(output: Path, mesh: Mesh) -> dict[str, Any]:
    """The choice that rank 0 finds in its folder, on all ranks."""
    return of_all_ranks(read_json(output / CHOICE) if mesh.is_main else {})[0]


def _best(found: Mapping[str, Best | None], better: Better) -> tuple[str, str]:
    """The flags that won, and why, from the best evaluation of each candidate."""
    best_of = {flags: best for flags, best in found.items() if best}
    if len(best_of) < len(found):
        first = next(iter(found))
        return first, (
            f"Took {first}: the validation rows have no metric to choose by, as where all of them "
            "have one label."
        )
    best = max if better == "higher" else min
    chosen = best(best_of, key=lambda flags: best_of[flags].value)
    tried = " and ".join(f"{best.value:.5f} with {flags}" for flags, best in best_of.items())
    what = f"{best_of[chosen].metric} on {best_of[chosen].split}"
    return chosen, f"Chose {chosen} by trial: {what} was {tried}."
