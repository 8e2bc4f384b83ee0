"""DistilBERT's configuration and its named runs, after FlagPerf's distilbert-pytorch."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from trainmark.config import OBSERVATION, SYNTHETIC, Hidden, Run, target_problems
from trainmark.corpus import sentences
from trainmark.corpus.sentences import Sentences
from trainmark.errors import InputError
from trainmark.hardware import Cluster
from trainmark.schedule import Schedule
from trainmark.workloads.distilbert import opinions

METRIC, BETTER = "accuracy", "higher"
SCRATCH = "scratch"
PUBLISHED_MICRO_BATCH = 32
BUDGET_MULTIPLE = 128  # token counts that matrix units like

# Fields that a closed run may change: what a vendor may tune while the result stays comparable.
_CLOSED = OBSERVATION | {
    "data", "weights", "seed", "device", "precision", "loss_scale", "compile", "eager",
    "micro_batch", "accumulate", "eval_batch", "last_batch", "evals_per_epoch",
    "initial_evaluation", "stop_at_target", "warmup_clock",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Model:
    """The network. With `weights`, everything but `labels` comes from their config.json."""

    layout: Literal["distilbert", "bert"] = "distilbert"
    """Whose network it is; they differ in the head and in where dropout is applied."""
    vocabulary: int = 30522
    """Number of token ids."""
    positions: int = 512
    """Longest sentence, in tokens, that the position embeddings allow."""
    hidden: int = 768
    """Width of a token's vector."""
    layers: int = 6
    """Transformer blocks."""
    heads: int = 12
    """Attention heads."""
    feed_forward: int = 3072
    """Width inside a block's feed-forward network."""
    dropout: float = 0.1
    """Dropout of embeddings and block outputs."""
    attention_dropout: float = 0.1
    """Dropout of attention probabilities."""
    head_dropout: float = 0.2
    """Dropout in the classification head."""
    layer_norm_eps: float = 1e-12
    """Added to the variance in LayerNorm."""
    labels: int = 2
    """Number of classes."""


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """AdamW, without weight decay on biases and LayerNorm."""

    weight_decay: float = 0.0
    """Weight decay of matrices and embeddings (published: 0)."""
    beta1: float = 0.9
    """Decay of the first moment."""
    beta2: float = 0.999
    """Decay of the second moment."""
    eps: float = 1e-8
    """Added to the denominator."""


@dataclass(frozen=True, kw_only=True)
class DistilbertRun(Run):
    """A DistilBERT run."""

    workload: Hidden = "distilbert"
    global_batch: int | None = 256
    lr: float = 5e-5
    quality_split: Literal["test", "validation"] = "validation"
    weights: str | None = None
    """Hugging Face folder (DistilBERT or BERT) to start from; default: `model/` in the data folder
    if it holds weights. `scratch` starts from random weights."""
    mode: Literal["padded", "packed"] = "padded"
    """`padded` computes sequence_length tokens for every sentence, as published; `packed` computes
    the sentences' own tokens only."""
    sequence_length: int = 512
    """Tokens that a padded sentence is computed at."""
    token_budget: int | None = None
    """Packed: tokens that a micro-batch is filled up to, so that its shape is fixed; by default
    what the fullest micro-batch of the run needs."""
    longest: int | None = None
    """Packed: no sentence has more tokens than this; by default the data's longest."""
    linear_decay: bool = True
    """Let the rate fall linearly to 0 at the end of the last epoch (sets `schedule`)."""
    model: Model = Model()
    optimizer: Optimizer = Optimizer()
    synthetic_sentences: int = 67_349
    """Training sentences of `--data synthetic`."""
    synthetic_tokens: int = 25
    """Mean tokens of a synthetic sentence."""


# --- named runs


