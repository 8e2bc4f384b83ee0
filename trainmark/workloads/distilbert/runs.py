"""DistilBERT's configuration and its named runs, after FlagPerf's distilbert-pytorch."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from trainmark.bounds import Count, Examples, Ids, Layers, NotNegative, Positive, Share, Width
from trainmark.config import SYNTHETIC, TUNABLE, Better, Hidden, Run, Schedule
from trainmark.corpus import sentences
from trainmark.corpus.sentences import Sentences
from trainmark.workloads.distilbert import opinions

INFERENCE_BATCHES = (1, 8, 64)
SCRATCH = "scratch"
BUDGET_MULTIPLE = 128  # token counts that matrix units like


@dataclass(frozen=True, kw_only=True)
class Model:
    """The network. With `weights`, everything but `labels` comes from their config.json."""

    layout: Literal["distilbert", "bert"] = "distilbert"
    """Whose network it is; they differ in the head and in where dropout is applied."""
    vocabulary: Ids = 30522
    """Number of token ids."""
    positions: Width = 512
    """Longest sentence, in tokens, that the position embeddings allow."""
    hidden: Width = 768
    """Width of a token's vector."""
    layers: Layers = 6
    """Transformer blocks."""
    heads: Width = 12
    """Attention heads."""
    feed_forward: Width = 3072
    """Width inside a block's feed-forward network."""
    dropout: Share = 0.1
    """Dropout of embeddings and block outputs."""
    attention_dropout: Share = 0.1
    """Dropout of attention probabilities."""
    head_dropout: Share = 0.2
    """Dropout in the classification head."""
    layer_norm_eps: Positive = 1e-12
    """Added to the variance in LayerNorm."""
    labels: Width = 2
    """Number of classes."""

    @property
    def encoder_weights(self) -> int:
        """Weights of the matrices that every token passes through, in all blocks."""
        return self.layers * (4 * self.hidden**2 + 2 * self.hidden * self.feed_forward)

    @property
    def parameters(self) -> int:
        hidden, norm = self.hidden, 2 * self.hidden
        embeddings = (self.vocabulary + self.positions) * hidden + norm
        biases = self.layers * (5 * hidden + self.feed_forward + 2 * norm)
        head = hidden * hidden + hidden + (hidden + 1) * self.labels
        return embeddings + self.encoder_weights + biases + head


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """AdamW, without weight decay on biases and LayerNorm."""

    weight_decay: NotNegative = 0.0
    """Weight decay of matrices and embeddings (published: 0)."""
    beta1: Share = 0.9
    """Decay of the first moment."""
    beta2: Share = 0.999
    """Decay of the second moment."""
    eps: Positive = 1e-8
    """Added to the denominator."""


@dataclass(frozen=True, kw_only=True)
class DistilbertRun(Run):
    """A DistilBERT run."""

    metric: ClassVar[str] = "accuracy"
    better: ClassVar[Better] = "higher"

    workload: Hidden = "distilbert"
    global_batch: Count | None = 256
    lr: NotNegative = 5e-5
    quality_split: Literal["test", "validation"] = "validation"
    weights: str | None = None
    """Hugging Face folder (DistilBERT or BERT) to start from; default: `model/` in the data folder
    if it holds weights. `scratch` starts from random weights."""
    mode: Literal["padded", "packed"] = "padded"
    """`padded` computes sequence_length tokens for every sentence, as published; `packed` computes
    the sentences' own tokens only."""
    sequence_length: Width = 512
    """Tokens that a padded sentence is computed at."""
    token_budget: Count | None = None
    """Packed: tokens that a micro-batch is filled up to, so that its shape is fixed; by default
    what the fullest micro-batch of the run needs."""
    longest: Count | None = None
    """Packed: no sentence has more tokens than this; by default the data's longest."""
    linear_decay: bool = True
    """Let the rate fall linearly to 0 at the end of the last epoch (sets `schedule`)."""
    model: Model = Model()
    optimizer: Optimizer = Optimizer()
    synthetic_sentences: Examples = 67_349
    """Training sentences of `--data synthetic`."""
    synthetic_tokens: Width = 25
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
    return TUNABLE | {"weights", "last_batch", "stop_at_target"}


# --- sizes


def sizes(cfg: DistilbertRun) -> dict[str, int]:
    """What `list` and `show` print about the model."""
    return {"parameters": cfg.model.parameters}


# --- data


def load_sentences(cfg: DistilbertRun, split: str) -> Sentences:
    """The sentences of `train` or `validation`, from the data folder or made up."""
    if cfg.data == SYNTHETIC:
        language = opinions.Opinions(seed=cfg.seed, vocabulary=cfg.model.vocabulary)
        count = cfg.synthetic_sentences if split == "train" else opinions.HELD_OUT
        return language.sentences(
            split, count, mean_tokens=cfg.synthetic_tokens, longest=cfg.model.positions
        )
    return sentences.load(Path(cfg.data or ""), "train" if split == "train" else "eval")


# --- notes


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
