"""Resolving a DLRM run: what its data fills in, and everything that is wrong with it."""

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainmark.clickdata import feature_spec, identity, negatives, terabyte
from trainmark.config import SYNTHETIC, filled
from trainmark.errors import InputError, raise_all, unknown
from trainmark.hardware.devices import Cluster, lacks
from trainmark.metrics import share_of_excess
from trainmark.resolve import target_problems
from trainmark.workloads.dlrm import auto
from trainmark.workloads.dlrm.fitted import fitted_fields
from trainmark.workloads.dlrm.rows import planted_clicks, rows_trained_on, synthetic_range
from trainmark.workloads.dlrm.runs import (
    METRIC,
    RUNS,
    SYNTHETIC_ROWS,
    TERABYTE,
    DlrmRun,
    Model,
    demo_schedule,
    is_generated,
    terabyte_range,
)
from trainmark.workloads.dlrm.sizes import (
    branches,
    cross_layers,
    cross_rank,
    dense_parameters,
    has_narrow_tables,
    in_other_formats,
    joined_width,
    table_parameters,
)

# Reaching 95 % of the best possible excess over 0.5 counts as learned, where the best is known.
PLANTED_TARGET = 0.95
PLACEMENTS = ("auto", "round_robin", "memory_balanced", "memory_optimized", "greedy")
MAX_PARAMETERS = 2**58  # bytes are counted in 64 bits
MAX_PLANTED = 1000  # features: 65,536 rows at a time are made in memory


def resolve(cfg: DlrmRun, cluster: Cluster) -> tuple[DlrmRun, list[str]]:
    """Take features, table rows and the best AUC from the data, and check the network's shape."""
    problems: list[str] = []
    cfg = _with_matching_widths(dataclasses.replace(cfg, dataset=(), negative_rate=1.0))
    if cfg.data is None:
        problems.append(
            f"{cfg.name} needs data: give --data DIR (see 'trainmark prepare'), --data terabyte "
            "for rows like Criteo's that are made as they are needed, or --data synthetic to "
            "measure speed alone."
        )
    elif not is_generated(cfg.data):
        try:
            cfg = _with_dataset(cfg, Path(cfg.data))
        except InputError as error:
            problems.append(str(error))
    else:
        cfg, more = _with_generated(cfg)
        problems += more
    if cfg.name == auto.NAME:
        cfg = auto.fit(cfg, _training_rows(cfg))
    cfg = _with_interaction_widths(cfg)
    problems += target_problems(cfg, METRIC) + _model_problems(cfg)
    problems += _sharding_problems(cfg) + _format_problems(cfg, cluster)
    problems += _width_problems(cfg) + _interaction_problems(cfg.model)
    sharding = dataclasses.replace(cfg.sharding, cluster=str(cluster))
    cfg = dataclasses.replace(cfg, sharding=sharding)
    if cfg.data == SYNTHETIC and cfg.synthetic_ids == "planted" and not problems:
        best = planted_clicks(cfg).best_auc(*synthetic_range(cfg, "test"))
        cfg = _with_best_auc(cfg, best)
    if cfg.data == TERABYTE and not problems:
        known = terabyte.best_auc(*terabyte_range(cfg, "test"))
        cfg = cfg if known is None else _with_best_auc(cfg, known)
    return cfg, problems


def _with_generated(cfg: DlrmRun) -> tuple[DlrmRun, list[str]]:
    """The rows that are made where none are asked for; and whether the log has what is."""
    if cfg.data == SYNTHETIC:
        return dataclasses.replace(cfg, synthetic_rows=cfg.synthetic_rows or SYNTHETIC_ROWS), []
    if cfg.synthetic_rows is None:
        cfg = dataclasses.replace(cfg, synthetic_rows=terabyte.TRAIN_ROWS)
    return dataclasses.replace(cfg, dataset=terabyte_lines(cfg)), list(_terabyte_problems(cfg))


def terabyte_lines(cfg: DlrmRun) -> tuple[str, ...]:
    """What the planted Terabyte's columns are, as those of a dataset are told."""
    numerical = [
        identity.Column(kind="numerical", name=f"num_{i}", reading="log")
        for i in range(terabyte.NUM_NUMERICAL)
    ]
    categorical = [
        identity.Column(kind="categorical", name=f"cat_{i}.bin", rows=rows, vocabulary="planted")
        for i, rows in enumerate(cfg.model.table_rows)
    ]
    return tuple(column.line() for column in numerical + categorical)