def distilbert_sst2() -> DistilbertRun:
    """FlagPerf, cases 1x1 (32 x 8 accumulated), 1x8 (32) and 2x8 (16).

    Its fix_hp rows are --global-batch 96 --micro-batch 96 --lr 1.5e-4 (1x1),
    --global-batch 768 --micro-batch 96 (1x8) and --global-batch 1536 --micro-batch 96 (2x8).
    """
    return DistilbertRun(
        name="distilbert-sst2",
        # 264 steps an epoch, in all three cases; `resolve` counts again for other data.
        schedule=Schedule(decay_start=0, decay_steps=2640, decay_power=1.0),
        epochs=10,
        initial_evaluation=True,
        target=0.91,
    )


def distilbert_demo() -> DistilbertRun:
    """Sentences in a made-up language, whose sentiment two CPU cores learn in a minute."""
    return DistilbertRun(
        name="distilbert-demo",
        data=SYNTHETIC,
        weights=SCRATCH,
        model=Model(vocabulary=512, positions=32, hidden=64, layers=2, heads=4, feed_forward=256),
        sequence_length=32,
        schedule=Schedule(decay_start=0, decay_steps=1280, decay_power=1.0),
        global_batch=64,
        eval_batch=256,
        lr=2e-3,
        epochs=5,
        evals_per_epoch=4,
        target=0.95,
        initial_evaluation=True,
        synthetic_sentences=16_384,
        synthetic_tokens=14,
    )


RUNS: dict[str, Callable[[], DistilbertRun]] = {
    "distilbert-demo": distilbert_demo,
    "distilbert-sst2": distilbert_sst2,
}


def closed(cfg: DistilbertRun) -> frozenset[str]:
    """Top-level fields that may change while a result stays comparable with the named run's."""
    return _CLOSED


# --- sizes


def encoder_weights(model: Model) -> int:
    """Weights of the matrices that every token passes through, in all blocks."""
    return model.layers * (4 * model.hidden**2 + 2 * model.hidden * model.feed_forward)


def parameters(model: Model) -> int:
    hidden, norm = model.hidden, 2 * model.hidden
    embeddings = (model.vocabulary + model.positions) * hidden + norm
    biases = model.layers * (5 * hidden + model.feed_forward + 2 * norm)
    head = hidden * hidden + hidden + (hidden + 1) * model.labels
    return embeddings + encoder_weights(model) + biases + head


def sizes(cfg: DistilbertRun) -> dict[str, float]:
    """What `list` and `show` print about the model."""
    return {"parameters": parameters(cfg.model)}


# --- resolve


def mesh_axes(cfg: DistilbertRun, world: int) -> dict[str, int]:
    """The named degrees of parallelism over `world` devices."""
    return {"dp": world}


def load_sentences(cfg: DistilbertRun, split: str) -> Sentences:
    """The sentences of `train` or `validation`, from the data folder or made up."""
    if cfg.data == SYNTHETIC:
        model, made_up = (
            cfg.model,
            opinions.Opinions(seed=cfg.seed, vocabulary=cfg.model.vocabulary),
        )
        count = cfg.synthetic_sentences if split == "train" else opinions.HELD_OUT
        return made_up.sentences(
            split, count, mean_tokens=cfg.synthetic_tokens, longest=model.positions
        )
    return sentences.load(Path(cfg.data or ""), "train" if split == "train" else "eval")


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
        problems = target_problems(cfg, METRIC) + _model_problems(cfg)
        if problems:
            return cfg, problems
        cfg = _with_batches(cfg, cluster.world)
        train = load_sentences(cfg, "train")
        cfg = _with_packing(_with_schedule(cfg, train), train)
        return cfg, _data_problems(cfg, train)
    except InputError as error:
        return cfg, [str(error)]


