"""A trained sentence classifier for `trainmark serve`: sentences in, class probabilities out."""

import dataclasses
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainmark.checkpoint import folders
from trainmark.checkpoint.run_tensors import read_weights
from trainmark.config import filled
from trainmark.contract import MODEL_FOLDER
from trainmark.corpus import sst2
from trainmark.corpus.sentences import Sentences
from trainmark.errors import InputError
from trainmark.interop.model_folder import read_config
from trainmark.scoring import Served, TensorSpec
from trainmark.workloads.distilbert import layouts, weights
from trainmark.workloads.distilbert.data import packed
from trainmark.workloads.distilbert.model import SentenceClassifier, build_model, init_weights
from trainmark.workloads.distilbert.runs import BUDGET_MULTIPLE, DistilbertRun

TOGETHER = 64
"""Sentences that go through the model at once, of similar length."""
SHORTEST = 16


def load(served: Served[DistilbertRun]) -> "SentenceScorer":
    """The model of a run, or of a folder in Hugging Face's layout, and its tokenizer."""
    if served.data is not None or served.values != "auto":
        raise InputError("--data and --values are for a DLRM; sentences are text in any case.")
    facts: dict[str, Any] = {"name": served.folder.name, "workload": "distilbert", "step": None}
    if served.run is None:
        cfg, tensors = _of_folder(served.folder, served.device)
        places = [served.folder]
    else:
        cfg = served.run
        path = filled(served.checkpoint)
        state = folders.read_state(path)
        facts |= {"name": cfg.name, "step": state["progress"]["step"]}
        facts["samples"] = state["data"]["samples"]
        tensors = {name: read.to(served.device) for name, read in read_weights(path).items()}
        places = [served.folder / MODEL_FOLDER, *weights.tokenizer_folders(cfg)]
    longest = min(cfg.sequence_length, cfg.model.positions)
    cfg = dataclasses.replace(cfg, mode="packed", precision="fp32")
    tokenizer = sst2.load_tokenizer(_tokenizer_folder(places, facts["name"]), longest)
    return SentenceScorer(cfg, tensors, tokenizer, facts | {"longest_tokens": longest})


def _of_folder(folder: Path, device: str) -> tuple[DistilbertRun, dict[str, Tensor]]:
    described = read_config(folder)
    kinds = described.get("architectures") or []
    if not any("ForSequenceClassification" in kind for kind in kinds):
        raise InputError(
            f"{folder} is no trained sentence classifier: config.json has the architectures "
            f"{kinds}, expected one ...ForSequenceClassification."
        )
    if layouts.weights_file(folder) is None:
        raise InputError(
            f"{folder} holds no {' or '.join(layouts.WEIGHT_FILES)}. Give the folder of the run, "
            f"or its folder {MODEL_FOLDER}."
        )
    # Of two classes, which is the usual number, config.json need not say anything.
    network = layouts.read_model(folder, labels=len(described.get("id2label", ())) or 2)
    cfg = DistilbertRun(
        name=folder.name,
        weights=str(folder),
        model=network,
        sequence_length=network.positions,
        precision="fp32",
    )
    model = build_model(cfg)
    init_weights([model], cfg, torch.device(device))
    return cfg, {name: parameter.detach() for name, parameter in model.named_parameters()}


def _tokenizer_folder(places: list[Path], name: str) -> Path:
    for place in places:
        if any((place / file).is_file() for file in ("tokenizer.json", "vocab.txt")):
            return place
    raise InputError(
        f"{name} has no tokenizer to read sentences with: expected tokenizer.json or vocab.txt in "
        f"{' or '.join(map(str, places))}."
    )


class SentenceScorer:
    """Scores sentences; see `scoring.Scorer`.

    Args:
        cfg: of a packed model in fp32.
        tensors: its weights, on the device to score on.
        tokenizer: that of the training data; cuts what is too long.
        facts: what is known of the model.
    """

    answer = "probabilities"

    def __init__(
        self, cfg: DistilbertRun, tensors: dict[str, Tensor], tokenizer: Any, facts: dict[str, Any]
    ) -> None:
        self._cfg, self._weights, self._tokenizer = cfg, tensors, tokenizer
        self._device = next(iter(tensors.values())).device
        self._classifier = cache(self._build_classifier)
        self.facts = facts | {
            "requests": "Sentences, as texts.",
            "classes": cfg.model.labels,
        }
        self.example = {"sentences": ["a gripping film", "not worth the time"]}
        self.inputs = [TensorSpec(name="sentences", datatype="BYTES", shape=(-1,))]
        self.output = TensorSpec(
            name="probabilities", datatype="FP32", shape=(-1, cfg.model.labels)
        )

    def read(self, body: dict[str, Any]) -> list[str]:
        sentences = body.get("sentences")
        if body.keys() != {"sentences"} or not isinstance(sentences, list):
            received = ", ".join(map(repr, body)) or "nothing"
            raise InputError(f"The body has {received}; expected 'sentences', a list of texts.")
        for number, text in enumerate(sentences):
            if not isinstance(text, str) or not text.strip():
                shown = "null" if text is None else f"{text!r:.60}"
                raise InputError(f"Sentence {number} is {shown}, expected a text.")
        return sentences

    def read_tensors(self, tensors: Mapping[str, NDArray[Any]]) -> list[str]:
        try:
            texts = [text.decode() for text in tensors["sentences"].tolist()]
        except UnicodeDecodeError as error:
            raise InputError(f"'sentences' has a text that is not UTF-8: {error}.") from None
        return self.read({"sentences": texts})

    @torch.inference_mode()
    def score(self, requests: Sequence[Any]) -> NDArray[np.float32]:
        rows = list(chain.from_iterable(requests))
        sentences = sst2.tokenise(self._tokenizer, rows, [0] * len(rows))
        order = np.argsort(sentences.lengths, kind="stable")
        found = np.empty((len(rows), self._cfg.model.labels), np.float32)
        for start in range(0, len(rows), TOGETHER):
            group = order[start : start + TOGETHER]
            found[group] = self._probabilities(sentences, group).cpu().numpy()
        return found

    def _probabilities(self, sentences: Sentences, group: Any) -> Tensor:
        longest = int(sentences.lengths[group].max())
        room = min(1 << max(longest - 1, SHORTEST - 1).bit_length(), self._cfg.model.positions)
        layout = packed(sentences, group, len(group), room, BUDGET_MULTIPLE)
        tokens = [
            torch.from_numpy(array[0].astype(dtype)).to(self._device)
            for array, dtype in (
                (layout.ids_KN, np.int32),
                (layout.positions_KN, np.int32),
                (layout.bounds, np.int32),
                (layout.first_KS, np.int64),
            )
        ]
        return self._classifier(room)(*tokens).softmax(1)

    def _build_classifier(self, longest: int) -> SentenceClassifier:
        """A classifier for sentences of up to `longest` tokens; all share their weights."""
        model = build_model(dataclasses.replace(self._cfg, longest=longest))
        model.load_state_dict(self._weights, assign=True)
        return model.eval()
