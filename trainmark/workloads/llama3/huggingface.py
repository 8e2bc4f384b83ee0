"""Hugging Face's folders: config.json and safetensors, in and out. Our names are theirs."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from trainmark.errors import InputError, raise_all
from trainmark.interop.model_folder import read_config, write_shards
from trainmark.workloads.llama3.runs import Model

_KEYS = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "ffn": "intermediate_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "vocab": "vocab_size",
    "norm_eps": "rms_norm_eps",
}
# What this network has no code for.
_FIXED = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}


def read_model(folder: Path) -> Model:
    """The network that a Hugging Face folder describes."""
    config, path = read_config(folder), folder / "config.json"
    if config.get("model_type") != "llama":
        raise InputError(f"{folder} holds a {config.get('model_type')!r} model; expected 'llama'.")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        raise InputError(f"{folder}: scaled rotary positions ({rope}) are not supported.")
    missing = [key for key in _KEYS.values() if key not in config]
    if missing:
        raise InputError(f"{path} has no {', '.join(missing)}.")
    width = config["hidden_size"] // max(config["num_attention_heads"], 1)
    expected = _FIXED | {"head_dim": width}
    raise_all(
        f"{path}: {key} {config[key]!r} is not supported; expected {value!r}."
        for key, value in expected.items()
        if config.get(key) not in (None, value)
    )
    theta = rope.get("rope_theta", config.get("rope_theta", 10_000.0))
    return Model(
        **{field: config[key] for field, key in _KEYS.items()},
        rope_theta=float(theta),
        init_std=config.get("initializer_range", 0.02),
    )


def config_json(model: Model, sequence: int, dtype: str) -> dict[str, Any]:
    """The config.json that `transformers` loads."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **{key: getattr(model, field) for field, key in _KEYS.items()},
        "head_dim": model.head_dim,
        "rope_theta": model.rope_theta,
        "max_position_embeddings": sequence,
        "initializer_range": model.init_std,
        **_FIXED,
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
    }


def their_name(name: str) -> str:
    return name if name.startswith("lm_head.") else f"model.{name}"


class Weights:
    """The tensors of a Hugging Face folder, read one at a time."""

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        index = self._folder / "model.safetensors.index.json"
        if index.is_file():
            self._files = json.loads(index.read_text())["weight_map"]
        else:
            self._files = dict.fromkeys(self._names("model.safetensors"), "model.safetensors")

    def _names(self, file: str) -> Iterable[str]:
        from safetensors import safe_open

        path = self._folder / file
        if not path.is_file():
            raise InputError(f"{self._folder} has neither model.safetensors nor its index.")
        with safe_open(path, "pt") as opened:
            return list(opened.keys())

    def read(self, name: str, device: Any) -> Any:
        """A whole parameter by our name; a tied head is the embedding."""
        from safetensors import safe_open

        theirs = their_name(name)
        if theirs == "lm_head.weight" and theirs not in self._files:
            theirs = "model.embed_tokens.weight"
        if theirs not in self._files:
            raise InputError(f"{self._folder} has no tensor {theirs!r}.")
        with safe_open(self._folder / self._files[theirs], "pt", device=str(device)) as opened:
            return opened.get_tensor(theirs)


def save(folder: Path, model: Model, sequence: int, tensors: dict[str, Any]) -> None:
    """Write whole tensors, by our names, as a folder that `transformers` loads."""
    folder.mkdir(parents=True, exist_ok=True)
    dtype = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
    theirs = {their_name(name): tensor for name, tensor in tensors.items()}
    write_shards(
        folder,
        {name: tensor.nbytes for name, tensor in theirs.items()},
        lambda names: {name: theirs[name].contiguous().cpu() for name in names},
    )
    (folder / "config.json").write_text(
        json.dumps(config_json(model, sequence, dtype), indent=2) + "\n"
    )
