"""A trained DLRM for plain PyTorch; `trainmark export` puts this file beside the weights.

    from model import load

    model = load(".")
    clicks = model(numerical, ids)     # float [B, N] and int [B, F] -> probabilities [B]

A feature of several ids has as many columns of `ids`, as config.json says under `hotness`; -1 is no
id. It needs torch and safetensors alone. Numerical features are those of the prepared dataset:
ln(x + 3) of Criteo's columns and of those that were prepared as `log`, others plain. Ids are the
numbers that its vocabularies give; `config.json` has their order.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import linear, pad

MULTIPLIER = 17_364  # of the hash that gives combinations of ids their rows


class Dlrm(nn.Module):
    """Predicts clicks. Tables stay in the types they were trained in; all else is fp32."""

    def __init__(self, config: dict, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        self.config = config
        for name, tensor in tensors.items():
            self.register_buffer(name.replace(".", "_"), tensor)

    @torch.inference_mode()
    def forward(self, numerical_BN: Tensor, ids_BF: Tensor) -> Tensor:
        """The probability of a click for each sample."""
        return self.logits(numerical_BN, ids_BF).sigmoid()

    def logits(self, numerical_BN: Tensor, ids_BF: Tensor) -> Tensor:
        """Before the sigmoid."""
        last_relu = self.config.get("bottom_output", "relu") == "relu"
        x_BD = self._perceptron("bottom", "bottom_mlp", numerical_BN.float(), last_relu=last_relu)
        ids_BF = self._with_crosses(ids_BF.long())
        hotness = self.config.get("hotness") or [1] * len(self.config["table_rows"])
        bags = ids_BF.split(hotness, dim=1) if hotness else []  # torch.export: no empty lists
        rows = [self._pooled(table, ids_BH) for table, ids_BH in enumerate(bags)]
        rows = [pad(r, (0, x_BD.shape[1] - r.shape[1])) for r in rows]  # of narrower tables
        joined = self._interaction(x_BD, torch.stack([x_BD, *rows], dim=1), numerical_BN.float())
        logits_B = self._perceptron("top", "top_mlp", joined, last_relu=False).squeeze(1)
        return logits_B + self.config.get("logit_offset", 0.0)

    def _with_crosses(self, ids_BF: Tensor) -> Tensor:
        """The ids, and behind them those of combinations of several features."""
        crosses = self.config.get("crosses", [])
        if not crosses:
            return ids_BF
        columns = list(ids_BF.unbind(1))
        for cross in crosses:
            rows = self.config["table_rows"][len(columns)]
            mixed = torch.zeros_like(columns[0])
            for feature in cross:
                mixed = (mixed * MULTIPLIER + columns[feature]) % rows
            columns.append(mixed)
        return torch.stack(columns, dim=1)

    def _interaction(self, x_BD: Tensor, vectors_BVD: Tensor, numerical_BN: Tensor) -> Tensor:
        kind = self.config.get("interaction", "dot")
        if kind == "dot":
            return torch.cat([x_BD, self._dot_products(vectors_BVD)], dim=1)
        if kind == "dot_and_inputs":
            rows, products = vectors_BVD[:, 1:].flatten(1), self._dot_products(vectors_BVD)
            return torch.cat([x_BD, products, rows, numerical_BN], dim=1)
        all_BN = vectors_BVD.flatten(1)
        if kind == "dcn":
            return self._cross_network(all_BN)
        if kind == "projection":
            return torch.cat([x_BD, self._projection(all_BN, x_BD.shape[1])], dim=1)
        return all_BN

    def _dot_products(self, vectors_BVD: Tensor) -> Tensor:
        dots_BVV = vectors_BVD @ vectors_BVD.mT
        V = vectors_BVD.shape[1]
        high, low = torch.tril_indices(V, V, offset=-1, device=vectors_BVD.device)
        return dots_BVV.flatten(1).index_select(1, high * V + low)

    def _cross_network(self, first_BN: Tensor) -> Tensor:
        x_BN = first_BN
        for layer in range(self.config["cross_layers"]):
            name = f"interaction_cross_{layer}"
            down: Tensor | None = getattr(self, f"{name}_down_weight", None)  # None: full rank
            y = x_BN if down is None else linear(x_BN, down)
            y = linear(y, getattr(self, f"{name}_up_weight"), getattr(self, f"{name}_up_bias"))
            x_BN = first_BN * y + x_BN
        return x_BN

    def _projection(self, all_BN: Tensor, dim: int) -> Tensor:
        left, right = (
            self._perceptron(f"interaction_{name}", f"{name}_mlp", all_BN, last_relu=True)
            for name in ("branch1", "branch2")
        )
        return (left.unflatten(1, (-1, dim)) @ right.unflatten(1, (dim, -1))).flatten(1)

    def _perceptron(self, name: str, widths: str, x: Tensor, *, last_relu: bool) -> Tensor:
        layers = len(self.config[widths])
        for layer in range(layers):
            weight = getattr(self, f"{name}_{2 * layer}_weight")
            x = pad(x, (0, weight.shape[1] - x.shape[1]))  # zeros fill dot products up
            x = linear(x, weight, getattr(self, f"{name}_{2 * layer}_bias"))
            x = x.relu() if last_relu or layer < layers - 1 else x
        return x

    def _pooled(self, table: int, ids_BH: Tensor) -> Tensor:
        """The sum, or mean, of the rows of each sample's ids; zeros if there are none."""
        if "pooling" not in self.config:  # one id of each feature
            return self._rows(table, ids_BH.squeeze(1))
        there_BH = ids_BH >= 0
        rows = self._rows(table, ids_BH.clamp(min=0).flatten()).unflatten(0, ids_BH.shape)
        sums_BD = (rows * there_BH[:, :, None]).sum(1)
        if self.config["pooling"] == "sum":
            return sums_BD
        return sums_BD / there_BH.sum(1).clamp(min=1)[:, None]

    def _rows(self, table: int, ids_B: Tensor) -> Tensor:
        scales: Tensor | None = getattr(self, f"tables_{table}_scales", None)
        if scales is None:
            weight: Tensor = getattr(self, f"tables_{table}_weight")
            return weight.index_select(0, ids_B).float()
        codes: Tensor = getattr(self, f"tables_{table}_codes")
        # As bytes, because not every device selects among 8-bit floating-point numbers.
        codes_BD = codes.view(torch.int8).index_select(0, ids_B).view(codes.dtype)
        return codes_BD.float() * scales.index_select(0, ids_B)[:, None]


def num_ids(config: Mapping) -> int:
    """Ids of a sample: all columns of `ids`."""
    if "hotness" in config:
        return sum(config["hotness"])
    return len(config["table_rows"]) - len(config.get("crosses", []))


def load(folder: str | Path, device: str = "cpu") -> Dlrm:
    """The model in a folder that `trainmark export` wrote."""
    folder = Path(folder)
    config = json.loads((folder / "config.json").read_text())
    tensors: dict[str, Tensor] = {}
    for file in sorted(folder.glob("model*.safetensors")):
        tensors |= load_file(file, device=device)
    return Dlrm(config, tensors).eval()
