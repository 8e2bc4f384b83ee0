"""Resolving a DLRM run: what its data fills in, and everything that is wrong with it."""

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainmark.clickdata import feature_spec, identity, negatives, spec_rules, terabyte
from trainmark.config import SYNTHETIC, filled
from trainmark.errors import InputError, raise_all
from trainmark.hardware.devices import Cluster
from trainmark.metrics import share_of_excess
from trainmark.resolve import target_problems
from trainmark.workloads.dlrm import auto
from trainmark.workloads.dlrm.checks import model_problems
from trainmark.workloads.dlrm.crosses import CROSS_ROWS
from trainmark.workloads.dlrm.fitted import fitted_fields
from trainmark.workloads.dlrm.rows import planted_clicks, rows_trained_on, synthetic_range
from trainmark.workloads.dlrm.runs import (
    RUNS,
    SYNTHETIC_ROWS,
    TERABYTE,
    DlrmRun,
    Model,
    demo_schedule,
    is_generated,
    terabyte_range,
    with_model,
)

# Reaching 95 % of the best possible excess over 0.5 counts as learned, where the best is known.
PLANTED_TARGET = 0.95


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
        cfg = auto.fit(cfg, _log(cfg))
    cfg = _with_interaction_widths(cfg)
    problems += target_problems(cfg) + model_problems(cfg, cluster)
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
            f"Received: --shuffle {cfg.shuffle}. Give --shuffle none."
        )


def _with_matching_widths(cfg: DlrmRun) -> DlrmRun:
    """The named run's own bottom MLP ends at the embedding width, whatever that is now."""
    if cfg.name not in RUNS:  # made by code, as benchmarks do
        return cfg
    own, width = RUNS[cfg.name]().model.bottom_mlp, cfg.model.embedding_dim
    if cfg.model.bottom_mlp != own:  # the user's: checked, never changed
        return cfg
    return with_model(cfg, bottom_mlp=(*own[:-1], width))


def _with_interaction_widths(cfg: DlrmRun) -> DlrmRun:
    """The sizes that an interaction has of its own, where nobody said any."""
    model = cfg.model
    usual: dict[str, Any] = {}
    if model.interaction == "dcn":
        usual["cross_layers"], usual["cross_rank"] = model.cross_shape
    if model.interaction == "projection":
        usual["branch1_mlp"], usual["branch2_mlp"] = model.branches
    lacking = {name: size for name, size in usual.items() if getattr(model, name) is None}
    return with_model(cfg, **lacking)


def _with_dataset(cfg: DlrmRun, folder: Path) -> DlrmRun:
    if folder.is_file():
        raise InputError(
            "data must be a dataset's folder, as 'trainmark prepare' writes it. Received a file: "
            f"{folder}."
        )
    spec = feature_spec.read(folder)
    spec_rules.check(spec, source=str(feature_spec.path_of(folder)))
    model = dataclasses.replace(
        cfg.model,
        numerical_features=len(spec.numerical),
        table_rows=spec.cardinalities + (CROSS_ROWS,) * len(cfg.model.crosses),
        hotness=cfg.model.hotness if cfg.multi_hot == "uniform" else _hotness(spec),
        varies=spec.varies,
    )
    if cfg.multi_hot == "uniform" and (spec.varies or max(spec.hotness, default=1) > 1):
        raise InputError(
            f"--multi-hot uniform makes several ids per feature of one, and {folder} has several "
            "already. Use --multi-hot data."
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


def _log(cfg: DlrmRun) -> auto.Log:
    """What is known of the data, or would be of a common log."""
    common = auto.Log()
    if cfg.data is None:
        return common
    rate = common.clicks / common.rows
    if is_generated(cfg.data):
        rows = filled(cfg.synthetic_rows)
        return auto.Log(rows=rows, clicks=round(rows * rate))
    folder = Path(cfg.data)
    try:
        spec = feature_spec.read(folder)
        spec_rules.check(spec)
        rows = feature_spec.count_rows(spec, folder, "train")
    except InputError:  # said already; or enough to evaluate on
        return common
    rows = max(rows_trained_on(cfg, rows), 1)
    rate = negatives.click_rate(folder, otherwise=rate)
    return auto.Log(rows=rows, clicks=round(rows * min(rate, 1 - rate)))


def _with_schedule(cfg: DlrmRun, spec: feature_spec.FeatureSpec, folder: Path) -> DlrmRun:
    """The learning rate as long as the log is, where nobody chose another."""
    if cfg.name == auto.NAME:  # has all of it chosen at once
        return cfg
    if "schedule" not in fitted_fields(cfg):
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
    for name in ("numerical_features", "table_rows", "hotness"):
        given, there = getattr(cfg.model, name), getattr(dataset, name)
        if name == "table_rows":  # which crosses there are is for model.crosses to say
            there = dataset.feature_rows
            behind = set(given[len(there) :])
            given = given[: len(there)] if behind == {CROSS_ROWS} else given
        if given not in (getattr(named, name), there):
            yield (
                f"model.{name} is {_words(given)}, but {folder} has {_words(there)}. Give data of "
                f"the model's sizes (prepare's --vocabulary makes them), or leave model.{name} out "
                "of the flags and the --config file: a dataset brings its own."
            )


def _hotness(spec: feature_spec.FeatureSpec) -> tuple[int, ...] | None:
    """Ids per feature of a dataset; None if it has one of each."""
    return spec.hotness if max(spec.hotness, default=1) > 1 else None


def _words(sizes: int | tuple[int, ...] | None) -> str:
    if sizes is None:
        return "1 of each feature"
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
        cfg = with_model(
            cfg,
            numerical_features=named.model.numerical_features,
            table_rows=named.model.table_rows,
            hotness=named.model.hotness,
            varies=False,
        )
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


def check_weights(cfg: DlrmRun, earlier: DlrmRun) -> None:
    """Refuse weights of a network that differs in what no tensor's shape shows."""
    trained, asked_for = earlier.model.bottom_output, cfg.model.bottom_output
    if trained != asked_for:
        raise InputError(
            f"The weights to begin with were trained with model.bottom_output {trained}. Received: "
            f"{asked_for}. Give --model.bottom-output {trained}."
        )


def grown_tables(cfg: DlrmRun, data: str) -> dict[str, int]:
    """Tables that are larger in a dataset that extends a run's -> their rows in the run."""
    if data == SYNTHETIC or not identity.extends(cfg.dataset, Path(data)):
        return {}
    before, now = cfg.model.feature_rows, feature_spec.read(Path(data)).cardinalities
    return {
        f"tables.{number}": rows
        for number, (rows, more) in enumerate(zip(before, now, strict=True))
        if rows != more
    }
