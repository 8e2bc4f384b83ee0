"""Resolving a Llama-3 run: what weights and data fill in, and everything that is wrong with it."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

from trainmark import checksums
from trainmark.config import SYNTHETIC, filled
from trainmark.corpus import dataset
from trainmark.errors import InputError
from trainmark.hardware.devices import Cluster
from trainmark.resolve import resolve_batches
from trainmark.workloads.llama3 import chain, huggingface
from trainmark.workloads.llama3.runs import (
    NOTHING_HELD_OUT,
    LlamaRun,
    axes_of,
    mesh_axes,
    stages_per_rank,
)

_SOME_HELD_OUT = "98,1,1"


def resolve(cfg: LlamaRun, cluster: Cluster) -> tuple[LlamaRun, list[str]]:
    """Fill in the splits, the network of `weights`, the vocabulary, and the samples to draw."""
    axes = mesh_axes(cfg, cluster.world)
    cfg = dataclasses.replace(
        cfg, parallel="".join(f"{axis.upper()}{degree}" for axis, degree in axes.items())
    )
    if cfg.data is None:
        return cfg, [
            f"{cfg.name} needs data: give --data DIR (see 'trainmark prepare tokens'), or "
            "--data synthetic to measure speed without data."
        ]
    try:
        cfg = _with_data(_with_weights(cfg))
    except InputError as error:
        return cfg, [str(error)]
    return cfg, [
        *_model_problems(cfg),
        *_parallel_problems(cfg, axes),
        *_held_out_problems(cfg),
        *_device_problems(cfg, cluster),
    ]


def _with_weights(cfg: LlamaRun) -> LlamaRun:
    if cfg.weights is None:
        return cfg
    checksums.check(Path(cfg.weights))
    return dataclasses.replace(cfg, model=huggingface.read_model(Path(cfg.weights)))


def _with_data(cfg: LlamaRun) -> LlamaRun:
    if cfg.data == SYNTHETIC:
        best = chain.ENTROPY * chain.TARGET if cfg.name == "llama3-demo" else None
        cfg = dataclasses.replace(
            cfg,
            target=cfg.target if cfg.target is not None else best,
            split=_SOME_HELD_OUT if cfg.split is None else cfg.split,
        )
        available = cfg.synthetic_samples
    else:
        found = dataset.find(Path(cfg.data or ""))
        if cfg.name == "llama3-demo" and cfg.weights is None:
            vocab = -(-found.vocab_size // 128) * 128
            cfg = dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, vocab=vocab))
        elif found.vocab_size > cfg.model.vocab:
            raise InputError(
                f"{cfg.data} was prepared for {found.vocab_size:,} token ids, but {cfg.name} has "
                f"{cfg.model.vocab:,}. Prepare it with the model's tokenizer{_or_flag(cfg, found)}."
            )
        split = _fitting_split(found, cfg.sequence) if cfg.split is None else cfg.split
        found.check_splits(split, cfg.sequence)
        available = found.samples("train", split, cfg.sequence)
        cfg = dataclasses.replace(cfg, split=split)
    return dataclasses.replace(cfg, train_samples=cfg.train_samples or _wanted(cfg, available))


def _or_flag(cfg: LlamaRun, found: dataset.TokenFolder) -> str:
    if cfg.weights is not None:  # which bring their vocabulary
        return ""
    return f", or give --model.vocab {-(-found.vocab_size // 128) * 128}"


def _fitting_split(found: dataset.TokenFolder, sequence: int) -> str:
    """A single text is one document: then all of it is for training."""
    return NOTHING_HELD_OUT if found.short_splits(_SOME_HELD_OUT, sequence) else _SOME_HELD_OUT


def _wanted(cfg: LlamaRun, available: int) -> int:
    if cfg.max_steps is None or cfg.global_batch is None:
        return available
    return cfg.max_steps * cfg.global_batch


# --- checks


def _model_problems(cfg: LlamaRun) -> Iterator[str]:
    model = cfg.model
    if model.hidden % model.heads or model.heads % model.kv_heads or model.head_dim % 2:
        yield (
            f"model.heads ({model.heads}) must divide model.hidden ({model.hidden}) into heads of "
            f"even width, and model.kv_heads ({model.kv_heads}) must divide model.heads."
        )
    if cfg.optimizer_states == "bf16" and cfg.precision not in ("bf16", "fp8"):
        yield (
            "optimizer_states bf16 keeps the weights in bf16: it needs precision bf16 or fp8. "
            f"Received: {cfg.precision}."
        )


def _held_out_problems(cfg: LlamaRun) -> list[str]:
    if cfg.data == SYNTHETIC or cfg.split is None:
        return []
    if dataset.parse_split(cfg.split)[cfg.quality_split]:
        return []
    asked = {
        "target": cfg.target is not None,
        "initial_evaluation": cfg.initial_evaluation,
        f"evals_per_epoch {cfg.evals_per_epoch}": cfg.evals_per_epoch > 1,  # 1: at the end, if any
    }
    return [
        f"{name} needs documents of the {cfg.quality_split} split, but split {cfg.split} holds "
        f"none out for it. Give another --split, such as {_SOME_HELD_OUT}, or another "
        "--quality-split."
        for name, is_asked in asked.items()
        if is_asked
    ]


def _parallel_problems(cfg: LlamaRun, axes: dict[str, int]) -> Iterator[str]:
    model, tp = cfg.model, axes["tp"]
    divisible = {
        "model.kv_heads": model.kv_heads,
        "model.ffn": model.ffn,
        "model.vocab": model.vocab,
        "sequence": cfg.sequence,
    }
    for name, value in divisible.items():
        if value % tp:
            yield f"TP{tp} cannot split {name} ({value}) evenly."
    stages = axes["pp"] * stages_per_rank(cfg)
    if stages > model.layers:
        yield f"{stages} pipeline stages need at least as many layers ({model.layers})."
    yield from _schedule_problems(cfg, axes)


def _schedule_problems(cfg: LlamaRun, axes: dict[str, int]) -> list[str]:
    """Whether a step has the micro-batches that its pipeline needs."""
    cfg, wrong_batches = resolve_batches(cfg, axes["dp"])
    if axes["pp"] == 1 or wrong_batches:  # `resolve_run` reports them
        return []
    received = (
        f"Received: accumulate {cfg.accumulate} (global_batch {cfg.global_batch}, micro_batch "
        f"{cfg.micro_batch}). Lower micro_batch, or raise global_batch."
    )
    if stages_per_rank(cfg) > 1 and filled(cfg.accumulate) % axes["pp"]:
        return [
            f"The interleaved schedule needs a multiple of PP ({axes['pp']}) micro-batches. "
            f"{received}"
        ]
    if filled(cfg.accumulate) < axes["pp"]:
        return [f"PP{axes['pp']} needs at least as many micro-batches in a step. {received}"]
    return []


def _device_problems(cfg: LlamaRun, cluster: Cluster) -> Iterator[str]:
    if cluster.hardware == "cpu" and cfg.attention in ("cudnn", "efficient"):
        yield f"attention {cfg.attention} needs a GPU; use auto."
    if cfg.precision == "fp8":
        yield from _fp8_problems(cfg)


def _fp8_problems(cfg: LlamaRun) -> Iterator[str]:
    """Of products whose sides are no multiples of 16, which fp8 tensor cores do not take."""
    model, axes = cfg.model, axes_of(cfg)
    widths = {
        "model.hidden": model.hidden,
        "keys (kv_heads x hidden / heads)": model.kv_heads * model.head_dim,
        "model.ffn": model.ffn,
    }
    for name, width in widths.items():
        if width % (16 * axes["tp"]):
            yield (
                f"fp8 needs each rank's part of {name} to be a multiple of 16. Received: {width} "
                f"over TP{axes['tp']}."
            )
    batches, wrong = resolve_batches(cfg, axes["dp"])
    tokens = 0 if wrong else filled(batches.micro_batch) * cfg.sequence  # `resolve_run` reports it
    if tokens % 16:
        yield f"fp8 needs a micro-batch of a multiple of 16 tokens. Received: {tokens}."
