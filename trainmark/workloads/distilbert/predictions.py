"""Sentences of files in, classes and their probabilities out: `trainmark predict`."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from trainmark.corpus import sentence_files
from trainmark.corpus.sentence_files import Part
from trainmark.errors import InputError
from trainmark.scoring import BadRows, RawFiles, ScoredRows, Served
from trainmark.workloads.distilbert import serving
from trainmark.workloads.distilbert.runs import DistilbertRun
from trainmark.workloads.distilbert.step import class_columns


def score_files(
    served: Served[DistilbertRun], raw: RawFiles, folder: Path, done: int
) -> Iterator[ScoredRows]:
    """See `contract.Definition.score_files`."""
    scorer = serving.load(served)
    parts = sentence_files.parts(list(map(Path, raw.patterns)), raw.column, raw.keep)
    for part in parts:
        rows = _rows_to_score(part, raw.bad_rows)
        if done > 0:
            done -= len(rows)
            continue
        sentences = [part.sentences[row] or "" for row in rows]
        kept = part.kept.take(pa.array(rows, pa.int64())) if raw.keep else None
        yield ScoredRows(answers=_answers(scorer, sentences), kept=kept, share=part.share)


def _rows_to_score(part: Part, bad_rows: BadRows) -> list[int]:
    """The rows that have a sentence; with --bad-rows keep, all: nothing is an empty one."""
    empty = {row for row, text in enumerate(part.sentences) if not (text or "").strip()}
    if empty and bad_rows == "stop":
        raise InputError(
            f"{part.path}:{part.line + min(empty)}: the sentence is empty. With --bad-rows skip "
            "such rows are left out, with --bad-rows keep they are scored as they are."
        )
    left_out = empty if bad_rows == "skip" else set()
    return [row for row in range(len(part.sentences)) if row not in left_out]


def _answers(scorer: serving.SentenceScorer, sentences: list[str]) -> dict[str, np.ndarray]:
    found: Any = scorer.score([sentences]) if sentences else []
    probabilities = torch.as_tensor(found).reshape(-1, scorer.facts["classes"])
    return {name: column.numpy() for name, column in class_columns(probabilities).items()}