def _terabyte_problems(cfg: DlrmRun) -> Iterator[str]:
    model, rows = cfg.model, filled(cfg.synthetic_rows)
    shape = (model.numerical_features, len(model.table_rows))
    if shape != (terabyte.NUM_NUMERICAL, len(terabyte.VOCABULARY)):
        yield (
            f"The planted Terabyte has {terabyte.NUM_NUMERICAL} numerical and "
            f"{len(terabyte.VOCABULARY)} categorical features. Received: {shape[0]} and "
            f"{shape[1]}. Leave model.numerical_features and model.table_rows as the named runs "
            "have them, or use --data synthetic."
        )
    if rows > terabyte.TRAIN_ROWS:
        yield (
            f"The planted Terabyte has {terabyte.TRAIN_ROWS:,} training rows. Received: "
            f"--synthetic-rows {rows:,}. Ask for fewer, or for more --epochs."
        )
    if cfg.shuffle != "none":
        yield (
            "The planted Terabyte's rows are independent of each other, and made in their order. "
            f"Received: --shuffle {cfg.shuffle}. Leave it out."
        )


def _with_matching_widths(cfg: DlrmRun) -> DlrmRun:
    """The named run's own bottom MLP ends at the embedding width, whatever that is now."""
    if cfg.name not in RUNS:  # made by code, as benchmarks do
        return cfg
    own, width = RUNS[cfg.name]().model.bottom_mlp, cfg.model.embedding_dim
    if cfg.model.bottom_mlp != own:  # the user's: checked, never changed
        return cfg
    model = dataclasses.replace(cfg.model, bottom_mlp=(*own[:-1], width))
    return dataclasses.replace(cfg, model=model)


def _with_interaction_widths(cfg: DlrmRun) -> DlrmRun:
    """The sizes that an interaction has of its own, where nobody said any."""
    model = cfg.model
    usual: dict[str, Any] = {}
    if model.interaction == "dcn":
        usual = {"cross_layers": cross_layers(model), "cross_rank": cross_rank(model)}
    if model.interaction == "projection":
        usual = dict(zip(("branch1_mlp", "branch2_mlp"), branches(model), strict=True))
    lacking = {name: size for name, size in usual.items() if getattr(model, name) is None}
    return dataclasses.replace(cfg, model=dataclasses.replace(model, **lacking))


def _with_dataset(cfg: DlrmRun, folder: Path) -> DlrmRun:
    if folder.is_file():
        raise InputError(f"data must be a dataset's folder. Received a file: {folder}.")
    spec = feature_spec.read(folder)
    feature_spec.check(spec, source=str(feature_spec.path_of(folder)))
    raise_all(
        f"{folder}: categorical feature {name!r} has hotness {spec.feature_spec[name].hotness}; "
        "this version trains on one id per feature and sample."
        for name in spec.categorical
        if spec.feature_spec[name].hotness != 1
    )
    model = dataclasses.replace(
        cfg.model, numerical_features=len(spec.numerical), table_rows=spec.cardinalities
    )
    raise_all(_disagreements(cfg, model, folder))
    cfg = dataclasses.replace(
        cfg,
        model=model,
        dataset=identity.of_dataset(folder),
        negative_rate=negatives.negative_rate(folder),
    )
    cfg = _with_schedule(cfg, spec, folder)
    best = spec.metadata.get("best_auc")
    return _with_best_auc(cfg, best) if isinstance(best, float) else cfg


def _training_rows(cfg: DlrmRun) -> int:
    """How many there are, or would be in a log of a common size."""
    if cfg.data is None:
        return auto.COMMON_ROWS
    if is_generated(cfg.data):
        return filled(cfg.synthetic_rows)
    try:
        spec = feature_spec.read(Path(cfg.data))
        rows = feature_spec.count_rows(spec, Path(cfg.data), "train")
    except InputError:  # said already; or enough to evaluate on
        return auto.COMMON_ROWS
    return max(rows_trained_on(cfg, rows), 1)