def _with_weights(cfg: DistilbertRun) -> DistilbertRun:
    from trainmark.workloads.distilbert import layouts

    weights = cfg.weights or _weights_beside_data(cfg) or SCRATCH
    if weights == SCRATCH:
        return dataclasses.replace(cfg, weights=SCRATCH)
    folder = Path(weights)
    if weights_file(folder) is None:
        raise InputError(
            f"--weights {folder}: expected a Hugging Face folder with config.json and "
            f"{' or '.join(_WEIGHT_FILES)}, or '{SCRATCH}'."
        )
    model = layouts.read_model(folder, cfg.model.labels)
    return dataclasses.replace(cfg, weights=weights, model=model)


_WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")


def weights_file(folder: Path) -> Path | None:
    """The file of tensors in a Hugging Face folder."""
    found = [folder / name for name in _WEIGHT_FILES if (folder / name).is_file()]
    return found[0] if found else None


def _weights_beside_data(cfg: DistilbertRun) -> str | None:
    if cfg.data in (None, SYNTHETIC):
        return None
    folder = Path(cfg.data or "") / sentences.MODEL_FOLDER
    return str(folder) if weights_file(folder) else None


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


def _data_problems(cfg: DistilbertRun, train: Sentences) -> list[str]:
    problems = []
    if train.vocabulary > cfg.model.vocabulary:
        problems.append(
            f"The data has token ids up to {train.vocabulary - 1}, but the model's vocabulary has "
            f"{cfg.model.vocabulary:,} tokens: they do not belong together. Prepare the data with "
            "the tokenizer of these weights."
        )
    name = "sequence_length" if cfg.mode == "padded" else "longest"
    allowed = getattr(cfg, name)
    if train.longest > allowed:
        problems.append(
            f"The data has sentences of {train.longest} tokens; {name} is {allowed}. "
            f"Prepare the data with --sequence-length {allowed}."
        )
    labels = int(train.labels.max()) + 1
    if labels > cfg.model.labels:
        problems.append(
            f"The data has labels up to {labels - 1}; give --model.labels {labels} "
            f"(now {cfg.model.labels})."
        )
    return problems


def _model_problems(cfg: DistilbertRun) -> list[str]:
    model, problems = cfg.model, []
    counts = ("vocabulary", "positions", "hidden", "layers", "heads", "feed_forward", "labels")
    named = [(f"model.{name}", getattr(model, name)) for name in counts]
    named += [
        (name, getattr(cfg, name))
        for name in (
            "sequence_length", "token_budget", "longest", "synthetic_sentences", "synthetic_tokens",
        )
    ]  # fmt: skip
    problems += [
        f"{name} must be at least 1. Received: {value}."
        for name, value in named
        if value is not None and value < 1
    ]
    if model.heads > 0 and model.hidden % model.heads:
        problems.append(f"model.heads ({model.heads}) must divide model.hidden ({model.hidden}).")
    for name in ("dropout", "attention_dropout", "head_dropout"):
        if not 0 <= getattr(model, name) < 1:
            problems.append(f"model.{name} must lie in [0, 1). Received: {getattr(model, name)}.")
    if cfg.sequence_length > model.positions:
        problems.append(
            f"sequence_length ({cfg.sequence_length}) must not exceed the model's positions "
            f"({model.positions})."
        )
    if cfg.quality_split != "validation":
        problems.append(
            "quality_split must be 'validation': this data has no other held-out split."
        )
    if cfg.data == SYNTHETIC and model.vocabulary <= opinions.FIRST_WORD:
        problems.append(f"Synthetic sentences need model.vocabulary above {opinions.FIRST_WORD}.")
    return problems


def notes(cfg: DistilbertRun) -> list[str]:
    """What a reader of the result must know about how it came about."""
    found = [
        f"Padded: every sentence was computed at {cfg.sequence_length} tokens."
        if cfg.mode == "padded"
        else "Packed: only the sentences' own tokens were computed, in micro-batches filled up to "
        f"{cfg.token_budget} tokens; the last block computed what the head reads."
    ]
    if cfg.weights == SCRATCH:
        found.append("No pretrained weights: trained from scratch.")
    return found
