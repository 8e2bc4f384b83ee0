"""Where a run's data are to choose between settings: each is tried, and the best one is trained.

A trial is a run like others, in the folder `trials` of the run's own, and can be continued. The
folder is removed when all have ended.
"""

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from trainmark.distributed.mesh import Mesh
from trainmark.run.result import Result
from trainmark.run.run_folder import TRIALS


def choose(
    candidates: Mapping[str, Any],
    train: Callable[[Any, Path], Result],
    output: Path,
    mesh: Mesh,
    better: Literal["higher", "lower"],
) -> tuple[Any, list[str]]:
    """The candidate whose best weights validate best, and why, for people; of equal ones, and where
    not all were evaluated, the first.

    Args:
        candidates: by the flags that choose them.
        train: trains one of them into a folder.
        output: the run's folder.
        better: of the metric.
    """
    found = [
        train(candidate, output / TRIALS / str(number)).best
        for number, candidate in enumerate(candidates.values())
    ]
    mesh.barrier()
    if mesh.is_main:
        shutil.rmtree(output / TRIALS)
    mesh.barrier()
    best_of = {flags: best for flags, best in zip(candidates, found, strict=True) if best}
    if len(best_of) < len(candidates):
        return next(iter(candidates.values())), []
    best = max if better == "higher" else min
    chosen = best(best_of, key=lambda flags: best_of[flags].value)
    tried = " and ".join(f"{best.value:.5f} with {flags}" for flags, best in best_of.items())
    what = f"{best_of[chosen].metric} on {best_of[chosen].split}"
    return candidates[chosen], [f"Chose {chosen} by trial: {what} was {tried}."]
