"""A trained DLRM for plain PyTorch; `trainmark export` puts this file beside the weights.

    from model import load

    model = load(".")
    clicks = model(numerical, ids)     # float [B, N] and int [B, F] -> probabilities [B]

It needs torch and safetensors alone. Numerical features are those of the prepared dataset:
ln(x + 3) of Criteo's columns and of those that were prepared as `log`, others plain. Ids are the
numbers that its vocabularies give; `config.json` has their order.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import linear, pad


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
        x_BD = self._perceptron("bottom", numerical_BN.float(), last_relu=True)
        rows = [self._rows(table, ids_B) for table, ids_B in enumerate(ids_BF.long().unbind(1))]
        rows = [pad(r, (0, x_BD.shape[1] - r.shape[1])) for r in rows]  # of narrower tables
        vectors_BVD = torch.stack([x_BD, *rows], dim=1)
        dots_BVV = vectors_BVD @ vectors_BVD.mT
        V = vectors_BVD.shape[1]
        high, low = torch.tril_indices(V, V, offset=-1, device=x_BD.device)
        pairs_BP = dots_BVV.flatten(1).index_select(1, high * V + low)
        joined = torch.cat([x_BD, pairs_BP], dim=1)
        logits_B = self._perceptron("top", joined, last_relu=False).squeeze(1)
        return (logits_B + self.config.get("logit_offset", 0.0)).sigmoid()

    def _perceptron(self, name: str, x: Tensor, *, last_relu: bool) -> Tensor:
        layers = len(self.config[f"{name}_mlp"])
        for layer in range(layers):
            weight = getattr(self, f"{name}_{2 * layer}_weight")
            x = pad(x, (0, weight.shape[1] - x.shape[1]))  # the interaction is filled up with zeros
            x = linear(x, weight, getattr(self, f"{name}_{2 * layer}_bias"))
            x = x.relu() if last_relu or layer < layers - 1 else x
        return x

    def _rows(self, table: int, ids_B: Tensor) -> Tensor:
        scales: Tensor | None = getattr(self, f"tables_{table}_scales", None)
        if scales is None:
            weight: Tensor = getattr(self, f"tables_{table}_weight")
            return weight.index_select(0, ids_B).float()
        codes: Tensor = getattr(self, f"tables_{table}_codes")
        # As bytes, because not every device selects among 8-bit floating-point numbers.
        codes_BD = codes.view(torch.int8).index_select(0, ids_B).view(codes.dtype)
        return codes_BD.float() * scales.index_select(0, ids_B)[:, None]


def load(folder: str | Path, device: str = "cpu") -> Dlrm:
    """The model in a folder that `trainmark export` wrote."""
    folder = Path(folder)
    config = json.loads((folder / "config.json").read_text())
    tensors: dict[str, Tensor] = {}
    for file in sorted(folder.glob("model*.safetensors")):
        tensors |= load_file(file, device=device)
    return Dlrm(config, tensors).eval()
