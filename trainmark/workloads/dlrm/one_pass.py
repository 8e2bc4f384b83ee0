"""A DLRM's predictions in one pass over the samples, on a CPU with numba (`kernels/cpu_scores.py`).

It takes arrays, and no torch, which takes longer to import than a server to start without it.

Shapes: B samples, N numerical features, F tables.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainmark.kernels.compiled import INSTALLED
from trainmark.workloads.dlrm.crosses import crossed

Layer = tuple[NDArray[np.float32], NDArray[np.float32]]
"""Weight [outputs, inputs] and bias."""
Logits = Callable[[NDArray[np.float32], NDArray[np.int64]], NDArray[np.float32]]
"""([B, N] numbers, [B, F] ids) -> [B] logits."""

INTERACTIONS = ("dot", "dot_and_inputs")


Kind = tuple[str, tuple[int, ...]]
"""Of a tensor: its type, as safetensors calls it, and its shape."""


def suits(config: Mapping[str, Any], kinds: Mapping[str, Kind]) -> bool:
    """Whether a model can be computed in this way.

    Args:
        config: as `description` gives it.
        kinds: of its weights, by name.
    """
    dim, tables = config["bottom_mlp"][-1], enumerate(config["table_rows"])
    return (
        INSTALLED
        and config.get("interaction", "dot") in INTERACTIONS
        and "pooling" not in config
        and all(kind == "F32" for kind, _ in kinds.values())
        and all(kinds.get(f"tables.{t}.weight") == ("F32", (rows, dim)) for t, rows in tables)
    )


def logits_of(config: Mapping[str, Any], weights: Mapping[str, NDArray[np.float32]]) -> Logits:
    """Of a model that it suits, and its weights by name."""

    def layers(name: str) -> list[Layer]:
        numbers = range(0, 2 * len(config[f"{name}_mlp"]), 2)
        return [(weights[f"{name}.{n}.weight"], weights[f"{name}.{n}.bias"]) for n in numbers]

    return build(
        [weights[f"tables.{table}.weight"] for table in range(len(config["table_rows"]))],
        layers("bottom"),
        layers("top"),
        config.get("logit_offset", 0.0),
        config.get("interaction", "dot"),
        config.get("crosses", []),
    )


def build(
    tables: Sequence[NDArray[np.float32]],
    bottom: Sequence[Layer],
    top: Sequence[Layer],
    offset: float,
    interaction: str,
    crosses: Sequence[Sequence[int]],
) -> Logits:
    """From ids of the features alone: those of crosses follow."""
    from trainmark.kernels import cpu_scores

    dim = len(bottom[-1][1])
    places = cpu_scores.find_tables(tables)
    before = cpu_scores.pack_layers(bottom, bottom[0][0].shape[1])
    after = cpu_scores.pack_layers(top, top[0][0].shape[1])
    shift, with_inputs = np.float32(offset), interaction == "dot_and_inputs"

    def logits(numbers_BN: NDArray[np.float32], ids_BF: NDArray[np.int64]) -> NDArray[np.float32]:
        if crosses:
            of_crosses = [crossed([ids_BF[:, f] for f in cross]) for cross in crosses]
            ids_BF = np.concatenate([ids_BF.T, of_crosses]).T
        found = cpu_scores.scores(
            numbers_BN, ids_BF, places, dim, before, after, with_inputs=with_inputs
        )
        return found + shift

    return logits


def clicks(logits_B: NDArray[np.float32]) -> NDArray[np.float32]:
    """Probabilities; NaN of an infinite logit, which would look like a certain one."""
    with np.errstate(over="ignore"):  # of a click that is as good as impossible
        found = np.float32(1) / (np.float32(1) + np.exp(-logits_B))
    found[np.isinf(logits_B)] = np.nan
    return found