def _with_schedule(cfg: DlrmRun, spec: feature_spec.FeatureSpec, folder: Path) -> DlrmRun:
    """The learning rate as long as the log is, where nobody chose another."""
    if cfg.name == auto.NAME or "schedule" not in fitted_fields(cfg):
        return dataclasses.replace(cfg, schedule_steps=None)
    if not cfg.global_batch:
        return cfg
    try:
        rows = feature_spec.count_rows(spec, folder, "train")
    except InputError:  # enough to evaluate on
        return cfg
    steps = cfg.epochs * -(-rows // cfg.global_batch)
    return dataclasses.replace(cfg, schedule=demo_schedule(steps), schedule_steps=steps)


def _disagreements(cfg: DlrmRun, dataset: Model, folder: Path) -> Iterator[str]:
    """Sizes that are neither the named run's, as if not given, nor the dataset's."""
    named = RUNS[cfg.name]().model
    for name in ("numerical_features", "table_rows"):
        given, there = getattr(cfg.model, name), getattr(dataset, name)
        if given not in (getattr(named, name), there):
            yield (
                f"model.{name} is {_words(given)}, but {folder} has {_words(there)}. Give data of "
                f"the model's sizes (prepare's --vocabulary makes them), or leave model.{name} out "
                "of the flags and the --config file: a dataset brings its own."
            )


def _words(sizes: int | tuple[int, ...]) -> str:
    return " ".join(map(str, sizes)) if isinstance(sizes, tuple) else str(sizes)


def _with_best_auc(cfg: DlrmRun, best: float) -> DlrmRun:
    if not math.isfinite(best):  # too few rows to have clicks and others
        return cfg
    target = share_of_excess(best, PLANTED_TARGET) if cfg.target is None else cfg.target
    return dataclasses.replace(cfg, best_auc=best, target=target)


def on_other_data(cfg: DlrmRun, data: str) -> DlrmRun:
    """A finished run's settings for other data: without what its own gave it."""
    named = RUNS[cfg.name]()
    cfg = dataclasses.replace(cfg, dataset=())
    if cfg.name == auto.NAME:
        cfg = auto.unfit(cfg)
    elif "schedule" in fitted_fields(cfg):
        cfg = dataclasses.replace(cfg, schedule=named.schedule, schedule_steps=None)
    # Generated rows have the sizes that a run asks for.
    if not is_generated(cfg.data) and not is_generated(data):
        model = dataclasses.replace(
            cfg.model,
            numerical_features=named.model.numerical_features,
            table_rows=named.model.table_rows,
        )
        cfg = dataclasses.replace(cfg, model=model)
    if cfg.best_auc is None:
        return cfg
    from_best = cfg.target == share_of_excess(cfg.best_auc, PLANTED_TARGET)
    return dataclasses.replace(cfg, best_auc=None, target=None if from_best else cfg.target)


def check_data(cfg: DlrmRun, data: str) -> None:
    """Refuse a dataset whose ids stand for other values than those that a run has learned."""
    if data == TERABYTE:
        if how := identity.difference(cfg.dataset, terabyte_lines(cfg)):
            raise InputError(f"The planted Terabyte is not what the model was trained on: {how}.")
    elif data != SYNTHETIC:
        identity.check(cfg.dataset, Path(data), cfg.data)


def grown_tables(cfg: DlrmRun, data: str) -> dict[str, int]:
    """Tables that are larger in a dataset that extends a run's -> their rows in the run."""
    if data == SYNTHETIC or not identity.extends(cfg.dataset, Path(data)):
        return {}
    before, now = cfg.model.table_rows, feature_spec.read(Path(data)).cardinalities
    return {
        f"tables.{number}": rows
        for number, (rows, more) in enumerate(zip(before, now, strict=True))
        if rows != more
    }


# --- checks


def _model_problems(cfg: DlrmRun) -> list[str]:
    model, problems = cfg.model, []
    if not model.bottom_mlp or model.bottom_mlp[-1] != model.embedding_dim:
        problems.append(
            f"The last width of model.bottom_mlp must equal model.embedding_dim "
            f"({model.embedding_dim}). Received: {model.bottom_mlp}. Change one of them, or leave "
            "model.bottom_mlp out: the named run's own follows model.embedding_dim."
        )
    if not model.top_mlp or model.top_mlp[-1] != 1:
        problems.append(f"The last width of model.top_mlp must be 1. Received: {model.top_mlp}.")
    if not problems and table_parameters(model) + dense_parameters(model) > MAX_PARAMETERS:
        problems.append(
            f"The model has {table_parameters(model) + dense_parameters(model):.2g} parameters; "
            "no machine can count that far. Check model.table_rows and the widths."
        )
    if cfg.data == SYNTHETIC and cfg.synthetic_ids == "planted" and _features(model) > MAX_PLANTED:
        problems.append(
            f"Planted rows have at most {MAX_PLANTED:,} features. Received: {_features(model):,}. "
            "Ask for fewer, or for --synthetic-ids uniform."
        )
    decay = cfg.optimizer.weight_decay
    if decay * cfg.lr >= 1:
        problems.append(
            f"lr {cfg.lr} times optimizer.weight_decay {decay} is the share that a step takes off "
            "the weights: it must be below 1. Lower one of them."
        )
    return problems


def _features(model: Model) -> int:
    return model.numerical_features + len(model.table_rows)


def _sharding_problems(cfg: DlrmRun) -> list[str]:
    sharding, tables = cfg.sharding, len(cfg.model.table_rows)
    problems = []
    if sharding.placement not in PLACEMENTS and not sharding.placement.endswith(".json"):
        error = unknown("placement", sharding.placement, PLACEMENTS)
        problems.append(f"{error} Or give a .json file that 'trainmark plan --json' wrote.")
    problems += [
        f"host_tables: table {table} does not exist; the tables are 0 to {tables - 1}."
        for table in sharding.host_tables
        if not 0 <= table < tables
    ]
    if sharding.engine == "torchrec":
        problems += _torchrec_problems(cfg)
    return problems


def _torchrec_problems(cfg: DlrmRun) -> list[str]:
    sharding = cfg.sharding
    problems = [
        f"{name} is for --engine native: TorchRec's engine has no such tables. Leave it out."
        for name in ("host_tables", "data_parallel_threshold")
        if getattr(sharding, name)
    ]
    if sharding.column_slice_threshold and sharding.placement == "auto":
        problems.append(
            "column_slice_threshold does nothing with --engine torchrec --placement auto, which is "
            "TorchRec's own planner. Choose another placement, or leave it out."
        )
    if cfg.optimizer.weight_decay:
        problems.append(
            "optimizer.weight_decay is for --engine native: TorchRec's engine decays no rows. "
            f"Received: {cfg.optimizer.weight_decay}. Leave one of them out."
        )
    return problems


def _width_problems(cfg: DlrmRun) -> list[str]:
    """Of tables that are narrower than others."""
    model, chosen = cfg.model, cfg.model.table_widths
    if chosen is None:
        return []
    if chosen != "auto":
        found = f"Received: {_words(chosen)}."
        if len(chosen) != len(model.table_rows):
            return [
                f"model.table_widths must have a width for each of the {len(model.table_rows)} "
                f"tables. {found}"
            ]
        if not all(1 <= width <= model.embedding_dim for width in chosen):
            return [
                "model.table_widths must lie between 1 and model.embedding_dim "
                f"({model.embedding_dim}). {found}"
            ]
    if min(model.table_rows, default=1) < 1 or not has_narrow_tables(model):
        return []
    sharding = cfg.sharding
    reasons = {
        "--engine torchrec": sharding.engine == "torchrec",
        f"--table-precision {cfg.table_format.table_precision}": in_other_formats(cfg),
        f"--placement {sharding.placement}": sharding.placement.endswith(".json"),
        "--column-slice-threshold": sharding.column_slice_threshold is not None,
        "--data-parallel-threshold": sharding.data_parallel_threshold is not None,
    }
    return [
        "Tables of several widths are fp32, and lie whole on one device each, in this version. "
        f"Received: model.table_widths with {reason}. Leave one of them out."
        for reason, is_so in reasons.items()
        if is_so
    ]


def _interaction_problems(model: Model) -> list[str]:
    chosen, width = model.interaction, joined_width(model)
    owners = {"cross_layers": "dcn", "cross_rank": "dcn"}
    owners |= {"branch1_mlp": "projection", "branch2_mlp": "projection"}
    problems = [
        f"model.{name} is for --model.interaction {owner}. Received: {getattr(model, name)} with "
        f"interaction {chosen}. Leave it out, or choose {owner}."
        for name, owner in owners.items()
        if getattr(model, name) is not None and chosen != owner
    ]
    rank = model.cross_rank
    if chosen == "dcn" and isinstance(rank, int) and rank > width:
        problems.append(
            f"model.cross_rank must not exceed the width of the cross network, {width} "
            f"({len(model.table_rows)} tables and the bottom MLP, of {model.embedding_dim} each). "
            f"Received: {rank}. Lower it, or ask for --model.cross-rank full."
        )
    for name in ("branch1_mlp", "branch2_mlp") if chosen == "projection" else ():
        own = getattr(model, name)
        if own is not None and (not own or own[-1] % model.embedding_dim):
            problems.append(
                f"The last width of model.{name} must be a multiple of model.embedding_dim "
                f"({model.embedding_dim}). Received: {own}."
            )
    return problems


def _format_problems(cfg: DlrmRun, cluster: Cluster) -> list[str]:
    chosen, tables = cfg.table_format, len(cfg.model.table_rows)
    problems = [
        f"fp32_tables: table {table} does not exist; the tables are 0 to {tables - 1}."
        for table in chosen.fp32_tables
        if not 0 <= table < tables
    ]
    if not in_other_formats(cfg):
        return problems
    received = f"Received: --table-precision {chosen.table_precision}"
    if chosen.table_precision == "fp8" and lacks(cluster.hardware, "fp8"):
        problems.append(
            f"fp8 tables need a GPU that knows fp8 numbers, such as an H100. {received} on "
            f"{cluster}. Use int8."
        )
    if cluster.world > 1 or cfg.sharding.host_tables or cfg.sharding.force_exchange:
        problems.append(
            "Tables that are exchanged between devices, or with the host, are fp32 in this "
            f"version. {received} on {cluster}."
        )
    if cfg.sharding.engine == "torchrec":
        problems.append(f"TorchRec's tables are fp32 here. {received}.")
    if cfg.optimizer.name == "adam":
        problems.append(
            f"Adam needs fp32 tables. {received}. Leave it out, or use --optimizer.name sgd, "
            "adagrad or rowwise_adagrad."
        )
    return problems
