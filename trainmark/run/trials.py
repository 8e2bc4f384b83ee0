"""Where a run's data are to choose between settings: each is tried, and the best one is trained.

A trial is a run like others, in the folder `trials` of the run's own, and can be continued. When
all have ended, what they chose is written beside it, and the folder is removed.
"""

import json
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from trainmark import checksums
from trainmark.config import to_plain
from trainmark.distributed.mesh import Mesh, of_all_ranks
from trainmark.files import read_json, write_atomically
from trainmark.run.result import Best, Result
from trainmark.run.run_folder import CHOICE, TRIALS


@dataclass(frozen=True, kw_only=True)
class Trials:
    """What a run chooses from.

    Attributes:
        candidates: by the flags that choose them, resolved.
        train: trains one of them into a folder.
        output: the run's folder.
        better: of the metric.
    """

    candidates: Mapping[str, Any]
    train: Callable[[Any, Path], Result]
    output: Path
    mesh: Mesh
    better: Literal["higher", "lower"]

    def choose(self) -> Any:
        """The candidate whose best weights validate best; of equal ones, and where not all were
        evaluated, the first."""
        known = _read(self.output, self.mesh)
        if known.get("candidates") == self._plain():  # chosen before a kill
            if self.mesh.is_main:
                shutil.rmtree(self.output / TRIALS, ignore_errors=True)
            return self.candidates[known["chosen"]]
        began = time.perf_counter()
        found = {
            flags: self.train(candidate, self.output / TRIALS / str(number)).best
            for number, (flags, candidate) in enumerate(self.candidates.items())
        }
        chosen, why = _best(found, self.better)
        why += f" The trials took {time.perf_counter() - began:.1f} s, which no time here includes."
        self.mesh.barrier()
        if self.mesh.is_main:
            document = {"chosen": chosen, "why": why, "candidates": self._plain()}
            write_atomically(self.output / CHOICE, checksums.dumps(document))
            shutil.rmtree(self.output / TRIALS)
        self.mesh.barrier()
        return self.candidates[chosen]

    def _plain(self) -> dict[str, Any]:
        plain = {flags: to_plain(candidate) for flags, candidate in self.candidates.items()}
        as_read: dict[str, Any] = json.loads(json.dumps(plain))
        return as_read


def reasons(output: Path, mesh: Mesh) -> list[str]:
    """Why the run in a folder has what was chosen by trial, for people; none if nothing was."""
    known = _read(output, mesh)
    return [known["why"]] if known else []


def forget(output: Path) -> None:
    """Remove what trials have left, for a run that begins afresh."""
    shutil.rmtree(output / TRIALS, ignore_errors=True)
    (output / CHOICE).unlink(missing_ok=True)


def _read(output: Path, mesh: Mesh) -> dict[str, Any]:
    """What the first rank finds, whose folder it is."""
    return of_all_ranks(read_json(output / CHOICE) if mesh.is_main else {})[0]


def _best(found: Mapping[str, Best | None], better: Literal["higher", "lower"]) -> tuple[str, str]:
    """Of the best evaluations, by flags: the flags that won, and why."""
    best_of = {flags: best for flags, best in found.items() if best}
    if len(best_of) < len(found):
        first = next(iter(found))
        return first, f"Took {first}: a trial had no metric on validation rows to choose by."
    best = max if better == "higher" else min
    chosen = best(best_of, key=lambda flags: best_of[flags].value)
    tried = " and ".join(f"{best.value:.5f} with {flags}" for flags, best in best_of.items())
    what = f"{best_of[chosen].metric} on {best_of[chosen].split}"
    return chosen, f"Chose {chosen} by trial: {what} was {tried}."
