"""Which configurations `plan_sweep.py` measures, chosen before any of them was.

The DLRMs are a seeded random design: every level of a factor is about equally frequent, batches
are spread within each precision, and the seed is, of 20,000, the one whose factors are least
correlated. Every second one is held out from the fit. No torch here.
"""

import dataclasses
import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

SEED = 7275
NEAR_LIMITS = (3, 9, 20, 23, 34, 36, 42, 46)  # of the design
TABLE_BYTES = 10e9  # of all tables of a configuration, with their state

PRECISIONS = ["bf16"] * 12 + ["fp8"] * 9 + ["fp16"] * 9 + ["tf32"] * 9 + ["fp32"] * 9
BATCHES = [2**power for power in range(12, 19)]
LEVELS: dict[str, Sequence[Any]] = {
    "dim": [32, 64, 128, 256, 32, 64, 96, 128, 192, 256],
    "features": [8, 12, 16, 20, 26, 26, 31, 34, 40],
    "optimizer": ["sgd", "rowwise_adagrad", "adagrad"],
    "tables": ["fp32", "bf16", "int8", "fp8"],
    "largest": [10**4, 10**6, 10**7, 10**7],  # rows of the largest table
    "ids": ["uniform", "power_law"],
    "mlps": ["published", "published", "published", "narrow", "wide"],
    "numerical": [13, 13, 4, 39],
}
MLPS = {  # of the bottom but for its last layer, and of the top
    "published": ((512, 256), (1024, 1024, 512, 256, 1)),
    "narrow": ((128,), (256, 128, 1)),
    "wide": ((1024, 512), (2048, 1024, 512, 1)),
}
STATE = {"sgd": 0, "rowwise_adagrad": 0, "adagrad": 4}  # bytes of a weight, about
WEIGHT = {"fp32": 4, "bf16": 2, "int8": 1, "fp8": 1}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One configuration: how it differs from a named run."""

    name: str
    run: str
    changes: dict[str, Any]
    ids: Literal["uniform", "power_law"] = "uniform"
    held_out: bool = False
    kind: Literal["train", "evaluate", "infer", "limits", "kernels"] = "train"
    """What is measured; `limits`: the least memory that it trains in."""
    factors: dict[str, Any] = field(default_factory=dict)


# --- DLRM on one GPU


def drawn() -> list[dict[str, Any]]:
    """The factors of every configuration."""
    chance = random.Random(SEED)
    columns = {"precision": list(PRECISIONS), "batch": _batches(chance)}
    for name, levels in LEVELS.items():
        column = list(itertools.islice(itertools.cycle(levels), len(PRECISIONS)))
        chance.shuffle(column)
        columns[name] = column
    rows = [
        dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)
    ]
    chance.shuffle(rows)  # a cut sweep has all precisions
    return rows


def _batches(chance: random.Random) -> list[int]:
    """All sizes within each precision, as far as it has rows."""
    column: list[int] = []
    for _, group in itertools.groupby(PRECISIONS):
        count = len(list(group))
        own = (BATCHES + chance.sample(BATCHES, len(BATCHES)))[:count]
        chance.shuffle(own)
        column += own
    return column


def designed() -> list[Case]:
    """The random design; every second one is held out."""
    chance = random.Random(SEED)
    return [_designed(number, factors, chance) for number, factors in enumerate(drawn())]


def _designed(number: int, factors: dict[str, Any], chance: random.Random) -> Case:
    bottom, top = MLPS[factors["mlps"]]
    dim, fmt = factors["dim"], factors["tables"]
    model = {
        "numerical_features": factors["numerical"],
        "table_rows": table_rows(factors, chance),
        "embedding_dim": dim,
        "bottom_mlp": (*bottom, dim),
        "top_mlp": top,
    }
    # Where all tables are small, all are in the format: one store instead of two.
    up_to = 0 if factors["largest"] == min(LEVELS["largest"]) else 100_000
    words = [factors[n] for n in ("precision", "batch", "dim", "features", "optimizer", "tables")]
    return Case(
        name=f"{number:02d} " + " ".join(map(str, words)),
        run="dlrm-small",
        changes={
            "precision": factors["precision"],
            "global_batch": factors["batch"],
            "micro_batch": factors["batch"],
            "model": model,
            "optimizer": {"name": factors["optimizer"]},
            "table_format": {"table_precision": fmt, "fp32_up_to_rows": up_to},
        },
        ids=factors["ids"],
        held_out=number % 2 == 1,
        factors=factors,
    )


def table_rows(factors: dict[str, Any], chance: random.Random) -> tuple[int, ...]:
    """Sizes evenly spread in logarithms up to the largest, in any order, within `TABLE_BYTES`."""
    count = factors["features"]
    weight = WEIGHT[factors["tables"]] + STATE[factors["optimizer"]]
    largest = float(factors["largest"])
    while True:
        rows = [max(3, round(4 * (largest / 4) ** ((i + 0.5) / count))) for i in range(count)]
        if sum(rows) * factors["dim"] * weight <= TABLE_BYTES:
            chance.shuffle(rows)
            return tuple(rows)
        largest *= 0.8


def published() -> list[Case]:
    """NVIDIA's shape, `dlrm-small`, in every precision; the first one again at the very end."""
    shapes = [(precision, 65536) for precision in ("bf16", "fp16", "tf32", "fp8", "fp32")]
    cases = [
        Case(
            name=f"dlrm-small {precision} {batch}",
            run="dlrm-small",
            changes={"precision": precision, "global_batch": batch, "micro_batch": batch},
            held_out=True,
            factors={"precision": precision, "batch": batch, "dim": 128, "features": 26},
        )
        for precision, batch in [*shapes, ("bf16", 262144)]
    ]
    return [*cases, dataclasses.replace(cases[0], name=f"{cases[0].name} again")]


