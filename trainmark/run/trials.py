"""Settings that the data choose: each candidate is tried, and the best one is trained.

A trial is an ordinary run in the folder `trials` of the run's own folder, and can be continued.
When all have ended, the choice is written to `choice.json`, and the folder is removed.
"""

import json
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainmark.config import Better, to_plain
from trainmark.distributed.mesh import Mesh, of_all_ranks
from trainmark.files import read_json, write_atomically
from trainmark.run.result import Best, Result
from trainmark.run.run_folder import CHOICE, TRIALS


@dataclass(frozen=True, kw_only=True)
class Trials:
    """The candidates of a run.

    Attributes:
        candidates: resolved runs, by the flags that choose them.
        train: trains one of them into a folder.
        output: the run's folder.
        better: which values of the metric are better.
    """

    candidates: Mapping[str, Any]
    train: Callable[[Any, Path], Result]
    output: Path
    mesh: Mesh
    better: Better

    def choose(self) -> Any:
        """The candidate whose best weights validate best.

        The first one wins a draw, and wins if one of them was never evaluated.
        """
        known = _read(self.output, self.mesh)
        if known.get("candidates") == self._plain():  # chosen before a kill
            return self.candidates[known["chosen"]]
        began = time.perf_counter()
        found: dict[str, Best | None] = {}
        for number, (flags, candidate) in enumerate(self.candidates.items()):
            if self.mesh.is_main:
                of_all = f"Trial {number + 1} of {len(self.candidates)}, to choose settings by"
                print(f"{of_all}: {flags}", file=sys.stderr)
            found[flags] = self.train(candidate, self.output / TRIALS / str(number)).best
            if found[flags] is None:  # nor will the others have a metric
                break
        chosen, why = _best(found, self.better)
        why += f" The trials took {time.perf_counter() - began:.1f} s, which no time here includes."
        self.mesh.barrier()
        if self.mesh.is_main:
            document = {"chosen": chosen, "why": why, "candidates": self._plain()}
            write_atomically(self.output / CHOICE, json.dumps(document, indent=2) + "\n")
            shutil.rmtree(self.output / TRIALS)
        self.mesh.barrier()
        return self.candidates[chosen]

    def _plain(self) -> dict[str, Any]:
        plain = {flags: to_plain(candidate) for flags, candidate in self.candidates.items()}
        as_read: dict[str, Any] = json.loads(json.dumps(plain))
        return as_read


def reasons(output: Path, mesh: Mesh) -> list[str]:
    """Why trials chose what the run in a folder has, as sentences; none without trials."""
    known = _read(output, mesh)
    return [known["why"]] if known else []


def forget(output: Path) -> None:
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
