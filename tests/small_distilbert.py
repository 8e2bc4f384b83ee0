"""A DistilBERT so small that a step takes milliseconds, and what tests do with it."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.distributed.joining import cluster
from trainmark import workloads
from trainmark.corpus import sentences
from trainmark.corpus.sentences import Sentences
from trainmark.distributed.mesh import Mesh, single
from trainmark.run.loop import build_trainer
from trainmark.workloads import resolve
from trainmark.workloads.distilbert.data import SentenceBatch, build_data
from trainmark.workloads.distilbert.runs import DistilbertRun, Model, distilbert_demo
from trainmark.workloads.distilbert.step import SentenceTrainer

CPU = torch.device("cpu")
MODEL = Model(vocabulary=200, positions=32, hidden=48, layers=3, heads=4, feed_forward=96)
NO_DROPOUT = dataclasses.replace(MODEL, dropout=0.0, attention_dropout=0.0, head_dropout=0.0)

FLAGS = (
    *("--synthetic-sentences", "100", "--global-batch", "16", "--micro-batch", "8"),
    *("--model.hidden", "16", "--model.feed-forward", "32", "--epochs", "1"),
    *("--device", "cpu", "--warmup-clock", "1", "--log-every", "1", "--no-initial-evaluation"),
)


def config(devices: int = 1, device: torch.device = CPU, **changes: Any) -> DistilbertRun:
    """The small run, resolved: 100 sentences in batches of 16, the last one of 4."""
    run = dataclasses.replace(
        distilbert_demo(),
        device=device.type,  # type: ignore[arg-type]
        compile=False,
        model=MODEL,
        global_batch=16,
        micro_batch=8,
        eval_batch=24,
        synthetic_sentences=100,
        epochs=2,
        linear_decay=False,
    )
    return resolve(dataclasses.replace(run, **changes), cluster(device, devices))


def trainer(cfg: DistilbertRun, mesh: Mesh | None = None) -> SentenceTrainer:
    built = build_trainer(cfg, workloads.load("distilbert"), mesh or single(CPU))
    assert isinstance(built, SentenceTrainer)
    return built


def batches(cfg: DistilbertRun, split: str = "train") -> list[SentenceBatch]:
    return list(build_data(cfg, split, 0, 1))


def gradients(built: SentenceTrainer) -> dict[str, torch.Tensor]:
    found = {name: p.grad for name, p in built.model.named_parameters()}
    assert all(gradient is not None for gradient in found.values())
    return {name: gradient.clone() for name, gradient in found.items() if gradient is not None}


def write_dataset(folder: Path, lengths: list[int], vocabulary: int = 200) -> Path:
    """Random sentences of the given lengths, in both splits, in the packed form."""
    random = np.random.default_rng(0)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    tokens = random.integers(5, vocabulary, offsets[-1])
    made = Sentences(tokens, offsets, random.integers(0, 2, len(lengths)))
    for split in sentences.SPLITS:
        sentences.save_packed(folder, split, made)
    (folder / "packed" / sentences.MANIFEST).write_text('{"schema": "trainmark.sentences/1"}')
    return folder
