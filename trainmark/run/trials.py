"""Settings that the data choose: each candidate is trained, and the best run is kept.

A trial is an ordinary run in the folder `trials` of the run's own folder, and can be continued.
When all have ended, the choice is written to `choice.json`, what the best one has written moves up
into the run's folder, and the others are removed.
"""

import dataclasses
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from trainmark import checksums
from trainmark.config import AnyRun, Better, to_plain
from trainmark.distributed.mesh import Mesh, of_all_ranks
from trainmark.files import read_json, write_atomically
from trainmark.run import result
from trainmark.run.result import FILE_NAME, Best, Result
from trainmark.run.run_folder import CHECKPOINTS, CHOICE, CONFIG_FILE, LOCK_FILE, TRIALS


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
    if known.get("candidates") != plain:  # else chosen before a kill
        chosen, why = _tried(candidates, train, output, mesh)
        number = list(candidates).index(chosen)
        known = {"chosen": chosen, "trial": number, "why": why, "candidates": plain}
        if mesh.is_main:
            write_atomically(output / CHOICE, checksums.dumps(known))
    if mesh.is_main:
        _keep(output, known)
    mesh.barrier()
    return candidates[known["chosen"]]


def settle(output: Path, mesh: Mesh) -> None:
    """Keep a choice to the end, if a kill came when the best trial had begun to be the run."""
    known = _read(output, mesh)
    if known and mesh.is_main and (output / CONFIG_FILE).exists():
        _keep(output, known)
    mesh.barrier()


def _tried(
    candidates: Mapping[str, AnyRun],
    train: Callable[[AnyRun, Path], Result],
    output: Path,
    mesh: Mesh,
) -> tuple[str, str]:
    """The flags that won, and why."""
    found: dict[str, Result] = {}
    for number, (flags, candidate) in enumerate(candidates.items()):
        if mesh.is_main:
            of_all = f"Trial {number + 1} of {len(candidates)}, to choose settings by"
            print(f"{of_all}: {flags}", file=sys.stderr)
        found[flags] = train(candidate, output / TRIALS / str(number))
        if found[flags].best is None:  # then no candidate has a metric
            break
    mesh.barrier()
    best = {flags: one.best for flags, one in found.items()}
    chosen, why = _best(best, next(iter(candidates.values())).better)
    others_s = [one.time_s.e2e for flags, one in found.items() if flags != chosen]
    if others_s:
        why += f" The others took {sum(others_s):.1f} s, which no time here includes."
    return chosen, why


def _keep(output: Path, known: Mapping[str, Any]) -> None:
    """Make the chosen trial the run, whose result also says why, and remove the others. At any
    moment the folder is that of a run that can be continued, or has none yet."""
    trial = output / TRIALS / str(known["trial"])
    if (trial / FILE_NAME).exists():  # else only the removal is left to do
        first = [trial / CONFIG_FILE, trial / CHECKPOINTS]
        stays = [trial / LOCK_FILE, trial / FILE_NAME]
        for path in [*first, *trial.iterdir()]:
            if path.exists() and path not in stays:
                path.rename(output / path.name)
        found = result.read(trial)
        dataclasses.replace(found, notes=[*found.notes, known["why"]]).write(output)
    shutil.rmtree(output / TRIALS, ignore_errors=True)


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
