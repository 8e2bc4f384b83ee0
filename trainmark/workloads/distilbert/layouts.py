"""Hugging Face's two layouts of this encoder: their config.json, and their parameter names.

Ours fuses query, key and value into one matrix. A BERT's token-type embeddings are folded into its
position embeddings, since every token of a single sentence has type 0. No torch here.
"""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainmark.errors import InputError, raise_all
from trainmark.interop.model_folder import read_config
from trainmark.workloads.distilbert.runs import Model

WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")
# Our field -> its key in config.json.
_CONFIG_KEYS = {
    "distilbert": {
        "vocabulary": "vocab_size",
        "positions": "max_position_embeddings",
        "hidden": "dim",
        "layers": "n_layers",
        "heads": "n_heads",
        "feed_forward": "hidden_dim",
        "dropout": "dropout",
        "attention_dropout": "attention_dropout",
        "head_dropout": "seq_classif_dropout",
    },
    "bert": {
        "vocabulary": "vocab_size",
        "positions": "max_position_embeddings",
        "hidden": "hidden_size",
        "layers": "num_hidden_layers",
        "heads": "num_attention_heads",
        "feed_forward": "intermediate_size",
        "dropout": "hidden_dropout_prob",
        "attention_dropout": "attention_probs_dropout_prob",
        "layer_norm_eps": "layer_norm_eps",
    },
}
_ARCHITECTURES = {
    "distilbert": "DistilBertForSequenceClassification",
    "bert": "BertForSequenceClassification",
}


def read_model(folder: Path, labels: int) -> Model:
    """The network that a Hugging Face folder describes, with `labels` classes."""
    config = read_config(folder)
    layout = config.get("model_type")
    if layout not in _CONFIG_KEYS:
        raise InputError(
            f"{folder} holds a {layout!r} model; expected one of: {', '.join(_CONFIG_KEYS)}."
        )
    keys = _CONFIG_KEYS[layout]
    activation = config.get("activation", config.get("hidden_act"))
    positions = config.get("position_embedding_type", "absolute")
    raise_all(
        [f"{folder}/config.json has no {key}." for key in keys.values() if key not in config]
        + [f"{folder}: activation {activation!r} is not supported; expected 'gelu'."]
        * (activation != "gelu")
        + [f"{folder}: {positions!r} positions are not supported; expected 'absolute'."]
        * (positions != "absolute")
    )
    fields: dict[str, Any] = {ours: config[theirs] for ours, theirs in keys.items()}
    if layout == "bert":
        given = config.get("classifier_dropout")
        fields["head_dropout"] = fields["dropout"] if given is None else given
    return Model(layout=layout, labels=labels, **fields)


def config_json(model: Model) -> dict[str, Any]:
    """The config.json with which `transformers` builds the same network."""
    fields = dataclasses.asdict(model)
    config = {theirs: fields[ours] for ours, theirs in _CONFIG_KEYS[model.layout].items()}
    extra: dict[str, Any] = {"activation": "gelu", "sinusoidal_pos_embds": False}
    if model.layout == "bert":
        extra = {
            "hidden_act": "gelu",
            "classifier_dropout": model.head_dropout,
            "type_vocab_size": 2,
        }
    labels = range(model.labels)
    return {
        "architectures": [_ARCHITECTURES[model.layout]],
        "model_type": model.layout,
        **config,
        **extra,
        "pad_token_id": 0,
        "id2label": {str(i): f"LABEL_{i}" for i in labels},
        "label2id": {f"LABEL_{i}": i for i in labels},
    }


def weights_file(folder: Path) -> Path | None:
    """The file of tensors in a Hugging Face folder."""
    found = [folder / name for name in WEIGHT_FILES if (folder / name).is_file()]
    return found[0] if found else None


# --- parameter names


def encoder_names(model: Model) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Our parameter name, with its Hugging Face name (three of them for the fused QKV)."""
    yield from _EMBEDDINGS
    for layer in range(model.layers):
        prefix = _BLOCK_PREFIX[model.layout].format(layer)
        for ours, theirs in _BLOCKS[model.layout].items():
            for part in ("weight", "bias"):
                names = tuple(f"{prefix}{name}.{part}" for name in theirs)
                yield f"blocks.{layer}.{ours}.{part}", names


def head_names(model: Model) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Our parameter names with Hugging Face's, for the classification head."""
    hidden = "pre_classifier" if model.layout == "distilbert" else "bert.pooler.dense"
    for ours, theirs in (("head.hidden", hidden), ("head.output", "classifier")):
        for part in ("weight", "bias"):
            yield f"{ours}.{part}", (f"{theirs}.{part}",)


_EMBEDDINGS = (
    ("embeddings.words.weight", ("embeddings.word_embeddings.weight",)),
    ("embeddings.positions.weight", ("embeddings.position_embeddings.weight",)),
    ("embeddings.norm.weight", ("embeddings.LayerNorm.weight",)),
    ("embeddings.norm.bias", ("embeddings.LayerNorm.bias",)),
)
TOKEN_TYPES = "embeddings.token_type_embeddings.weight"
_BLOCK_PREFIX = {"distilbert": "transformer.layer.{}.", "bert": "encoder.layer.{}."}
_BLOCKS = {
    "distilbert": {
        "qkv": ("attention.q_lin", "attention.k_lin", "attention.v_lin"),
        "attention_output": ("attention.out_lin",),
        "attention_norm": ("sa_layer_norm",),
        "expand": ("ffn.lin1",),
        "contract": ("ffn.lin2",),
        "output_norm": ("output_layer_norm",),
    },
    "bert": {
        "qkv": ("attention.self.query", "attention.self.key", "attention.self.value"),
        "attention_output": ("attention.output.dense",),
        "attention_norm": ("attention.output.LayerNorm",),
        "expand": ("intermediate.dense",),
        "contract": ("output.dense",),
        "output_norm": ("output.LayerNorm",),
    },
}