def dlrm() -> list[Case]:
    *first, again = published()
    return [*first, *designed(), again]


# --- DLRM by other engines, and without training


def others() -> list[Case]:
    shapes = [("bf16", 65536, 128, 26, "sgd"), ("fp32", 16384, 64, 12, "adagrad")]
    cases = []
    for shape in shapes:
        precision, batch, dim, features, optimizer = shape
        base = _plain(*shape)
        words = f"{precision} {batch} {dim} {features} {optimizer}"
        largest = sorted(range(features), key=lambda i: -base["model"]["table_rows"][i])[:3]
        in_host = base | {"sharding": {"host_tables": tuple(sorted(largest))}}
        exchanged = base | {"sharding": {"force_exchange": True}}
        cases += [
            Case(name=f"exchange {words}", run="dlrm-small", changes=exchanged, ids="power_law"),
            Case(name=f"evaluate {words}", run="dlrm-small", changes=base, kind="evaluate"),
            Case(name=f"infer {words}", run="dlrm-small", changes=base, kind="infer"),
            Case(name=f"host {words}", run="dlrm-small", changes=in_host, ids="power_law"),
        ]
    adam = _plain("bf16", 32768, 64, 26, "adam")
    cases.append(Case(name="adam bf16 32768 64 26", run="dlrm-small", changes=adam))
    return [dataclasses.replace(case, held_out=True) for case in cases]


def _plain(precision: str, batch: int, dim: int, features: int, optimizer: str) -> dict[str, Any]:
    factors = {"features": features, "tables": "fp32", "optimizer": "adagrad", "dim": dim}
    rows = table_rows(factors | {"largest": 3 * 10**6}, random.Random(SEED))  # soon in host memory
    bottom, top = MLPS["published"]
    model = {"table_rows": rows, "embedding_dim": dim, "bottom_mlp": (*bottom, dim), "top_mlp": top}
    return {
        "precision": precision,
        "global_batch": batch,
        "micro_batch": batch,
        "eval_batch": batch,
        "model": model,
        "optimizer": {"name": optimizer},
    }


def near_limits() -> list[Case]:
    """Of all precisions; with tables, and with activations, that are most of the memory."""
    cases = designed()
    return [dataclasses.replace(cases[number], kind="limits") for number in NEAR_LIMITS]


# --- DistilBERT

SENTENCES: list[tuple[str, str, int, int, int, int]] = [
    # mode, precision, batch, micro-batch, sequence length, mean tokens of a sentence
    ("padded", "bf16", 96, 96, 512, 25),
    ("packed", "bf16", 1024, 1024, 512, 25),
    ("padded", "bf16", 256, 32, 512, 25),  # as published
    ("packed", "fp16", 512, 512, 512, 60),
    ("padded", "fp16", 128, 128, 256, 60),
    ("packed", "bf16", 256, 256, 512, 25),
    ("padded", "tf32", 48, 48, 512, 25),
    ("packed", "tf32", 512, 512, 512, 25),
    ("padded", "bf16", 256, 256, 128, 25),
    ("packed", "bf16", 2048, 2048, 512, 16),
    ("padded", "fp32", 32, 32, 128, 25),
]


def distilbert() -> list[Case]:
    return [
        Case(
            name=f"{mode} {precision} {batch} of {micro} length {length} tokens {tokens}",
            run="distilbert-sst2",
            changes={
                "mode": mode,
                "precision": precision,
                "global_batch": batch,
                "micro_batch": micro,
                "sequence_length": length,
                "synthetic_sentences": batch * 4,
                "synthetic_tokens": tokens,
                "epochs": 1,
            },
            held_out=number % 2 == 1,
        )
        for number, (mode, precision, batch, micro, length, tokens) in enumerate(SENTENCES)
    ]


def with_kernels() -> list[Case]:
    """Those that are trained, what is fitted to first."""
    trained = [case for case in [*dlrm(), *others()] if case.kind == "train"]
    trained.sort(key=lambda case: case.held_out)
    return [dataclasses.replace(case, kind="kernels") for case in trained]


SECTIONS = {
    "memory": near_limits,
    "dlrm": dlrm,
    "distilbert": distilbert,
    "others": others,
    "kernels": with_kernels,
}
