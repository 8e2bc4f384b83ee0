"""Llama-3's configuration and its named runs, after FlagPerf's llama3_8b on Megatron-core."""

import dataclasses
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal, get_args

from trainmark.bounds import Count, Ids, Layers, NotNegative, Positive, Share, Width
from trainmark.config import SYNTHETIC, TUNABLE, Better, Hidden, Run, Schedule, filled
from trainmark.corpus.dataset import parse_split
from trainmark.errors import InputError
from trainmark.files import read_json

NOTHING_HELD_OUT = "100,0,0"


@dataclass(frozen=True, kw_only=True)
class Model:
    """The network. With `weights`, it comes from their config.json."""

    layers: Layers = 32
    """Transformer blocks."""
    hidden: Width = 4096
    """Width of a token's vector."""
    ffn: Width = 14336
    """Width inside a block's SwiGLU."""
    heads: Width = 32
    """Query heads."""
    kv_heads: Width = 8
    """Key and value heads; each serves heads / kv_heads query heads."""
    vocab: Ids = 128256
    """Token ids."""
    rope_theta: Positive = 500_000.0
    """Base of the rotary position embedding."""
    norm_eps: Positive = 1e-5
    """Added to the mean square in RMSNorm."""
    init_std: Positive = 0.008
    """Standard deviation of the initial weights (published: 0.008)."""

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def block_parameters(self) -> int:
        """Weights of one block's seven matrices."""
        attention = 2 * self.hidden * (self.heads + self.kv_heads) * self.head_dim
        return attention + 3 * self.hidden * self.ffn

    @property
    def parameters(self) -> int:
        norms = (2 * self.layers + 1) * self.hidden
        return self.layers * self.block_parameters + 2 * self.vocab * self.hidden + norms

    def head_in_layers(self, sequence: int) -> float:
        """The head's arithmetic as a multiple of one block's: 2.09 for Llama-3-8B at 8192."""
        attention = 2 * self.hidden * sequence / 2  # causal: half of the square, two products
        return self.vocab * self.hidden / (self.block_parameters + attention)


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """AdamW, without weight decay on norms, with clipping of the global gradient norm."""

    beta1: Share = 0.9
    """Decay of the first moment."""
    beta2: Share = 0.95
    """Decay of the second moment."""
    eps: Positive = 1e-8
    """Added to the denominator."""
    weight_decay: NotNegative = 0.1
    """Decoupled weight decay of matrices."""
    clip: NotNegative = 1.0
    """Largest norm of the whole gradient; 0 turns clipping off."""


Recompute = Literal["none", "selective", "full"]  # by what they keep, the most first


@dataclass(frozen=True, kw_only=True)
class LlamaRun(Run):
    """A Llama-3 run."""

    metric: ClassVar[str] = "loss"
    better: ClassVar[Better] = "lower"

    workload: Hidden = "llama3"
    model: Model = Model()
    optimizer: Optimizer = Optimizer()
    sequence: Width = 8192
    """Tokens of a sample."""
    weights: str | None = None
    """Hugging Face folder of a Llama to start from; default: random weights."""
    parallel: str | None = None
    """How the devices are split, such as PP2DP4TP1; default: all of them data-parallel."""
    pipeline: Literal["1f1b", "interleaved"] = "1f1b"
    """Pipeline schedule; interleaved gives every rank two stages."""
    data_parallel: Literal["zero1", "fsdp"] = "zero1"
    """What data-parallel ranks shard: optimiser states (as published), or weights too."""
    recompute: Recompute = "none"
    """Activations to recompute in the backward pass: none, all but GEMMs and attention, or all."""
    attention: Literal["auto", "cudnn", "flash", "efficient", "math"] = "auto"
    """Back end of scaled dot product attention; auto takes the fastest that can run."""
    optimizer_states: Literal["fp32", "bf16"] = "fp32"
    """fp32 keeps master weights and moments in fp32; bf16 has moments in bf16 and, for masters,
    eight more bits of each weight, rounded stochastically: 9 bytes a parameter, not 16."""
    train_samples: Count | None = None
    """Samples that the order of the data is drawn for, repeating documents as needed; default:
    max_steps x global batch, or one pass."""
    split: str | None = NOTHING_HELD_OUT
    """Shares of the documents for training, validation and test; the demo's default: 98,1,1 where
    the documents are enough for it, else 100,0,0."""
    synthetic_samples: Count = 65_536
    """Training samples of `--data synthetic`."""


# --- named runs

_PUBLISHED_STEPS = 300


def llama3_8b() -> LlamaRun:
    """FlagPerf, cases 1x8, 2x8 and 55x8; the real Llama-3-8B.

    Its fix_hp row is --global-batch 1760 --parallel PP1DP220TP2 (55x8).
    """
    return LlamaRun(
        name="llama3-8b",
        global_batch=512,
        micro_batch=1,
        precision="bf16",
        lr=1e-5,
        schedule=_cosine(_PUBLISHED_STEPS),
        max_steps=_PUBLISHED_STEPS,
        seed=1234,
        evals_per_epoch=0,
        warmup_clock=5,
        log_every=1,
        checkpoint_every="never",
    )


def llama3_8b_fp8() -> LlamaRun:
    """FlagPerf's fp8 rows: linear layers of the blocks in fp8."""
    return dataclasses.replace(llama3_8b(), name="llama3-8b-fp8", precision="fp8")


