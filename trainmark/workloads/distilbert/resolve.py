"""Resolving a DistilBERT run: what weights and data fill in, and everything that is wrong."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

from trainmark import checksums
from trainmark.config import SYNTHETIC
from trainmark.corpus import sentences
from trainmark.corpus.sentences import Sentences
from trainmark.errors import InputError
from trainmark.hardware.devices import Cluster
from trainmark.resolve import target_problems
from trainmark.workloads.distilbert import layouts, opinions
from trainmark.workloads.distilbert.runs import (
    BUDGET_MULTIPLE,
    SCRATCH,
    DistilbertRun,
    load_sentences,
)

PUBLISHED_MICRO_BATCH = 32


def resolve(cfg: DistilbertRun, cluster: Cluster) -> tuple[DistilbertRun, list[str]]:
    """Take the network from the weights' folder, batches from the case, the decay from the data."""
    if cfg.linear_decay:
        cfg = _decaying_after_warmup(cfg)
    if cfg.data is None:
        return cfg, [
            f"{cfg.name} needs data: give --data DIR (see 'trainmark prepare sst2'), or "
            "--data synthetic to measure speed without data."
        ]
    try:
        cfg = _with_weights(cfg)
        problems = [*target_problems(cfg), *_model_problems(cfg)]
        if problems:
            return cfg, problems
        cfg = _with_batches(cfg, cluster.world)
        train = load_sentences(cfg, "train")
        cfg = _with_packing(_with_schedule(cfg, train), train)
        return cfg, list(_data_problems(cfg, (train, load_sentences(cfg, "validation"))))
    except InputError as error:
        return cfg, [str(error)]


def _with_weights(cfg: DistilbertRun) -> DistilbertRun:
    weights = cfg.weights or _weights_beside_data(cfg) or SCRATCH
    if weights == SCRATCH:
        return dataclasses.replace(cfg, weights=SCRATCH)
    folder = Path(weights)
    if layouts.weights_file(folder) is None:
        raise InputError(
            f"--weights {folder}: expected a Hugging Face folder with config.json and "
            f"{' or '.join(layouts.WEIGHT_FILES)}, or '{SCRATCH}'."
        )
    checksums.check(folder)
    model = layouts.read_model(folder, cfg.model.labels)
    return dataclasses.replace(cfg, weights=weights, model=model)


def _weights_beside_data(cfg: DistilbertRun) -> str | None:
    if cfg.data in (None, SYNTHETIC):
        return None
    folder = Path(cfg.data or "") / sentences.MODEL_FOLDER
    return str(folder) if layouts.weights_file(folder) else None


def _with_batches(cfg: DistilbertRun, devices: int) -> DistilbertRun:
    """The published micro-batch, 32, wherever a device's share of the global batch allows it."""
    is_given = cfg.micro_batch is not None or cfg.accumulate is not None
    if cfg.name != "distilbert-sst2" or cfg.global_batch is None or is_given:
        return cfg
    share = cfg.global_batch // devices
    divides = share and share % PUBLISHED_MICRO_BATCH == 0
    return dataclasses.replace(cfg, micro_batch=PUBLISHED_MICRO_BATCH) if divides else cfg


def _with_packing(cfg: DistilbertRun, train: Sentences) -> DistilbertRun:
    if cfg.mode == "padded":
        return cfg
    held_out = load_sentences(cfg, "validation")
    longest = cfg.longest or max(train.longest, held_out.longest)
    group = cfg.micro_batch or cfg.global_batch or 1
    needed = cfg.token_budget or sentences.most_tokens(train, group, cfg.seed, cfg.epochs)
    budget = -(-needed // BUDGET_MULTIPLE) * BUDGET_MULTIPLE
    return dataclasses.replace(cfg, token_budget=budget, longest=longest)


def _decaying_after_warmup(cfg: DistilbertRun) -> DistilbertRun:
    """With a warm-up, the decay begins where it ends; how long it takes is up to the data."""
    schedule = dataclasses.replace(cfg.schedule, decay_start=cfg.schedule.warmup_steps)
    return dataclasses.replace(cfg, schedule=schedule)


def _with_schedule(cfg: DistilbertRun, train: Sentences) -> DistilbertRun:
    if not cfg.linear_decay or not cfg.global_batch:
        return cfg
    whole_steps, rest = divmod(len(train), cfg.global_batch)
    keeps_rest = rest > 0 and cfg.last_batch == "keep"
    steps = (whole_steps + keeps_rest) * cfg.epochs
    warmup = min(cfg.schedule.warmup_steps, steps - 1)
    schedule = dataclasses.replace(
        cfg.schedule, decay_start=warmup, decay_steps=steps - warmup, decay_power=1.0
    )
    return dataclasses.replace(cfg, schedule=schedule)


# --- checks


def _data_problems(cfg: DistilbertRun, splits: tuple[Sentences, ...]) -> Iterator[str]:
    vocabulary = max(split.vocabulary for split in splits)
    if vocabulary > cfg.model.vocabulary:
        remedy = (
            f"Give --model.vocabulary {vocabulary}."
            if cfg.weights == SCRATCH
            else "Prepare the data with the tokenizer of these weights."
        )
        yield (
            f"The data has token ids up to {vocabulary - 1}, but the model's vocabulary has "
            f"{cfg.model.vocabulary:,} tokens: they do not belong together. {remedy}"
        )
    longest = max(split.longest for split in splits)
    length = "sequence_length" if cfg.mode == "padded" else "longest"
    limits = {length: getattr(cfg, length), "model.positions": cfg.model.positions}
    too_short = [name for name, limit in limits.items() if limit < longest]
    if too_short:
        name = min(too_short, key=limits.__getitem__)
        flags = " ".join(f"--{name.replace('_', '-')} {longest}" for name in too_short)
        can_grow = cfg.weights == SCRATCH or "model.positions" not in too_short
        yield (
            f"The data has sentences of {longest} tokens; {name} is {limits[name]}. Prepare the "
            f"data with --sequence-length {limits[name]}{f', or give {flags}' if can_grow else ''}."
        )
    labels = max(int(split.labels.max()) for split in splits) + 1
    if labels > cfg.model.labels:
        yield (
            f"The data has labels up to {labels - 1}; give --model.labels {labels} "
            f"(now {cfg.model.labels})."
        )


def _model_problems(cfg: DistilbertRun) -> Iterator[str]:
    model = cfg.model
    if model.hidden % model.heads:
        yield f"model.heads ({model.heads}) must divide model.hidden ({model.hidden})."
    if cfg.sequence_length > model.positions:
        yield (
            f"sequence_length ({cfg.sequence_length}) must not exceed the model's positions "
            f"({model.positions})."
        )
    if cfg.quality_split != "validation":
        yield "quality_split must be 'validation': this data has no other held-out split."
    if cfg.data == SYNTHETIC and model.vocabulary <= opinions.FIRST_WORD:
        yield f"Synthetic sentences need model.vocabulary above {opinions.FIRST_WORD}."