def llama3_1b() -> LlamaRun:
    """1.5 B parameters: the shape of Llama-3.2-1B with a head of its own."""
    return dataclasses.replace(
        llama3_8b(),
        name="llama3-1b",
        model=Model(layers=16, hidden=2048, ffn=8192, heads=32, kv_heads=8, init_std=0.02),
        sequence=2048,
        global_batch=16,
        micro_batch=8,
        lr=3e-4,
        schedule=dataclasses.replace(_cosine(_PUBLISHED_STEPS - 20, start=20), warmup_steps=20),
        checkpoint_every="10 minutes",
    )


def llama3_demo() -> LlamaRun:
    """A made-up language of known entropy that two CPU cores learn in a minute."""
    return LlamaRun(
        name="llama3-demo",
        data=SYNTHETIC,
        model=Model(
            layers=2, hidden=64, ffn=192, heads=4, kv_heads=2, vocab=128, rope_theta=10_000.0,
            init_std=0.02,
        ),
        sequence=64,
        global_batch=16,
        eval_batch=16,
        lr=6e-3,
        schedule=dataclasses.replace(_cosine(270, start=30), warmup_steps=30),
        max_steps=300,
        split=None,
        stop_at_target=False,
        log_every=20,
        synthetic_samples=4_800,
    )  # fmt: skip


def _cosine(steps: int, start: int = 0) -> Schedule:
    """From the peak to a tenth of it, as published."""
    return Schedule(decay_start=start, decay_steps=steps, decay="cosine", end_factor=0.1)


RUNS: dict[str, Callable[[], LlamaRun]] = {
    "llama3-demo": llama3_demo,
    "llama3-1b": llama3_1b,
    "llama3-8b": llama3_8b,
    "llama3-8b-fp8": llama3_8b_fp8,
}


def closed(cfg: LlamaRun) -> frozenset[str]:
    """Top-level fields that may change while a result stays comparable with the named run's."""
    # Not the optimiser: its states have the published precision.
    fields = {*TUNABLE, "parallel", "pipeline", "data_parallel", "recompute", "attention"}
    if cfg.train_samples == (cfg.max_steps or 0) * (cfg.global_batch or 0):
        fields.add("train_samples")  # filled in, not chosen
    if cfg.name == "llama3-demo":
        fields |= {"model", "target", "split"}  # those of whatever text was prepared for it
    return frozenset(fields)


# --- notes


def notes(cfg: LlamaRun) -> list[str]:
    """What a reader of the result must know about how it came about."""
    found = []
    if cfg.weights and read_json(Path(cfg.weights) / "config.json").get("tie_word_embeddings"):
        found.append(
            f"{cfg.weights} has one matrix for embedding and head; here they were trained as two, "
            "which began alike."
        )
    if cfg.data != SYNTHETIC and parse_split(filled(cfg.split))["train"] >= 1:
        found.append(
            f"No document was held out (split {cfg.split}): the only loss is that of training."
        )
    return found


# --- sizes


def sizes(cfg: LlamaRun) -> dict[str, int]:
    """What `list` and `show` print about the model."""
    return {
        "parameters": cfg.model.parameters,
        "tokens per step": (cfg.global_batch or 0) * cfg.sequence,
    }


# --- other devices, less memory


def for_prediction(cfg: LlamaRun) -> LlamaRun:
    """Split over the devices here, not over those that trained it."""
    return dataclasses.replace(cfg, parallel=None)


def smaller(cfg: LlamaRun) -> Iterator[tuple[str, LlamaRun]]:
    """Recomputing, which costs time alone; then states in bf16; then both."""
    levels: tuple[Recompute, ...] = get_args(Recompute)
    recomputing = [
        (f"--recompute {level}", dataclasses.replace(cfg, recompute=level))
        for level in levels[levels.index(cfg.recompute) + 1 :]
    ]
    yield from recomputing
    if cfg.optimizer_states == "fp32":
        for flag, run in [("", cfg), *recomputing]:
            both = f"--optimizer-states bf16 {flag}".strip()
            yield both, dataclasses.replace(run, optimizer_states="bf16")


# --- parallel degrees


def parse_parallel(text: str) -> dict[str, int]:
    """`PP2DP4TP1` as the degrees of pipeline, data and tensor parallelism, outermost first."""
    match = re.fullmatch(r"PP([1-9]\d*)DP([1-9]\d*)TP([1-9]\d*)", text, re.ASCII)
    if match is None:
        raise InputError(
            f"parallel must look like PP2DP4TP1 (pipeline, data and tensor degrees). "
            f"Received: {text!r}."
        )
    return dict(zip(("pp", "dp", "tp"), map(int, match.groups()), strict=True))


def mesh_axes(cfg: LlamaRun, world: int) -> dict[str, int]:
    """The named degrees of parallelism over `world` devices."""
    if cfg.parallel is None:
        return {"pp": 1, "dp": world, "tp": 1}
    axes = parse_parallel(cfg.parallel)
    if math.prod(axes.values()) != world:
        product = " x ".join(map(str, axes.values()))
        raise InputError(
            f"parallel {cfg.parallel} needs {product} = {math.prod(axes.values())} devices; there "
            f"are {world}. The three degrees must multiply to the number of devices."
        )
    return axes


def axes_of(cfg: LlamaRun) -> dict[str, int]:
    """The degrees of a resolved configuration."""
    return parse_parallel(cfg.parallel or "PP1DP1TP1")


def stages_per_rank(cfg: LlamaRun) -> int:
    """Parts of the model that a pipeline rank owns."""
    return 2 if cfg.pipeline == "interleaved" and axes_of(cfg)["pp"] > 1 else 1
